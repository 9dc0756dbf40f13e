"""Feed-forward layers: the dense MLP, and the latent mixture of experts with its shared experts.

Routed experts stay as they are stored: MXFP4 bytes are unpacked one expert at a time when a token chose it, plain
experts are used as they are. Small packed experts are unpacked once after loading (:func:`MoE.settle`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3_core.config import TextConfig
from k3_core.contracts import moe, mxfp4, situ
from k3_core.vllm.layers.weights import Weight, parameter


def activation(text: TextConfig) -> situ.GatedActivation:
    """The configuration's gated activation."""
    return situ.gated_activation(text.hidden_act, text.activation_situ_beta, text.activation_situ_linear_beta)


class MLP(nn.Module):
    """A gated MLP: the dense layers, and the shared experts as one."""

    def __init__(self, text: TextConfig, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Weight(width, text.hidden_size), Weight(width, text.hidden_size)
        self.down_proj = Weight(text.hidden_size, width)
        self._act = activation(text)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return moe.gated_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, self._act)


class Router(nn.Module):
    """The router's matrix and the bias that takes part in choosing only."""

    def __init__(self, text: TextConfig) -> None:
        super().__init__()
        self.weight = parameter(text.num_experts, text.hidden_size)
        self.e_score_correction_bias = parameter(text.num_experts, dtype=torch.float32)


class RoutedExperts(nn.Module):
    """All routed experts of a layer, stacked: w13 is w1 over w3."""

    def __init__(self, text: TextConfig, packed: bool) -> None:
        super().__init__()
        count, inner, outer = text.num_experts, text.moe_intermediate_size, text.expert_hidden_size
        self.packed = packed
        if packed:
            groups = mxfp4.GROUP_SIZE
            self.w13 = parameter(count, 2 * inner, outer // 2, dtype=torch.uint8)
            self.w13_scale = parameter(count, 2 * inner, outer // groups, dtype=torch.uint8)
            self.w2 = parameter(count, outer, inner // 2, dtype=torch.uint8)
            self.w2_scale = parameter(count, outer, inner // groups, dtype=torch.uint8)
        else:
            self.w13 = parameter(count, 2 * inner, outer)
            self.w2 = parameter(count, outer, inner)

    def destination(self, expert: int, matrix: str, kind: str) -> Tensor:
        """Where the checkpoint's ``experts.{expert}.{matrix}.{kind}`` goes.

        matrix: w1, w2 or w3; kind: weight, weight_packed or weight_scale.
        """
        half = self.w13.shape[1] // 2
        name = "w2" if matrix == "w2" else "w13"
        stack = getattr(self, f"{name}_scale" if kind == "weight_scale" else name)
        if matrix == "w2":
            return stack[expert]
        return stack[expert, :half] if matrix == "w1" else stack[expert, half:]

    def experts(self) -> moe.Experts:
        """The experts as the contract takes them."""
        if self.packed:
            return moe.PackedExperts(self.w13, self.w13_scale, self.w2, self.w2_scale)
        return moe.DenseExperts(self.w13, self.w2)

    def unpack(self, dtype: torch.dtype) -> None:
        """Replace packed experts by plain ones of ``dtype``."""
        w13 = mxfp4.unpack(self.w13, self.w13_scale, dtype)
        w2 = mxfp4.unpack(self.w2, self.w2_scale, dtype)
        del self.w13, self.w13_scale, self.w2, self.w2_scale
        self.w13, self.w2 = nn.Parameter(w13, requires_grad=False), nn.Parameter(w2, requires_grad=False)
        self.packed = False

    def unpacked_bytes(self, dtype: torch.dtype) -> int:
        """What :meth:`unpack` would allocate; 0 when there is nothing to unpack."""
        if not self.packed:
            return 0
        return 2 * (self.w13.numel() + self.w2.numel()) * torch.empty((), dtype=dtype).element_size()


class MoE(nn.Module):
    """``block_sparse_moe``: router on the hidden state, experts in the latent space, shared experts beside them."""

    def __init__(self, text: TextConfig, packed: bool) -> None:
        super().__init__()
        hidden, latent = text.hidden_size, text.routed_expert_hidden_size
        self.text = text
        self.gate = Router(text)
        self.experts = RoutedExperts(text, packed)
        if latent is not None:
            self.routed_expert_down_proj, self.routed_expert_up_proj = Weight(latent, hidden), Weight(hidden, latent)
            if text.latent_moe_use_norm:
                self.routed_expert_norm = Weight(latent)
        if text.num_shared_experts:
            self.shared_experts = MLP(text, text.shared_intermediate_size)
        self._act = activation(text)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        text = self.text
        y, _ = moe.layer(
            x,
            self._weights(),
            top_k=text.num_experts_per_token,
            activation=self._act,
            eps=text.rms_norm_eps,
            renormalize=text.moe_renormalize,
            scaling=text.routed_scaling_factor,
            num_groups=text.num_expert_group if text.use_grouped_topk else 1,
            topk_groups=text.topk_group if text.use_grouped_topk else 1,
        )
        return y

    def _weights(self) -> moe.MoeWeights:
        def weight(name: str) -> Tensor | None:
            module = getattr(self, name, None)
            return None if module is None else module.weight

        shared: MLP | None = getattr(self, "shared_experts", None)
        return moe.MoeWeights(
            router=self.gate.weight,
            bias=self.gate.e_score_correction_bias,
            experts=self.experts.experts(),
            down=weight("routed_expert_down_proj"),
            norm=weight("routed_expert_norm"),
            up=weight("routed_expert_up_proj"),
            shared_gate=None if shared is None else shared.gate_proj.weight,
            shared_up=None if shared is None else shared.up_proj.weight,
            shared_down=None if shared is None else shared.down_proj.weight,
        )
