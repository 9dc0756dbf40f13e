"""Latent attention on NVIDIA GPUs: the shared layer, its norms one launch and its output gate another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k3_core.config import TextConfig
from k3_core.vllm.serving.mla_layer import LatentAttention
from k3_nvidia import dispatch


class KimiLatentAttention(LatentAttention):
    """MLA over a ragged batch, with its latent rows in vLLM's cache."""

    def __init__(self, text: TextConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__(text, vllm_config, prefix)
        self._kernels = dispatch.device()[0] == "cuda"

    def norms(self, low: Tensor | None, latent: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Both norms and the zeros that the attention writes over."""
        if not self._kernels:
            return super().norms(low, latent)
        from k3_nvidia.kernels import glue

        weight = None if low is None else self.q_a_layernorm.weight
        width = self.attention_heads * self.text.v_head_dim
        eps = self.text.low_rank_norm_eps
        return glue.low_rank_norms(low, latent, weight, self.kv_a_layernorm.weight, eps, width)

    def gated(self, attention: Tensor, gate: Tensor) -> Tensor:
        """attention * sigmoid(gate), rounded as the two operations are."""
        if not self._kernels:
            return super().gated(attention, gate)
        from k3_nvidia.kernels import glue

        return glue.sigmoid_mul(attention, gate)
