"""How large a cache page is on a CPU, where vLLM does not make latent and state pages equal for us.

On a GPU vLLM's platform raises the block size until a latent page holds a state, and pads the state's page. On a CPU
vLLM does not know this model's latent attention (:mod:`k3_nvidia.mla_cpu`), so both pages are padded to the larger one.
"""

from __future__ import annotations

from math import prod
from typing import Any

from k3_core.config import TextConfig


def latent_width(text: TextConfig) -> int:
    """Values of one latent cache row."""
    return text.kv_lora_rank + text.qk_rope_head_dim


def latent_page_bytes(text: TextConfig, vllm_config: Any) -> int:
    """Bytes of ``block_size`` latent rows in the model's dtype."""
    itemsize = vllm_config.model_config.dtype.itemsize
    return int(vllm_config.cache_config.block_size * latent_width(text) * itemsize)


def common_page_bytes(text: TextConfig, vllm_config: Any) -> int | None:
    """Bytes of the page that both kinds of layers use on a CPU; None on a GPU, where vLLM decides."""
    from k3_nvidia import dispatch
    from k3_nvidia.kda import state_dtypes, state_shapes

    if dispatch.device()[0] != "cpu":
        return None
    shapes = state_shapes(text, vllm_config.parallel_config.tensor_parallel_size, vllm_config.num_speculative_tokens)
    state = sum(prod(s) * d.itemsize for s, d in zip(shapes, state_dtypes(vllm_config), strict=True))
    kinds = {text.layer_kind(i) for i in range(text.num_hidden_layers)}
    latent = latent_page_bytes(text, vllm_config)
    return max(latent if "mla" in kinds else 0, state if "kda" in kinds else 0)
