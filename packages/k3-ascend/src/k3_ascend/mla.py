"""A gated NoPE-MLA layer over vllm-ascend's MLA backend.

    [q_a | kv_a] = x W^T, g = x Wg^T        q_a and kv_a whole on every rank, g by head
    attention    = AscendMLABackend         norms (eps 1e-6), up-projections, cache, attention of this step's rows
    y            = (attention . sigmoid(g)) Wo^T

The backend's implementation runs everything from the first projection to the output projection. Here it is given the
output projection's place only: an object that returns what it gets, so that the gate can be applied before the real
projection. Nothing is rotated: the backend multiplies by cosines and sines that it looks up by position, and all of
them are 1 and 0 (its rotation also reorders the columns, in queries and keys alike, which leaves products as they
are).

The attention operators document head counts: 8, 16, 32, 64 or 128 for prefills, powers of two for decoding over pages.
K3 has 96 heads, 12 a rank at TP8. The backend pads the decoding only, so here it is given the next count that both
take: heads behind the model's own have zero rows in the up-projections, and their zeros are cut off.

With attention and recurrent layers in one model, the backend's update of a captured graph must see attention layers
only: it pairs layers and captured operators by position. :func:`only_latent_layers` sees to that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear

from k3_core.config import TextConfig
from k3_core.errors import UnsupportedError
from k3_core.vllm import compat
from k3_core.vllm.serving.modules import Loadable, below, local_linear, norm, row_parallel, tp

_MARK = "_k3_only_latent_layers"
#: Head counts that both attention operators document.
HEAD_COUNTS = (8, 16, 32, 64, 128)


def padded_heads(heads: int) -> int:
    """The smallest documented head count of at least ``heads``. Raises UnsupportedError above the largest."""
    found = next((count for count in HEAD_COUNTS if count >= heads), None)
    if found is None:
        raise UnsupportedError(f"{heads} attention heads a rank: vllm-ascend's MLA takes at most {HEAD_COUNTS[-1]}")
    return found


class _Unprojected:
    """Stands where the backend expects the output projection: gives its argument back.

    weight: the real projection's, for the backend's prefetch.
    """

    def __init__(self, projection: Any) -> None:
        self._projection = [projection]  # in a list: it is the layer's child, not this object's

    @property
    def weight(self) -> Tensor:
        """The real projection's weight."""
        weight: Tensor = self._projection[0].weight
        return weight

    def __call__(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:
        return x, None


class LatentAttention(Loadable):
    """MLA over a ragged batch, with its latent rows in vLLM's cache."""

    def __init__(self, text: TextConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        size, _ = tp()
        self.text, self.heads = text, text.num_attention_heads // size
        self.attention_heads = padded_heads(self.heads)
        self.attention_name = f"{prefix}.attn"
        hidden, eps = text.hidden_size, text.low_rank_norm_eps
        cache_row = text.kv_lora_rank + text.qk_rope_head_dim
        self.q_a_layernorm = None
        if text.q_lora_rank is None:
            self.q_proj = _linear(hidden, self.attention_heads * text.qk_head_dim, f"{prefix}.q_proj")
            self.kv_a_proj_with_mqa = _linear(hidden, cache_row, f"{prefix}.kv_a_proj_with_mqa")
        else:
            self.fused_qkv_a_proj = _linear(hidden, text.q_lora_rank + cache_row, f"{prefix}.fused_qkv_a_proj")
            self.q_a_layernorm = norm(text.q_lora_rank, eps)
            self.q_b_proj = _linear(text.q_lora_rank, self.attention_heads * text.qk_head_dim, f"{prefix}.q_b_proj")
        self.kv_a_layernorm = norm(text.kv_lora_rank, eps)
        self.kv_b_proj = ColumnParallelLinear(
            text.kv_lora_rank,
            size * self.attention_heads * (text.qk_nope_head_dim + text.v_head_dim),
            bias=False,
            quant_config=None,
            prefix=f"{prefix}.kv_b_proj",
        )
        for projection, per_head in self._by_head():
            projection.weight.data[self.heads * per_head :].zero_()
        if text.mla_use_output_gate:
            self.g_proj = local_linear(hidden, self.heads * text.v_head_dim, f"{prefix}.g_proj")
        self.o_proj = row_parallel(text.num_attention_heads * text.v_head_dim, hidden, f"{prefix}.o_proj")
        self.attn = self._attention(vllm_config)
        no_rotation(text.qk_rope_head_dim, vllm_config.model_config)
        only_latent_layers()

    def _by_head(self) -> tuple[tuple[Any, int], tuple[Any, int]]:
        """The projections whose rows are cut by head, padding included, and rows a head."""
        text = self.text
        query = self.q_proj if text.q_lora_rank is None else self.q_b_proj
        return (query, text.qk_head_dim), (self.kv_b_proj, text.qk_nope_head_dim + text.v_head_dim)

    def _attention(self, vllm_config: Any) -> MLAAttention:
        text = self.text
        low_rank = text.q_lora_rank is not None
        attention = MLAAttention(
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
            # What vllm-ascend's implementation takes beside vLLM's arguments:
            rotary_emb=None,
            fused_qkv_a_proj=self.fused_qkv_a_proj if low_rank else None,
            q_b_proj=self.q_b_proj if low_rank else None,
            q_a_layernorm=self.q_a_layernorm,
            q_proj=None if low_rank else self.q_proj,
            kv_a_proj_with_mqa=None if low_rank else self.kv_a_proj_with_mqa,
            kv_a_layernorm=self.kv_a_layernorm,
            o_proj=_Unprojected(self.o_proj),
            layer_name=self.attention_name,
        )
        # vLLM asks the layer, vllm-ascend's implementation has its own part to prepare.
        inherited: Callable[[torch.dtype], None] = attention.process_weights_after_loading

        def process_weights(act_dtype: torch.dtype) -> None:
            inherited(act_dtype)
            attention.impl.process_weights_after_loading(act_dtype)

        attention.process_weights_after_loading = process_weights
        return attention

    def forward(self, x: Tensor) -> Tensor:
        """Normed hidden states [T, H] -> [T, H]; zeros where the step has no metadata and in padding rows."""
        attention = self._attend(x)
        if self.text.mla_use_output_gate:
            # The sigmoid and the product are each rounded to the model's dtype, as released.
            attention = attention * torch.sigmoid(self.g_proj(x))
        result: Tensor = self.o_proj(attention)
        return result

    def _attend(self, x: Tensor) -> Tensor:
        """Attention [T, heads * v] of this step's rows, which are also written to the cache."""
        width = self.heads * self.text.v_head_dim
        out = x.new_zeros(x.shape[0], self.attention_heads * self.text.v_head_dim)
        metadata = compat.forward_metadata(self.attention_name)
        if metadata is None:
            return out[:, :width]
        attended: Tensor = self.attn.impl.forward(
            self.attention_name, x, self.attn.kv_cache, metadata, need_gather_q_kv=False, output=out
        )
        return attended[:, :width]

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors go."""
        text = self.text
        if text.q_lora_rank is None:
            yield "q_proj.weight", self.q_proj.weight[: self.heads * text.qk_head_dim]
            yield from below("kv_a_proj_with_mqa", self.kv_a_proj_with_mqa)
        else:
            fused = self.fused_qkv_a_proj.weight
            yield "q_a_proj.weight", fused[: text.q_lora_rank]
            yield "kv_a_proj_with_mqa.weight", fused[text.q_lora_rank :]
            yield from below("q_a_layernorm", self.q_a_layernorm)
            yield "q_b_proj.weight", self.q_b_proj.weight[: self.heads * text.qk_head_dim]
        yield from below("kv_a_layernorm", self.kv_a_layernorm)
        per_head = text.qk_nope_head_dim + text.v_head_dim
        yield "kv_b_proj.weight", self.kv_b_proj.weight[: self.heads * per_head]
        if text.mla_use_output_gate:
            yield from below("g_proj", self.g_proj)
        yield from below("o_proj", self.o_proj)


def _linear(inputs: int, outputs: int, prefix: str) -> ReplicatedLinear:
    """A matrix of exactly this size whose call gives (product, None), as the backend expects."""
    return ReplicatedLinear(inputs, outputs, bias=False, quant_config=None, prefix=prefix)


def no_rotation(width: int, model_config: Any) -> None:
    """Give vllm-ascend cosines of 1 and sines of 0 for every position, in one row each.

    Raises UnsupportedError where another model of this process has a rotation: the tables are the process's.
    """
    from vllm_ascend.ops import rotary_embedding as tables

    current = tables._cos_cache
    if current is not None and not getattr(tables, "_k3_no_rotation", False):
        raise UnsupportedError(
            "another model of this process rotates its keys; Kimi K3 cannot share vllm-ascend's tables"
        )
    if current is not None and current.shape[-1] == width and current.dtype == model_config.dtype:
        return
    shape = (int(model_config.max_model_len), width)
    tables._cos_cache = torch.ones(1, width, dtype=model_config.dtype).expand(shape)
    tables._sin_cache = torch.zeros(1, width, dtype=model_config.dtype).expand(shape)
    tables._k3_no_rotation = True


def only_latent_layers() -> None:
    """Let vllm-ascend's update of captured graphs see MLA layers only; idempotent."""
    from vllm_ascend.attention.mla_v1 import AscendMLAImpl, AscendMLAMetadata

    original = AscendMLAImpl.update_graph_params
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def update_graph_params(update_stream: Any, forward_context: Any, *args: Any, **kwargs: Any) -> Any:
        whole = forward_context.attn_metadata
        if not isinstance(whole, dict):
            return original(update_stream, forward_context, *args, **kwargs)
        forward_context.attn_metadata = {n: m for n, m in whole.items() if isinstance(m, AscendMLAMetadata)}
        try:
            return original(update_stream, forward_context, *args, **kwargs)
        finally:
            forward_context.attn_metadata = whole

    setattr(update_graph_params, _MARK, True)
    AscendMLAImpl.update_graph_params = staticmethod(update_graph_params)
