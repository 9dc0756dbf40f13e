"""KDA on NVIDIA GPUs: the shared layer with this wheel's operators and the plan of its prefill kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k3_core.config import TextConfig
from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_nvidia import dispatch


class KimiDeltaAttention(KdaLayer):
    """KDA over a ragged batch, with its states in vLLM's cache."""

    def __init__(self, text: TextConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__(text, vllm_config, prefix, dispatch.choose, _plan)
        self._kernels = dispatch.device()[0] == "cuda"

    def decays(self, low: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """z and beta: for few rows one launch, beyond that a library's product and one launch for beta."""
        if not self._kernels:
            return super().decays(low, logits)
        from k3_nvidia.kernels import glue

        if low.shape[0] <= glue.MAX_ROWS and low.shape[1] <= glue.MAX_INNER and low.shape[0]:
            return glue.kda_inputs(low, logits, self.f_b_proj.weight)
        return self.f_b_proj(low), glue.sigmoid_fp32(logits)

    def _convolved(
        self, qkv: Tensor, conv_state: Tensor, where: tuple[Tensor, ...], plan: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Three dense tensors from the convolution itself: vLLM's FlashKDA operator takes no others."""
        if self._short_conv.name != dispatch.KERNEL:
            return super()._convolved(qkv, conv_state, where, plan)
        dense = self._short_conv(qkv, self.conv_weight, conv_state, *where, **plan, parts=3)
        return tuple(dense.unflatten(-1, (-1, self.head_dim)).unbind(0))


def _plan(*args: Any, **named: Any) -> Any:
    from k3_nvidia.kernels.kda_plan import plan_prefill

    return plan_prefill(*args, **named)
