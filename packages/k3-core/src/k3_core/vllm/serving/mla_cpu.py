"""The attention call of MLA layers on a CPU: the contract over the rows that vLLM's cache really holds.

vLLM has no MLA for hybrid models on a CPU. Everything around the call (projections, norms, slots, block tables, chunked
prompts, cached prefixes) is the model's own, so a wrong row or length shows in the tokens. For tests; it reads lengths
back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from k3_core.config import TextConfig
from k3_core.contracts import mla
from k3_core.vllm import compat
from k3_core.vllm.layers.cache import latent_width
from k3_core.vllm.serving.cache import common_page_bytes, latent_page_bytes


@dataclass(frozen=True)
class LatentStep:
    """A step: offsets of the requests' tokens, sequence lengths, block table [R, blocks], slot of each token."""

    bounds: list[int]
    seq_lens: list[int]
    block_table: Tensor
    slot_mapping: Tensor


class LatentBuilder(AttentionMetadataBuilder):
    """Builds a :class:`LatentStep`."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LatentStep:
        """The step that ``common_attn_metadata`` describes."""
        m = common_attn_metadata
        return LatentStep(
            bounds=m.query_start_loc_cpu[: m.num_reqs + 1].tolist(),
            seq_lens=m.seq_lens[: m.num_reqs].tolist(),
            block_table=m.block_table_tensor,
            slot_mapping=m.slot_mapping,
        )


class LatentOnCpuBackend(AttentionBackend):
    """vLLM's name for the stand-in: one latent row a token."""

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's logs."""
        return "K3_MLA_CPU"

    @staticmethod
    def get_impl_cls() -> type:
        """There is no implementation class: the layer computes itself."""
        raise NotImplementedError("the layer computes itself")

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        """Class of the metadata builder."""
        return LatentBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, tokens, width]."""
        return (num_blocks, block_size, head_size)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any block size: rows are gathered by index."""
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """One latent row a token, no values beside it."""
        return replace(spec, head_size_v=0)


class LatentAttentionOnCpu(torch.nn.Module, AttentionLayerBase):
    """Same call as vLLM's ``MLAAttention``."""

    use_direct_call = True

    def __init__(self, text: TextConfig, heads: int, kv_b_proj: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        self.text, self.heads, self.prefix = text, heads, prefix
        self._kv_b_proj = [kv_b_proj]  # in a list: it is a child of the MLA layer, not of this one
        self._kv_b: Tensor | None = None
        self._dtype = vllm_config.model_config.dtype
        self.kv_cache: Any = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def keep_weight(self) -> None:
        """Copy kv_b_proj before vLLM repacks it for the CPU's matrix product."""
        self._kv_b = self._kv_b_proj[0].weight.data.clone()

    def forward(self, q: Tensor, latent: Tensor, shared: Tensor, output_shape: Any = None) -> Tensor:
        """Attention [T, N * v]; zeros without metadata and in padding rows."""
        text = self.text
        step: LatentStep | None = compat.forward_metadata(self.prefix)
        out = q.new_zeros(q.shape[0], self.heads, text.v_head_dim)
        if step is None:
            return out.flatten(1)
        assert self._kv_b is not None, "weights are not loaded"
        pages = compat.latent_pages(self.kv_cache)
        block = pages.shape[1]
        rows = torch.cat([latent, shared.flatten(1)], dim=-1)
        for row, ((start, end), length) in enumerate(zip(pairwise(step.bounds), step.seq_lens, strict=True)):
            if end == start:
                continue
            slots = step.slot_mapping[start:end]
            live = slots >= 0
            pages[slots[live] // block, slots[live] % block] = rows[start:end][live].to(pages.dtype)
            blocks = step.block_table[row, : -(-length // block)].long()
            past = pages[blocks].flatten(0, 1)[:length].to(q.dtype)
            absorbed = end - start == 1 and length > 1
            out[start:end] = mla.attend(q[start:end], past, self._kv_b, text.qk_nope_head_dim, absorbed=absorbed)
        return out.flatten(1)

    def get_attn_backend(self) -> type[LatentOnCpuBackend]:
        """The stand-in's own backend."""
        return LatentOnCpuBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
        """Pages of latent rows, padded to the common size."""
        latent, page = latent_page_bytes(self.text, vllm_config), common_page_bytes(self.text, vllm_config)
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=latent_width(self.text),
            dtype=self._dtype,
            page_size_padded=page if page is not None and page > latent else None,
        )
