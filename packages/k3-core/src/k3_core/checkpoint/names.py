"""From the names that checkpoints use to the released ones.

Known variations: the text model directly under `language_model.` (older layout), `mm_projector.linear_1/2` for
`proj.0/2`, experts under the alias `mlp`, packed weights already renamed to `.weight`, and text-only checkpoints with
or without the prefix. Source: K3-SPEC 2.3.
"""

import re

from k3_core.checkpoint.table import text_prefix
from k3_core.config import K3Config

_OLDER_TEXT = re.compile(r"^language_model\.(layers\.|embed_tokens\.|norm\.|output_attn_res_)")
_MOE_ALIAS = re.compile(r"(\.layers\.\d+\.)mlp\.(experts|gate|shared_experts|routed_expert_\w+)\.")
_EXPERT_WEIGHT = re.compile(r"\.block_sparse_moe\.experts\.\d+\.w[123]\.weight$")
_PROJECTOR = {"linear_1.": "proj.0.", "linear_2.": "proj.2."}


def canonical_name(name: str, config: K3Config) -> str:
    """The released name of a stored tensor; names that follow no known variation come back unchanged.

    Idempotent. The variations are: `language_model.layers.` -> `language_model.model.layers.` (and the embedding, the
    final norm and the output AttnRes likewise), `mm_projector.linear_1/2.` -> `mm_projector.proj.0/2.`,
    `layers.N.mlp.experts.` (and router, shared experts, latent projections) -> `layers.N.block_sparse_moe.`,
    `experts.E.wN.weight` -> `.weight_packed` where the experts are packed, and the prefix `language_model.` added or
    removed as the architecture wants.
    """
    name = _OLDER_TEXT.sub(r"language_model.model.\1", name)
    for old, new in _PROJECTOR.items():
        if name.startswith("mm_projector." + old):
            name = "mm_projector." + new + name.removeprefix("mm_projector." + old)
    prefix = text_prefix(config)
    if prefix and name.startswith(("model.", "lm_head.")):
        name = prefix + name
    elif not prefix:
        name = name.removeprefix("language_model.")
    name = _MOE_ALIAS.sub(r"\1block_sparse_moe.\2.", name)
    if config.quantization is not None and _EXPERT_WEIGHT.search(name):
        name = name + "_packed"
    return name


def layer_of(name: str) -> int | None:
    """The 0-based decoder layer of a text tensor's released name; None outside the layers."""
    match = re.match(r"(?:language_model\.)?model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None
