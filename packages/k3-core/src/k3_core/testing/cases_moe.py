"""Cases of route, experts and situ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3_core.contracts.mxfp4 import unpack
from k3_core.contracts.situ import silu_and_mul, situ_and_mul
from k3_core.operators import ExpertWeights
from k3_core.operators.table import ROUTE
from k3_core.testing.case import Case, Draw, Inputs, Sizes, far_name, far_strides, padded
from k3_core.testing.compare import Expected, Outcome, compare

NAN = float("nan")
BETA, LINEAR_BETA = 4.0, 25.0


def make_situ(case: Case, draw: Draw) -> Inputs:
    """Values on both sides of beta and linear_beta, zeros, and what must saturate."""
    T, width = case.sizes["T"], case.sizes["I"]
    x = draw.normal(T, 2 * width) * draw.uniform(T, 1, low=-2.0, high=4.0).exp()
    if T:
        x[0, :5] = torch.tensor([0.0, -1.0, 4.0, 100.0, -3e4], device=draw.device)
        x[0, width : width + 5] = torch.tensor([0.0, 2.0, 25.0, -3e4, 100.0], device=draw.device)
    tensors = {"x": x.to(case.dtype)}
    strides = {"x": padded(tensors["x"]), "out": padded(tensors["x"][:, :width], 32)}
    if case.scale == "huge":
        strides = far_strides(case, x=tensors["x"], out=tensors["x"][:, :width])
    scalars = {"beta": BETA, "linear_beta": case.options["linear_beta"]}
    return Inputs(tensors, scalars, strides if case.options["strided"] else {})


def expect_situ(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """The formula in fp64."""
    gate, up = inputs.tensors["x"].double().chunk(2, dim=-1)
    return {"out": Expected(situ_and_mul(gate, up, BETA, inputs.scalars["linear_beta"]))}


def situ_cases(dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """situ."""
    shapes = [(17, 64), (1, 8), (0, 32), (3, 40)]
    if scale == "real":
        shapes = [(67, 192), (512, 384), (5, 6144), (33, 33792)]
    elif scale == "huge":
        shapes = [(3, 192)]
    variants: list[tuple[float | None, tuple[str, ...]]] = [(linear, ()) for linear in (LINEAR_BETA, None)]
    if scale == "huge":
        variants = [(LINEAR_BETA, ("x",)), (LINEAR_BETA, ("out",))]
    for i, (T, width) in enumerate(shapes):
        for linear, far in variants:
            o = {"strided": i % 2 == 0, "linear_beta": linear, "far": far}
            name = f"T{T}.I{width}" + (".strided" if o["strided"] else "") + ("" if linear else ".linear") + far_name(o)
            yield Case("situ", name, dtype, make_situ, expect_situ, {"T": T, "I": width}, o, scale)


def make_route(case: Case, draw: Draw) -> Inputs:
    """Logits of a kind: plain, tied in threes, underflowing, NaN rows."""
    T, A = case.sizes["T"], case.sizes["A"]
    o = case.options
    logits = draw.normal(T, A, scale=2.0)
    if o["kind"] == "ties":
        # Coarse scores, every value several times.
        logits = (logits * 2).round() / 2
    elif o["kind"] == "underflow":
        logits = torch.full_like(logits, -200.0)
        logits[1::2, : A // 2] = -90.0
    elif o["kind"] == "nan":
        logits[::3] = NAN
    tensors = {"logits": logits}
    if o["bias"]:
        tensors["correction_bias"] = draw.normal(A, scale=0.3)
    scalars = {
        "top_k": case.sizes["X"], "renormalize": o["renormalize"], "routed_scaling_factor": o["factor"],
        "num_expert_group": o["groups"], "topk_group": o["kept"],
    }  # fmt: skip
    if case.scale == "huge":
        return Inputs(tensors, scalars, far_strides(case, logits=logits))
    return Inputs(tensors, scalars, {"logits": padded(logits, 64)} if o["strided"] else {})


def expect_route(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """Nothing fixed: ids may differ where scores tie, so check_route judges."""
    return {}


def check_route(case: Case, inputs: Inputs, results: dict[str, Tensor]) -> list[Outcome]:
    """Ids are a valid choice (by fp64 scores), weights are the chosen experts' unbiased normalised scores."""
    o, X = case.options, case.sizes["X"]
    weights, ids = results["topk_weights"], results["topk_ids"]
    logits = inputs.tensors["logits"]
    shape = (logits.shape[0], X)
    if ids.dtype != torch.int32 or weights.dtype != torch.float32 or ids.shape != shape or weights.shape != shape:
        return [
            _bad("topk_ids", f"must be float32 and int32 of shape {shape}, got {weights.dtype} {ids.dtype} {ids.shape}")
        ]
    chosen = ids.long()
    distinct = chosen.sort(dim=-1).values.diff(dim=-1).ne(0).all()
    if not bool(((chosen >= 0) & (chosen < case.sizes["A"])).all() & distinct):
        return [_bad("topk_ids", "an id is out of range or appears twice in a row")]
    finite = ~logits.isnan().any(-1)
    scores = torch.sigmoid(logits.double())
    biased = scores + inputs.tensors["correction_bias"].double() if o["bias"] else scores
    tolerance = ROUTE.bounds["float32"]["topk_ids"].atol
    worst = _worst_choice(biased, chosen, o["groups"], o["kept"], tolerance)
    worst = torch.where(finite, worst, 0.0)
    outcomes = []
    excess = float(worst.max()) if worst.numel() else 0.0
    row = int(worst.argmax()) if worst.numel() else 0
    text = f"topk_ids[{row}]: an expert that was left out scores {excess:.3g} more than one that was chosen"
    outcomes.append(Outcome("topk_ids", excess <= tolerance, excess, tolerance, excess / tolerance, text))
    kept = scores.gather(-1, chosen)
    want = kept / (kept.sum(-1, keepdim=True) + 1e-20) if o["renormalize"] else kept
    bound = ROUTE.bounds["float32"]["topk_weights"]
    outcomes.append(compare("topk_weights", weights, Expected(want * o["factor"], finite.unsqueeze(-1)), bound))
    return outcomes


def _worst_choice(biased: Tensor, chosen: Tensor, groups: int, kept: int, tolerance: float) -> Tensor:
    """Per row: how much the best expert left out beats the worst one chosen; groups as the released rule."""
    T, A = biased.shape
    eligible = torch.ones_like(biased, dtype=torch.bool)
    penalty = torch.zeros(T, dtype=torch.float64, device=biased.device)
    if kept < groups:
        grouped = biased.view(T, groups, A // groups)
        group_score = grouped.topk(min(2, A // groups), dim=-1).values.sum(-1)
        cut = group_score.topk(kept, dim=-1).values[:, -1:]
        # Groups within the tolerance of the cut may go either way; the clearly worse ones must not appear.
        eligible = (group_score >= cut - 2 * tolerance).repeat_interleave(A // groups, dim=-1)
        sure = (group_score > cut + 2 * tolerance).repeat_interleave(A // groups, dim=-1)
        used = torch.zeros_like(group_score).scatter_(-1, chosen // (A // groups), 1.0).bool()
        used = used.repeat_interleave(A // groups, dim=-1)
        penalty = torch.where(eligible.gather(-1, chosen).all(-1), 0.0, math.inf)
        eligible = eligible & (used | sure)
    taken = torch.zeros_like(eligible).scatter_(-1, chosen, True)
    left = torch.where(eligible & ~taken, biased, -math.inf).max(-1).values
    return torch.maximum(left - biased.gather(-1, chosen).min(-1).values, penalty).clamp(min=0)


def _bad(result: str, text: str) -> Outcome:
    return Outcome(result, False, math.inf, 0.0, math.inf, f"{result}: {text}")


def route_cases(dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """route; logits are fp32 whatever the model's dtype, so there is one set of cases."""
    if dtype is not torch.float32:
        return
    A, X, T = (16, 4, 33) if scale == "small" else (896, 16, 257)
    base: dict[str, Any] = {
        "kind": "plain", "bias": True, "renormalize": True, "factor": 1.0, "groups": 1, "kept": 1, "strided": False
    }  # fmt: skip
    variants: list[dict[str, Any]] = [
        {}, {"bias": False}, {"kind": "ties"}, {"kind": "underflow", "bias": False}, {"kind": "nan", "strided": True},
        {"factor": 2.446, "strided": True}, {"renormalize": False, "factor": 2.5}, {"groups": 4, "kept": 2},
        {"groups": 4, "kept": 4}, {"groups": 2, "kept": 1, "bias": False, "strided": True},
    ]  # fmt: skip
    if scale == "huge":
        T, variants = 3, [{"far": ("logits",)}]
    for v in variants:
        name = "_".join(f"{k}{x}" for k, x in v.items() if k != "far") or "plain"
        name += far_name(v)
        yield Case(
            "route", f"{name}.T{T}.A{A}", dtype, make_route, expect_route, {"T": T, "A": A, "X": X},
            _told({**base, **v}), scale, check_route,
        )  # fmt: skip
    for rows in (0, 1) if scale != "huge" else ():
        sizes = {"T": rows, "A": A, "X": X}
        yield Case("route", f"T{rows}.A{A}", dtype, make_route, expect_route, sizes, _told(base), scale, check_route)


def _told(o: dict[str, Any]) -> dict[str, Any]:
    """The options, groups also under the names that a capability query of a model has."""
    return {**o, "num_expert_group": o["groups"], "topk_group": o["kept"]}


def make_experts(case: Case, draw: Draw) -> Inputs:
    """Random codes, scale bytes around one; experts elsewhere, padding rows full of NaN."""
    T, E, A, L, width, X = (case.sizes[s] for s in ("T", "E", "A", "L", "I", "X"))
    o = case.options
    ids = torch.stack([draw.permutation(A)[:X] for _ in range(T)]) if T else torch.zeros(0, X, dtype=torch.int64)
    ids = ids.to(draw.device)
    if o.get("one_expert"):
        ids[:, 0], ids[:, 1:] = 1 % A, -1
    topk = draw.uniform(T, X, low=0.05, high=1.0)
    x = draw.normal(T, L) * 1.5
    dead = torch.zeros(T, dtype=torch.bool, device=draw.device)
    if o["padding"] and T:
        dead[-o["padding"] :] = True
        ids[dead], x[dead], topk[dead] = -1, NAN, NAN
        ids[0, X // 2 :] = -1  # a token with fewer experts than the rest
    tensors = {"x": x.to(case.dtype), "topk_weights": topk, "topk_ids": ids.to(torch.int32)}
    if E < A:
        local = torch.full((A,), -1, dtype=torch.int32, device=draw.device)
        local[draw.permutation(A)[:E]] = torch.arange(E, dtype=torch.int32, device=draw.device)
        tensors["expert_map"] = local
    if o["packed"]:
        w13, w2 = draw.bytes(0, 256, E, 2 * width, L // 2), draw.bytes(0, 256, E, L, width // 2)
        # Codes have rms 2.9: scales around 2^-k that keep every product near one; a few far from it, one code of zero.
        middle = 127 - round(math.log2(2.9 * L**0.5))
        s13 = draw.bytes(middle - 2, middle + 2, E, 2 * width, L // 32)
        s2 = draw.bytes(middle - 2, middle + 2, E, L, max(width // 32, 1))
        s13[:, ::7, 0], s2[:, ::5, 0] = 0, 100
        weights = ExpertWeights(w13, s13, w2, s2)
    else:
        w13f = draw.normal(E, 2 * width, L, scale=1.2 * L**-0.5).to(case.dtype)
        weights = ExpertWeights(w13f, None, draw.normal(E, L, width, scale=width**-0.5).to(case.dtype), None)
    situ = o["act"] == "situ"
    scalars = {
        "weights": weights, "hidden_act": o["act"], "situ_beta": BETA if situ else None,
        "situ_linear_beta": LINEAR_BETA if situ else None,
    }  # fmt: skip
    strides = {"x": padded(tensors["x"]), "out": padded(tensors["x"], 32)} if o["strided"] else {}
    if case.scale == "huge":
        strides = far_strides(case, x=tensors["x"], out=tensors["x"])
    return Inputs(tensors, scalars, strides)


def expect_experts(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """fp64, expert by expert; the weights are exact."""
    t, weights = inputs.tensors, inputs.scalars["weights"]
    x, ids = t["x"].double(), t["topk_ids"].long()
    if "expert_map" in t:
        ids = torch.where(ids >= 0, t["expert_map"][ids.clamp(min=0)].long(), -1)
    out = torch.zeros_like(x)
    for e in range(case.sizes["E"]):
        rows, column = (ids == e).nonzero(as_tuple=True)
        if not len(rows):
            continue
        if weights.w13_scale is None:
            w13, w2 = weights.w13[e].double(), weights.w2[e].double()
        else:
            w13 = unpack(weights.w13[e], weights.w13_scale[e], torch.float64)
            w2 = unpack(weights.w2[e], weights.w2_scale[e], torch.float64)
        gate, up = (x[rows] @ w13.T).chunk(2, dim=-1)
        act = situ_and_mul(gate, up, BETA, LINEAR_BETA) if case.options["act"] == "situ" else silu_and_mul(gate, up)
        out.index_add_(0, rows, (act @ w2.T) * t["topk_weights"][rows, column].double().unsqueeze(-1))
    return {"out": Expected(out)}


def expert_cases(dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """experts: whole, one rank of expert parallelism, padding, one expert for all; widths of TP16, TP8 and EP."""
    base: dict[str, Any] = {"act": "situ", "packed": True, "padding": 0, "strided": False}

    def case(T: int, E: int, A: int, L: int, width: int, X: int, **more: Any) -> Case:
        o = {**base, **more}
        o |= {"hidden_act": o["act"], "quantised": o["packed"]}  # the names a model's capability query has
        on = [o["act"], "mxfp4" if o["packed"] else "dense", *([f"pad{o['padding']}"] if o["padding"] else [])]
        on += [k for k in ("strided", "one_expert") if o.get(k)]
        sizes = {"T": T, "E": E, "A": A, "L": L, "I": width, "X": X}
        name = f"T{T}.E{E}of{A}.L{L}.I{width}.X{X}.{'.'.join(on)}{far_name(o)}"
        return Case("experts", name, dtype, make_experts, expect_experts, sizes, o, scale)

    if scale == "huge":
        for far in ("x", "out"):
            yield case(3, 8, 8, 256, 192, 3, far=(far,))
        # Whole experts on few ranks: 4.9 billion bytes of gate and up codes, beyond 2^31 from expert 196 on.
        yield case(3, 448, 448, 3584, 3072, 3, far=("weights",))
        return
    if scale == "small":
        yield case(17, 8, 8, 64, 32, 3)
        yield case(9, 8, 8, 64, 96, 3, padding=3, strided=True)
        yield case(13, 3, 12, 64, 32, 4, strided=True)
        yield case(6, 5, 40, 64, 32, 2, padding=2)
        yield case(5, 4, 4, 128, 64, 4, one_expert=True)
        yield case(1, 8, 8, 64, 32, 3)
        yield case(0, 8, 8, 64, 32, 3)
        yield case(11, 6, 6, 64, 48, 2, act="silu", packed=False, strided=True)
        return
    for T in (1, 2, 8, 33, 128, 513):
        yield case(T, 896, 896, 3584, 192, 16, strided=T % 2 == 1)
    for T in (1, 8, 65):
        yield case(T, 896, 896, 3584, 384, 16, padding=3 if T > 1 else 0)
    for T in (8, 300):
        yield case(T, 56, 896, 3584, 3072, 16, strided=True)
    yield case(40, 896, 896, 3584, 192, 16, one_expert=True)
