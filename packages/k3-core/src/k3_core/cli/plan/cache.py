"""The hybrid cache as vLLM lays it out: latent rows of MLA and states of KDA share one pool of equally large pages.

What vLLM does (read in ``platforms/interface.py`` and ``v1/core/kv_cache_utils.py`` of 0.32, checked by a test): the
block of MLA grows in steps of 128 tokens until its page is at least one layer's KDA state; KDA pages are padded to the
same size; layers are dealt into groups as large as the smaller kind (padding the last group); one block id addresses
one page of every layer of a group. A sequence holds ceil(tokens / block) blocks for each MLA group and, for each KDA
group, one block, or two with prefix caching (mode "align": the working state and a snapshot).
"""

from __future__ import annotations

from dataclasses import dataclass

from k3_core.config import K3Config

#: MLA blocks of hybrid models are multiples of this.
BLOCK_STEP = 128
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True)
class CacheShape:
    """One rank's cache. Sizes in bytes; ``pages_per_block`` layers are addressed by one block id on this rank."""

    block_size: int
    page_bytes: int
    state_bytes: int
    latent_bytes: int
    kda_groups: int
    mla_groups: int
    pages_per_block: int
    states_per_group: int

    @property
    def block_bytes(self) -> int:
        """Memory that one block id costs on this rank."""
        return self.page_bytes * self.pages_per_block

    def blocks_of(self, tokens: int) -> int:
        """Block ids that one sequence of ``tokens`` tokens holds."""
        return self.kda_groups * self.states_per_group + self.mla_groups * -(-tokens // self.block_size)

    def tokens_in(self, num_blocks: int, sequences: int) -> int:
        """Tokens that ``sequences`` equally long sequences hold together in ``num_blocks`` (one is the null block)."""
        left = (num_blocks - 1) // sequences - self.kda_groups * self.states_per_group
        return max(left, 0) // max(self.mla_groups, 1) * self.block_size * sequences


def state_bytes(config: K3Config, tp: int, state_dtype: str = "float32", num_spec: int = 0) -> int:
    """Bytes of one KDA layer's state of one request on one rank: convolution columns (model dtype) and recurrence."""
    linear = config.text.linear_attn
    columns = linear.short_conv_kernel_size - 1 + num_spec
    conv = 3 * linear.projection_size // tp * columns * _ITEM[config.dtype]
    return conv + linear.num_heads // tp * linear.head_dim**2 * _ITEM[state_dtype]


def latent_bytes(config: K3Config, kv_dtype: str = "auto") -> int:
    """Bytes of one token in one MLA layer; every TP rank holds all of them."""
    item = _ITEM[config.dtype if kv_dtype == "auto" else kv_dtype]
    return (config.text.kv_lora_rank + config.text.qk_rope_head_dim) * item


def cache_shape(
    config: K3Config, tp: int, stage: range, *, kv_dtype: str, state_dtype: str, prefix_caching: bool, num_spec: int = 0
) -> CacheShape:
    """The cache of a rank whose pipeline stage has the layers ``stage``."""
    text = config.text
    layers = range(text.num_hidden_layers)
    kda = [i for i in layers if text.layer_kind(i) == "kda"]
    mla = [i for i in layers if text.layer_kind(i) == "mla"]
    state, row = state_bytes(config, tp, state_dtype, num_spec), latent_bytes(config, kv_dtype)
    block = BLOCK_STEP * -(-state // (BLOCK_STEP * row))
    counts = [len(kind) for kind in (kda, mla) if kind]
    group = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = [kind[i :: -(-len(kind) // group)] for kind in (kda, mla) if kind for i in range(-(-len(kind) // group))]
    return CacheShape(
        block_size=block,
        page_bytes=block * row,
        state_bytes=state,
        latent_bytes=row,
        kda_groups=-(-len(kda) // group),
        mla_groups=-(-len(mla) // group),
        pages_per_block=max(sum(layer in stage for layer in members) for members in groups),
        states_per_group=(2 if prefix_caching else 1) + num_spec,
    )
