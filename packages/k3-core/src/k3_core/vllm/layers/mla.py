"""An MLA layer: low-rank projections, latent rows in vLLM's cache, attention over gathered rows, output gate.

The cache holds one row (normed latent and shared key part) per token. A request with one token and a past attends in
the absorbed form, all others in the unabsorbed form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from k3_core.config import TextConfig
from k3_core.contracts import mla
from k3_core.vllm import compat
from k3_core.vllm.backends import LatentBackend, Rows, Step
from k3_core.vllm.layers import cache
from k3_core.vllm.layers.weights import Weight


class KimiLatentAttention(torch.nn.Module, AttentionLayerBase):
    """MLA over a ragged batch, with its latent rows in vLLM's cache."""

    def __init__(self, text: TextConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, heads = text.hidden_size, text.num_attention_heads
        self.text, self.prefix, self.heads = text, prefix, heads
        if text.q_lora_rank is None:
            self.q_proj = Weight(heads * text.qk_head_dim, hidden)
        else:
            self.q_a_proj, self.q_a_layernorm = Weight(text.q_lora_rank, hidden), Weight(text.q_lora_rank)
            self.q_b_proj = Weight(heads * text.qk_head_dim, text.q_lora_rank)
        self.kv_a_proj_with_mqa = Weight(cache.latent_width(text), hidden)
        self.kv_a_layernorm = Weight(text.kv_lora_rank)
        self.kv_b_proj = Weight(heads * (text.qk_nope_head_dim + text.v_head_dim), text.kv_lora_rank)
        if text.mla_use_output_gate:
            self.g_proj = Weight(heads * text.v_head_dim, hidden)
        self.o_proj = Weight(hidden, heads * text.v_head_dim)

        self._dtype = vllm_config.model_config.dtype
        self.kv_cache: Any = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def forward(self, x: Tensor) -> Tensor:
        """Normed hidden states [T, H] -> [T, H]; zeros where the step has no metadata and in padding rows."""
        step = compat.forward_metadata(self.prefix)
        if step is None:
            return torch.zeros_like(x)
        pages = compat.latent_pages(self.kv_cache)
        out = x.new_zeros(x.shape[0], self.heads, self.text.v_head_dim)
        for rows, absorbed in ((step.prefill, False), (step.decode, True)):
            if rows:
                out[rows.tokens] = self._attend(x[rows.tokens], rows, step, pages, absorbed)
        attention = out.flatten(1)
        if self.text.mla_use_output_gate:
            attention = mla.apply_gate(attention, self.g_proj(x))
        return self.o_proj(attention)

    def _attend(self, x: Tensor, rows: Rows, step: Step, pages: Tensor, absorbed: bool) -> Tensor:
        """Attention [tokens, N, v] of the requests in ``rows`` over their past and themselves; writes their rows."""
        eps = self.text.low_rank_norm_eps
        block_size = pages.shape[1]
        new = mla.cache_rows(x, self.kv_a_proj_with_mqa.weight, self.kv_a_layernorm.weight, eps)
        slots = step.slot_mapping[rows.tokens]
        pages[slots // block_size, slots % block_size] = new.to(pages.dtype)

        past: list[Tensor] = []
        bounds = [0]
        for request in rows.requests:
            blocks = step.block_table[request.row, : -(-request.seq_len // block_size)]
            past.append(pages[blocks.long()].flatten(0, 1)[: request.seq_len])
            bounds.append(bounds[-1] + request.seq_len)
        return mla.attend(
            self._query(x, eps),
            torch.cat(past).to(x.dtype),
            self.kv_b_proj.weight,
            self.text.qk_nope_head_dim,
            absorbed=absorbed,
            cu_seqlens_q=rows.bounds,
            cu_seqlens_k=bounds,
        )

    def _query(self, x: Tensor, eps: float) -> Tensor:
        if self.text.q_lora_rank is None:
            return mla.query(x, None, None, self.q_proj.weight, self.heads)
        return mla.query(x, self.q_a_proj.weight, self.q_a_layernorm.weight, self.q_b_proj.weight, self.heads, eps)

    # ------------------------------------------------------------------------------------ what vLLM asks of the layer

    def get_attn_backend(self) -> type[LatentBackend]:
        """Our own backend."""
        return LatentBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
        """Pages of latent rows, padded to the common size."""
        latent, _, page = cache.page_bytes(self.text, vllm_config)
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=cache.latent_width(self.text),
            dtype=self._dtype,
            page_size_padded=page if page > latent else None,
        )
