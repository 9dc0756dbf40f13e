"""Routed experts on NVIDIA GPUs: the shared layer; router and experts of this wheel's kernels are one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_core.config import K3Config
from k3_core.contracts.moe import router_logits
from k3_core.vllm.serving.moe_layer import MoeLayer
from k3_nvidia import dispatch
from k3_nvidia.experts_store import make_store


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Router logits: on a GPU the product of bfloat16 operands that leaves its fp32 sums unrounded."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return router_logits(x, weight)


class MoE(MoeLayer):
    """A mixture-of-experts layer of one rank."""

    def __init__(self, config: K3Config, vllm_config: Any, prefix: str) -> None:
        super().__init__(config, vllm_config, prefix, dispatch.choose, make_store, logits, one_input=True)
        if self.routed_expert_norm is not None and dispatch.device()[0] == "cuda":
            from k3_nvidia.kernels.glue import rms_norm

            weight = self.routed_expert_norm.weight  # a parameter: loading fills it in place
            self._finish.norm = lambda routed: rms_norm(routed, weight, config.text.rms_norm_eps)
        self._fused = self.operator.name == dispatch.KERNEL and self.gate.operator.name == dispatch.KERNEL

    def routed(self, x: Tensor, latent: Tensor) -> Tensor:
        """This rank's weighted sum of experts [T, L], not reduced."""
        if not self._fused:
            return super().routed(x, latent)
        from k3_nvidia.kernels.experts import moe_forward

        text = self.text
        return moe_forward(
            x,
            latent,
            self.gate.weight,
            self.gate.e_score_correction_bias,
            self.experts.weights(),
            text.num_experts_per_token,
            hidden_act=text.hidden_act,
            situ_beta=text.activation_situ_beta,
            situ_linear_beta=text.activation_situ_linear_beta,
            renormalize=text.moe_renormalize,
            routed_scaling_factor=text.routed_scaling_factor,
            expert_map=self.expert_map,
        )
