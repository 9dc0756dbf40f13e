"""Latent attention on NVIDIA GPUs: the shared layer, its norms one launch and its output gate another.

FlashAttention 3 cuts a sequence into splits, gives a split whose sum is NaN the weight zero and leaves its NaN behind
(hopper/softmax.h ``finalize`` and hopper/flash_fwd_combine_kernel.h of Dao-AILab/flash-attention): a latent row that is
not finite can give a finite result, for its own token and for all later ones. So the launch that norms the row looks at
it and makes the output gate of its request's last row NaN; the logits of that row say the rest
(:mod:`k3_core.vllm.serving.isolation`). Rows of earlier steps are looked at again with ``K3_CHECK_LATENT=1`` only
(:mod:`k3_nvidia.kernels.latent_check`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_core.config import TextConfig
from k3_core.vllm import compat
from k3_core.vllm.serving.mla_layer import LatentAttention
from k3_nvidia import dispatch


class KimiLatentAttention(LatentAttention):
    """MLA over a ragged batch, with its latent rows in vLLM's cache."""

    def __init__(self, text: TextConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__(text, vllm_config, prefix)
        self._kernels = dispatch.device()[0] == "cuda"
        self._checks = False
        if self._kernels:
            from k3_nvidia.kernels import latent_check

            self._checks = latent_check.wanted()
            if self._checks:
                latent_check.keep_tables()
        self._nobody = torch.zeros(1, dtype=torch.int32)  # bounds of no request; made here, where no graph is captured

    def marks(self, projected: Tensor) -> Tensor | None:
        """The output gate's columns, which nobody reads before the attention's result is there; else zeros."""
        if not self._kernels:
            return None
        if self.text.mla_use_output_gate:
            return self.rows.columns(projected, "g_proj")
        return projected.new_zeros(projected.shape[0], 1)

    def norms(
        self, low: Tensor | None, latent: Tensor, shared: Tensor, marks: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Both norms, the zeros that the attention writes over, and marks of requests whose rows are not finite."""
        if not self._kernels:
            return super().norms(low, latent, shared, marks)
        from k3_nvidia.kernels import glue, latent_check

        step = compat.forward_metadata(self.attention_name)
        # Offsets of the step's requests, int32 [B + 1] on the device, as vLLM's attention is given them.
        bounds = getattr(step, "query_start_loc", None)
        if self._checks and step is not None and marks is not None:
            latent_check.of_step(marks, compat.latent_pages(self.attn.kv_cache), self.attn.kv_cache_dtype, step)
        weight = None if low is None else self.q_a_layernorm.weight
        width = self.attention_heads * self.text.v_head_dim
        eps = self.text.low_rank_norm_eps
        return glue.low_rank_norms(
            low,
            latent,
            weight,
            self.kv_a_layernorm.weight,
            eps,
            width,
            shared=shared,
            marks=marks,
            bounds=self._nobody if bounds is None else bounds,
        )

    def gated(self, attention: Tensor, gate: Tensor) -> Tensor:
        """attention * sigmoid(gate), rounded as the two operations are."""
        if not self._kernels:
            return super().gated(attention, gate)
        from k3_nvidia.kernels import glue

        return glue.sigmoid_mul(attention, gate)
