"""Routed experts on NVIDIA GPUs: the shared layer; router and experts of this wheel's kernels are one call, and where
it was measured to pay, parts that do not depend on each other run on two streams:

    stream       input product [latent | gate up] -+----------------+-> w13, w2, sum -+-> norm, up projection + shared
    side         router, choice ------------------ | --------------/                 /
                                                   +-> SiTU, down projection -------/
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3_core.config import K3Config
from k3_core.contracts.moe import router_logits
from k3_core.vllm.serving import beside
from k3_core.vllm.serving.moe_layer import LATENT_ROWS, SHARED_ROWS, MoeLayer
from k3_nvidia import dispatch
from k3_nvidia.experts_store import make_store
from k3_nvidia.tuning import moe_step
from k3_nvidia.tuning.moe_step import Schedule


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Router logits: on a GPU the product of bfloat16 operands that leaves its fp32 sums unrounded."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return router_logits(x, weight)


class MoE(MoeLayer):
    """A mixture-of-experts layer of one rank."""

    def __init__(self, config: K3Config, vllm_config: Any, prefix: str) -> None:
        super().__init__(config, vllm_config, prefix, dispatch.choose, make_store, logits, one_input=True)
        on_gpu = dispatch.device()[0] == "cuda"
        self._joined = False  # whether the last launch before the latent's norm was a wait for the side stream
        if self.routed_expert_norm is not None and on_gpu:
            self._finish.norm = self._norm
        self._fused = self.operator.name == dispatch.KERNEL and self.gate.operator.name == dispatch.KERNEL
        self._schedules: moe_step.Schedules = ()
        if on_gpu and self._fused and self.one_input and self.routed_expert_norm is not None:
            device = torch.cuda.get_device_name()
            self._schedules = moe_step.schedules(device, self.width)

    def _norm(self, routed: Tensor) -> Tensor:
        from k3_nvidia.kernels import glue

        weight = self.routed_expert_norm.weight  # type: ignore[union-attr]
        with glue.serial() if self._joined else contextlib.nullcontext():
            return glue.rms_norm(routed, weight, self.text.rms_norm_eps)

    # ------------------------------------------------------------------------------------------------- one stream

    def partial(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """This rank's partial results: routed experts [T, L] and shared ones [T, H] or None, neither reduced."""
        how = moe_step.choose(self._schedules, x.shape[0])
        scheduled = x.shape[0] > 0 and how != Schedule() and not self.latent_by_ranks(x.shape[0])
        self._joined = scheduled and how.shared
        return self._scheduled(x, how) if scheduled else super().partial(x)

    def routed(self, x: Tensor, latent: Tensor) -> Tensor:
        """This rank's weighted sum of experts [T, L], not reduced."""
        if not self._fused:
            return super().routed(x, latent)
        if not x.shape[0]:
            return torch.empty_like(latent)
        return self._products(latent, self._choose(x))

    def _choose(self, x: Tensor, first: bool = False) -> Any:
        from k3_nvidia.kernels.experts import choose_experts

        text, gate = self.text, self.gate
        return choose_experts(
            x, gate.weight, gate.e_score_correction_bias, self.experts.weights(), text.num_experts_per_token,
            renormalize=text.moe_renormalize, routed_scaling_factor=text.routed_scaling_factor,
            expert_map=self.expert_map, first=first,
        )  # fmt: skip

    def _products(self, latent: Tensor, chosen: Any, first: bool = False) -> Tensor:
        from k3_nvidia.kernels.experts import apply_experts

        text = self.text
        return apply_experts(
            latent, self.experts.weights(), chosen, hidden_act=text.hidden_act, situ_beta=text.activation_situ_beta,
            situ_linear_beta=text.activation_situ_linear_beta, expert_map=self.expert_map, first=first,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ two streams

    def _scheduled(self, x: Tensor, how: Schedule) -> tuple[Tensor, Tensor]:
        """``partial`` laid out as ``how`` says. What crosses streams is held in a variable until this returns: the
        side stream's next work begins with a wait for this one, see :mod:`k3_core.vllm.serving.beside`."""
        side = beside.side(x.device) if how.two_streams else None
        chosen = chose = None
        if side is not None and how.choice:
            with side.work():
                chosen = self._choose(x, first=True)
            chose = side.mark()
        if how.split:
            latent, gate_up = linear(x, self.input_weight(*LATENT_ROWS)), None
        else:
            latent, gate_up = self.parts_of_input(self.in_proj(x))
        shared = None
        if side is not None and how.shared:
            with side.work():
                shared, gate_up = self._shared(x, gate_up, first=True)
        elif how.early:
            shared, gate_up = self._shared(x, gate_up)
        if chosen is None:
            chosen = self._choose(x)
        if side is not None and chose is not None:
            side.after(chose)
        routed = self._products(latent, chosen, first=chose is not None)
        if shared is None:
            shared, gate_up = self._shared(x, gate_up)
        if side is not None and how.shared:
            side.join()
        return routed, shared

    def _shared(self, x: Tensor, gate_up: Tensor | None, first: bool = False) -> tuple[Tensor, Tensor]:
        """(the shared experts' partial result [T, H], their gate and up rows, to be kept while they are read)."""
        from k3_nvidia.kernels import glue

        assert self.shared_experts is not None
        plain = first and gate_up is not None  # a library's product comes first otherwise
        if gate_up is None:
            gate_up = linear(x, self.input_weight(*SHARED_ROWS))
        with glue.serial() if plain else contextlib.nullcontext():
            activated = self.shared_experts.act(gate_up)
        result: Tensor = self.shared_experts.down_proj(activated)
        return result, gate_up
