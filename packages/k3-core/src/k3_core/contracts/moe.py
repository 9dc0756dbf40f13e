"""Stable LatentMoE: a router on the full hidden state, experts in a smaller latent space, shared experts beside them.

    s   = sigmoid(x W_r^T)                            [T, E] fp32, from the full hidden state
    top = the k largest of s + bias                   the bias chooses, it never enters the weights
    p   = s[top] / (sum s[top] + 1e-20) * scaling     scaling = routed_scaling_factor
    z   = x W_down^T                                  [T, L] latent
    r   = sum_e p_e * ((act(z W1_e^T, z W3_e^T)) W2_e^T)
    y   = rms_norm(r) W_up^T + shared(x)              the norm after the weighted sum, and after any reduction

Ties go to the lower expert id. With groups (num_groups > 1) the experts are split in equal runs, a group scores the
sum of its two largest biased scores, and only the topk_groups best groups take part. If every chosen score is zero
the weights are zero (0 / 1e-20), not 1/k. Without a latent (Kimi-Linear) z = x and there is neither norm nor W_up.

Rounding for BF16: router in fp32 from BF16 operands; z, both halves of the activation and each expert's output are
rounded to BF16, the weighted sum is fp32 and rounded once, then the norm (reference rounding) and the up-projection.

Sharding. Tensor parallel cuts W1 and W3 by rows and W2 by columns; expert parallel gives each rank whole experts.
Either way a rank holds a *partial* r, and because the norm is not linear partials are summed before it. Widths padded
with zero rows change nothing, as act(0, 0) = 0.

Tolerances. Router: fp32 scores 1e-6; ids equal wherever the gap at the cut exceeds 1e-5, weights 1e-6. Experts in fp32
against fp64: 1e-5 of the largest output; BF16: 2^-7 of the largest output (three roundings on the way to each expert's
result and one of the sum). Sum of partials: as the whole, as reduction happens in fp32 here.

Source: released modelling code and config.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from k3_core.contracts import mxfp4
from k3_core.contracts._common import compute_dtype, linear
from k3_core.contracts.norm import rms_norm
from k3_core.contracts.situ import GatedActivation
from k3_core.errors import ConfigError

RENORMALIZE_EPS = 1e-20


class Routing(NamedTuple):
    """Chosen experts: weights [T, k] fp32 (fp64 for fp64 logits) and ids [T, k] int64, best biased score first."""

    weights: Tensor
    ids: Tensor


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H] @ weight [E, H]^T accumulated and returned in fp32 (fp64 for fp64 x): [T, E]."""
    dtype = compute_dtype(x)
    return functional.linear(x.to(dtype), weight.to(dtype))


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    renormalize: bool = True,
    scaling: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> Routing:
    """Choose experts from logits [T, E] (before the sigmoid): Routing(weights [T, top_k], ids [T, top_k]).

    bias: [E] e_score_correction_bias, or None. Raises ConfigError where the groups do not divide the experts or the
    kept groups hold fewer than top_k experts.
    """
    num_experts = logits.shape[-1]
    per_group = num_experts // num_groups
    if num_experts % num_groups or not 1 <= topk_groups <= num_groups or top_k > per_group * topk_groups:
        raise ConfigError(
            f"cannot choose {top_k} of {num_experts} experts in {topk_groups} of {num_groups} groups "
            "(num_experts_per_token, num_experts, topk_group, num_expert_group)"
        )
    scores = torch.sigmoid(logits.to(compute_dtype(logits)))
    biased = scores if bias is None else scores + bias.to(scores.dtype)
    if topk_groups < num_groups:
        grouped = biased.unflatten(-1, (num_groups, per_group))
        group_scores = grouped.topk(min(2, per_group), dim=-1).values.sum(-1)
        kept = _first_largest(group_scores, topk_groups)
        mask = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, kept, True)
        biased = grouped.masked_fill(~mask.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = _first_largest(biased, top_k)
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + RENORMALIZE_EPS)
    return Routing(weights * scaling, ids)


class Experts(Protocol):
    """A run of experts `first_expert` ... `first_expert + num_experts - 1`, each giving its weights on demand."""

    first_expert: int

    @property
    def num_experts(self) -> int:
        """How many experts this holds."""

    def weights(self, local: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(w13 [2I, L], w2 [L, I]) of local expert `local` in `dtype`; w13 is gate (w1) over up (w3)."""


@dataclass
class DenseExperts:
    """Experts as plain tensors: w13 [E, 2I, L] (w1 over w3), w2 [E, L, I]."""

    w13: Tensor
    w2: Tensor
    first_expert: int = 0

    @property
    def num_experts(self) -> int:
        """How many experts this holds."""
        return self.w13.shape[0]

    def weights(self, local: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(w13 [2I, L], w2 [L, I]) of one expert."""
        return self.w13[local].to(dtype), self.w2[local].to(dtype)


@dataclass
class PackedExperts:
    """Experts in MXFP4, unpacked one at a time when used.

    w13 [E, 2I, L/2] and w2 [E, L, I/2] packed bytes; w13_scale [E, 2I, L/32] and w2_scale [E, L, I/32] scale bytes.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    first_expert: int = 0

    @property
    def num_experts(self) -> int:
        """How many experts this holds."""
        return self.w13.shape[0]

    def weights(self, local: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(w13 [2I, L], w2 [L, I]) of one expert, unpacked."""
        return (
            mxfp4.unpack(self.w13[local], self.w13_scale[local], dtype),
            mxfp4.unpack(self.w2[local], self.w2_scale[local], dtype),
        )


def latent_experts_partial(
    z: Tensor, routing_weights: Tensor, ids: Tensor, experts: Experts, activation: GatedActivation
) -> Tensor:
    """This rank's unrounded share of r: z [T, L], routing_weights and ids [T, k] -> [T, L] in fp32 (or fp64).

    `experts` may hold a slice of every expert's width (tensor parallel) or a run of whole experts (expert parallel,
    ids outside the run are skipped). Add the ranks' results, round, then norm. An id of -1 contributes nothing.
    """
    out = torch.zeros(z.shape, dtype=compute_dtype(z, routing_weights), device=z.device)
    local = ids - experts.first_expert
    for expert in torch.unique(local).tolist():
        if not 0 <= expert < experts.num_experts:
            continue
        rows, column = (local == expert).nonzero(as_tuple=True)
        w13, w2 = experts.weights(expert, z.dtype)
        gate, up = linear(z[rows], w13).chunk(2, dim=-1)
        y = linear(activation(gate, up), w2)
        out.index_add_(0, rows, y.to(out.dtype) * routing_weights[rows, column].to(out.dtype).unsqueeze(-1))
    return out


def latent_experts(
    z: Tensor, routing_weights: Tensor, ids: Tensor, experts: Experts, activation: GatedActivation
) -> Tensor:
    """Weighted sum of the chosen experts' outputs, one rounding: z [T, L] -> r [T, L] in z's dtype, not yet normed."""
    return latent_experts_partial(z, routing_weights, ids, experts, activation).to(z.dtype)


def reduce_and_norm(partials: Sequence[Tensor], norm_weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Sum the ranks' partial r [T, L], round to `dtype`, then the latent RMSNorm (None: no norm).

    The order matters: rms_norm(sum) is not sum(rms_norm).
    """
    total = torch.stack(list(partials)).sum(0).to(dtype)
    return total if norm_weight is None else rms_norm(total, norm_weight, eps)


def gated_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, act: GatedActivation) -> Tensor:
    """act(x Wg^T, x Wu^T) Wd^T: the dense layer's MLP and the shared experts (fused to one of their joint width)."""
    return linear(act(linear(x, gate_weight), linear(x, up_weight)), down_weight)


@dataclass
class MoeWeights:
    """Tensors of one MoE layer; the three latent ones are None where experts work on the hidden state itself.

    router [E, H], bias [E] fp32; down [L, H], norm [L], up [H, L]; shared_* gate/up [Is, H], down [H, Is], or None.
    """

    router: Tensor
    bias: Tensor | None
    experts: Experts
    down: Tensor | None
    norm: Tensor | None
    up: Tensor | None
    shared_gate: Tensor | None
    shared_up: Tensor | None
    shared_down: Tensor | None


def layer(
    x: Tensor,
    w: MoeWeights,
    *,
    top_k: int,
    activation: GatedActivation,
    eps: float,
    renormalize: bool = True,
    scaling: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[Tensor, Routing]:
    """The whole layer on normed x [T, H]: (y [T, H] in x's dtype, the routing)."""
    routing = route(
        router_logits(x, w.router),
        w.bias,
        top_k,
        renormalize=renormalize,
        scaling=scaling,
        num_groups=num_groups,
        topk_groups=topk_groups,
    )
    z = x if w.down is None else linear(x, w.down)
    r = latent_experts(z, routing.weights, routing.ids, w.experts, activation)
    if w.norm is not None:
        r = rms_norm(r, w.norm, eps)
    y = r if w.up is None else linear(r, w.up)
    if w.shared_gate is not None and w.shared_up is not None and w.shared_down is not None:
        y = y + gated_mlp(x, w.shared_gate, w.shared_up, w.shared_down, activation)
    return y, routing


def _first_largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis, equal values by rising index."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]
