"""A gated NoPE-MLA layer: fused low-rank projections, vLLM's MLA attention, output gate, output projection.

Rows of the input projection: q_a and kv_a (whole on every rank), then g by head; without a low rank the queries by
head, then kv_a (and g). The two low-rank norms have eps 1e-6 (K3-SPEC 11.2) and nothing is rotated: vLLM's attention
takes the "rope" part as it is. vLLM chooses the backend, pads few heads where its kernel needs it, decodes in the
absorbed form and reads long contexts in chunks. On a CPU :mod:`k3_core.vllm.serving.mla_cpu` stands in for the
attention call.

A vendor whose attention takes only certain head counts says how many heads to hand over: the heads behind the model's
own have zero rows in the query's and the latent's up-projections, so their result is zero, and it is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.platforms import current_platform

from k3_core.config import TextConfig
from k3_core.vllm import compat
from k3_core.vllm.serving.modules import Loadable, Rows, below, local_linear, norm, row_parallel, tp


class LatentAttention(Loadable):
    """MLA over a ragged batch, with its latent rows in vLLM's cache.

    padded: heads of this rank -> heads that the attention is given; None hands over as many as there are.
    """

    def __init__(
        self, text: TextConfig, vllm_config: Any, prefix: str, *, padded: Callable[[int], int] | None = None
    ) -> None:
        super().__init__()
        size, _ = tp()
        hidden, eps = text.hidden_size, text.low_rank_norm_eps
        self.text, self.heads = text, text.num_attention_heads // size
        self.attention_heads = self.heads if padded is None else padded(self.heads)
        assert self.attention_heads >= self.heads, (self.attention_heads, self.heads)
        self.attention_name = f"{prefix}.attn"
        self.rows = Rows()
        if text.q_lora_rank is None:
            self.rows.add("q_proj", self.heads * text.qk_head_dim)
        else:
            self.rows.add("q_a_proj", text.q_lora_rank)
        self.rows.add("kv_a_proj_with_mqa", text.kv_lora_rank + text.qk_rope_head_dim)
        if text.mla_use_output_gate:
            self.rows.add("g_proj", self.heads * text.v_head_dim)
        self.in_proj = local_linear(hidden, self.rows.padded, f"{prefix}.in_proj")
        self.in_proj.weight.data[self.rows.total :].zero_()
        if text.q_lora_rank is not None:
            self.q_a_layernorm = norm(text.q_lora_rank, eps)
            rows = self.attention_heads * text.qk_head_dim
            self.q_b_proj = local_linear(text.q_lora_rank, rows, f"{prefix}.q_b_proj")
            self.q_b_proj.weight.data[self.heads * text.qk_head_dim :].zero_()
        self.kv_a_layernorm = norm(text.kv_lora_rank, eps)
        per_head = text.qk_nope_head_dim + text.v_head_dim
        self.kv_b_proj = ColumnParallelLinear(
            text.kv_lora_rank,
            size * self.attention_heads * per_head,
            bias=False,
            quant_config=None,
            prefix=f"{prefix}.kv_b_proj",
        )
        self.kv_b_proj.weight.data[self.heads * per_head :].zero_()
        self.o_proj = row_parallel(text.num_attention_heads * text.v_head_dim, hidden, f"{prefix}.o_proj")
        self.attn = self._attention(vllm_config)

    def _attention(self, vllm_config: Any) -> Any:
        text = self.text
        if current_platform.is_cpu():
            from k3_core.vllm.serving.mla_cpu import LatentAttentionOnCpu

            return LatentAttentionOnCpu(text, self.attention_heads, self.kv_b_proj, vllm_config, self.attention_name)
        from vllm.model_executor.layers.attention import MLAAttention

        return MLAAttention(
            num_heads=self.attention_heads,
            scale=text.qk_head_dim**-0.5,
            qk_nope_head_dim=text.qk_nope_head_dim,
            qk_rope_head_dim=text.qk_rope_head_dim,
            v_head_dim=text.v_head_dim,
            q_lora_rank=text.q_lora_rank,
            kv_lora_rank=text.kv_lora_rank,
            kv_b_proj=self.kv_b_proj,
            cache_config=vllm_config.cache_config,
            quant_config=None,
            prefix=self.attention_name,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normed hidden states [T, H] -> [T, H]; zeros where the step has no metadata and in padding rows."""
        text = self.text
        projected = self.in_proj(x)
        latent, shared = self.rows.columns(projected, "kv_a_proj_with_mqa").split(
            [text.kv_lora_rank, text.qk_rope_head_dim], dim=-1
        )
        low = None if text.q_lora_rank is None else self.rows.columns(projected, "q_a_proj")
        marks = self.marks(projected)
        low, latent, out = self.norms(low, latent, shared, marks)
        q = self.rows.columns(projected, "q_proj") if low is None else self.q_b_proj(low)
        q = q.view(-1, q.shape[-1] // text.qk_head_dim, text.qk_head_dim)
        if q.shape[1] < self.attention_heads:
            q = functional.pad(q, (0, 0, 0, self.attention_heads - q.shape[1]))
        attention = self._attend(q, latent, shared.unsqueeze(1), out)
        attention = attention[:, : self.heads * text.v_head_dim]
        if text.mla_use_output_gate:
            attention = self.gated(attention, self.rows.columns(projected, "g_proj"))
        elif marks is not None:
            attention[:, :1] += marks[:, :1]
        result: Tensor = self.o_proj(attention)
        return result

    def marks(self, projected: Tensor) -> Tensor | None:
        """Where a row may be marked as lost: NaN in the first column of [T, >= 1] makes the layer's result NaN there.

        The columns of the output gate, or zeros that are added to the attention's result. None, as here: the vendor's
        attention hands on every value that is not finite, so that nothing needs to be marked.
        """
        return None

    def norms(
        self, low: Tensor | None, latent: Tensor, shared: Tensor, marks: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Norms of the queries' low rank (if there is one) and of the latent, and zeros [T, N * v] for the attention.

        The zeros include the heads of the padding. A vendor may make it one launch; with marks [T, >= 1] it marks the
        last row of every request of which a row for the cache (normed latent, or shared [T, .]) is not finite.
        """
        normed = None if low is None else self.q_a_layernorm(low)
        width = self.attention_heads * self.text.v_head_dim
        return normed, self.kv_a_layernorm(latent), latent.new_zeros(latent.shape[0], width)

    def gated(self, attention: Tensor, gate: Tensor) -> Tensor:
        """attention * sigmoid(gate): sigmoid and product are each rounded to the model's dtype, as released."""
        return attention * torch.sigmoid(gate)

    def _attend(self, q: Tensor, latent: Tensor, shared: Tensor, out: Tensor) -> Tensor:
        """Attention [T, N * v] of q [T, N, nope + rope], padding included; writes latent [T, R], shared [T, 1, .].

        out: zeros of the result's shape.
        """
        if not _known(self.attention_name):
            return out
        attn = self.attn
        if getattr(attn, "use_direct_call", True):
            result: Tensor = attn(q, latent, shared, output_shape=out.shape)
            return result
        # As MLAAttention.forward, but into zeros: padding rows are then defined.
        from vllm.utils.torch_utils import _encode_layer_name

        name = _encode_layer_name(attn.layer_name)
        written = torch.ops.vllm.unified_mla_kv_cache_update(latent, shared, name, attn.kv_cache_dtype, attn._k_scale)
        torch.ops.vllm.unified_mla_attention_with_output(q, latent, shared, out, name, kv_cache_dummy_dep=written)
        return out

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors go."""
        yield from self.rows.parts(self.in_proj.weight)
        if self.text.q_lora_rank is not None:
            yield from below("q_a_layernorm", self.q_a_layernorm)
            yield "q_b_proj.weight", self.q_b_proj.weight[: self.heads * self.text.qk_head_dim]
        yield from below("kv_a_layernorm", self.kv_a_layernorm)
        per_head = self.text.qk_nope_head_dim + self.text.v_head_dim
        yield "kv_b_proj.weight", self.kv_b_proj.weight[: self.heads * per_head]
        yield from below("o_proj", self.o_proj)


def _known(name: str) -> bool:
    """Whether this step may call the attention: vLLM's layer handles None, but not a dict that leaves it out."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    return metadata is None or compat.forward_metadata(name) is not None
