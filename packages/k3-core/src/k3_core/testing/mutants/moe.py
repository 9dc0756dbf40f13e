"""Faults of route, experts and situ."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from k3_core.contracts import moe
from k3_core.contracts.norm import rms_norm
from k3_core.operators import ExpertWeights
from k3_core.testing.mutants.base import Arguments, Run, dense_view, plant, put


def _scores(a: Arguments, ids: Tensor, biased: bool) -> Tensor:
    scores = torch.sigmoid(a["logits"])
    if biased and a["correction_bias"] is not None:
        scores = scores + a["correction_bias"]
    return scores.gather(-1, ids.long())


@plant("route", "the correction bias enters the weights", "plain.T33.A16")
def _bias_in_weights(a: Arguments, run: Run) -> tuple[Tensor, Tensor]:
    _, ids = run()
    s = _scores(a, ids, biased=True)
    return s / s.sum(-1, keepdim=True) * a["routed_scaling_factor"], ids


@plant("route", "the correction bias is dropped", "plain.T33.A16")
def _bias_dropped(a: Arguments, run: Run) -> Any:
    return run(correction_bias=None)


@plant("route", "no 1e-20 in the denominator: 0/0", "kindunderflow_biasFalse.T33.A16")
def _no_epsilon(a: Arguments, run: Run) -> tuple[Tensor, Tensor]:
    _, ids = run()
    s = _scores(a, ids, biased=False)
    total = s.sum(-1, keepdim=True) if a["renormalize"] else 1.0
    return s / total * a["routed_scaling_factor"], ids


@plant("route", "groups are ignored", "groups4_kept2.T33.A16")
def _groups_ignored(a: Arguments, run: Run) -> Any:
    return run(num_expert_group=1, topk_group=1)


@plant("route", "scores in bfloat16", "plain.T33.A16")
def _bf16_scores(a: Arguments, run: Run) -> Any:
    return run(logits=a["logits"].bfloat16().float())


@plant("route", "softmax instead of sigmoid", "plain.T33.A16")
def _softmax_scores(a: Arguments, run: Run) -> tuple[Tensor, Tensor]:
    _, ids = run()
    s = a["logits"].softmax(-1).gather(-1, ids.long())
    return s / s.sum(-1, keepdim=True) * a["routed_scaling_factor"], ids


@plant("route", "an id out of range where the logits are NaN", "kindnan_stridedTrue.T33.A16")
def _nan_gives_bad_id(a: Arguments, run: Run) -> tuple[Tensor, Tensor]:
    weights, ids = run()
    return weights, torch.where(a["logits"].isnan().any(-1, keepdim=True), -1, ids)


# --- experts and situ

_EXPERTS, _EXPERTS_PAD = "T17.E8of8.L64.I32.X3.situ.mxfp4", "T9.E8of8.L64.I96.X3.situ.mxfp4.pad3.strided"


@plant("experts", "gate and up change places", _EXPERTS)
def _swapped_gate_up(a: Arguments, run: Run) -> Tensor:
    w: ExpertWeights = a["weights"]

    def swap(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.cat(x.chunk(2, dim=1)[::-1], dim=1)

    w13 = torch.cat(w.w13.chunk(2, dim=1)[::-1], dim=1)
    return run(weights=w._replace(w13=w13, w13_scale=swap(w.w13_scale)))


@plant("experts", "the latent norm is applied to the partial sum (norm before reduction)", _EXPERTS)
def _norm_before_reduction(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    return result.copy_(rms_norm(result.float(), torch.ones(result.shape[-1]), 1e-5))


@plant("experts", "every token is normalised inside an expert before the weighted sum", _EXPERTS)
def _norm_per_expert(a: Arguments, run: Run) -> Any:
    linear = moe.linear

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        y = linear(x, weight)
        return y if weight.shape[0] > weight.shape[1] else rms_norm(y, torch.ones(y.shape[-1]), 1e-5)

    with mock.patch.object(moe, "linear", normed):
        return run()


@plant("experts", "ids of other ranks fall on local experts", "T6.E5of40.L64.I32.X2.situ.mxfp4.pad2")
def _expert_map_ignored(a: Arguments, run: Run) -> Any:
    local = a["weights"].w13.shape[0]
    if a["expert_map"] is None:
        return run()
    ids = torch.where(a["topk_ids"] >= 0, a["topk_ids"] % local, -1)
    return run(topk_ids=ids, expert_map=None)


@plant("experts", "id -1 takes the last expert", "T5.E4of4.L128.I64.X4.situ.mxfp4.one_expert")
def _missing_id_wraps(a: Arguments, run: Run) -> Any:
    return run(topk_ids=a["topk_ids"] % a["weights"].w13.shape[0]) if a["expert_map"] is None else run()


@plant("experts", "padding rows are cleared by a product: 0 * NaN", _EXPERTS_PAD)
def _padding_multiplied(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    return result.add_(0.0 * a["x"])


@plant("experts", "the high nibble comes first", _EXPERTS)
def _nibbles_swapped(a: Arguments, run: Run) -> Any:
    w: ExpertWeights = a["weights"]
    if w.w13_scale is None:
        return run()
    return run(weights=w._replace(w13=(w.w13 << 4) | (w.w13 >> 4)))


@plant(
    "experts", "scales of the down-projection are shifted by one group", "T9.E8of8.L64.I96.X3.situ.mxfp4.pad3.strided"
)
def _scales_shifted(a: Arguments, run: Run) -> Any:
    w: ExpertWeights = a["weights"]
    return run() if w.w2_scale is None else run(weights=w._replace(w2_scale=w.w2_scale.roll(1, dims=-1)))


@plant("experts", "routing weights multiply the latent before the experts", _EXPERTS)
def _weights_before_experts(a: Arguments, run: Run) -> Any:
    mean = torch.where(a["topk_ids"] >= 0, a["topk_weights"], 0.0).mean(-1, keepdim=True)
    return run(x=(a["x"] * mean).to(a["x"].dtype), topk_weights=torch.ones_like(a["topk_weights"]))


@plant("situ", "gate and up change places", "T17.I64.strided")
def _situ_swapped(a: Arguments, run: Run) -> Any:
    return run(x=a["x"].roll(a["x"].shape[-1] // 2, dims=-1))


@plant("situ", "tanh in bfloat16", "T17.I64.strided")
def _bf16_tanh(a: Arguments, run: Run) -> Tensor:
    gate, up = a["x"].float().chunk(2, dim=-1)
    squashed = torch.tanh((gate / a["beta"]).bfloat16()).float() * a["beta"]
    upper = up if a["linear_beta"] is None else torch.tanh(up / a["linear_beta"]) * a["linear_beta"]
    return put(squashed * torch.sigmoid(gate) * upper, a["out"], a["x"].dtype)


@plant("situ", "the up half is not bounded", "T17.I64.strided")
def _linear_beta_ignored(a: Arguments, run: Run) -> Any:
    return run(linear_beta=None)


@plant("situ", "the row stride is taken to be dense", "T17.I64.strided")
def _situ_stride_ignored(a: Arguments, run: Run) -> Any:
    return run(x=dense_view(a["x"]))
