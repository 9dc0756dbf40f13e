"""Comparison with the fp64 oracle: a norm for the whole, a bound for every element, the worst index when it fails."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_core.operators import Bound
from k3_core.testing.poison import bits


@dataclass(frozen=True)
class Expected:
    """What one result must be.

    value: fp64, or the exact dtype where bits are compared. mask: which elements are compared (None: all), broadcast to
    the shape. free: which elements may hold anything. Elements of a mutated argument in neither keep their bits.
    bound: overrides the table's tolerance; name: looks it up under another name.
    scale: size of the terms behind each value, broadcast to the shape; None: the rms of the row (the last axis).
    """

    value: Tensor
    mask: Tensor | None = None
    free: Tensor | None = None
    bound: Bound | None = None
    name: str | None = None
    scale: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """One comparison. error, limit: norm relative to the scale; score: worst error over its bound, <= 1 passes."""

    result: str
    ok: bool
    error: float
    limit: float
    score: float
    message: str


def compare(result: str, got: Tensor, expected: Expected, bound: Bound) -> Outcome:
    """got against expected within bound."""
    if tuple(got.shape) != tuple(expected.value.shape):
        text = f"{result}: shape {tuple(got.shape)}, must be {tuple(expected.value.shape)}"
        return Outcome(result, False, math.inf, bound.norm, math.inf, text)
    mask = torch.ones((), dtype=torch.bool, device=got.device) if expected.mask is None else expected.mask
    mask = mask.to(got.device).expand(got.shape)
    if bound.exact:
        return _exact(result, got, expected.value.to(got.device), mask)
    want = expected.value.to(got.device, torch.float64)
    value = got.to(torch.float64)
    # A row's scale is its own rms where the row takes part; values outside the mask may be NaN.
    clean = torch.where(mask, want, 0.0)
    scale = clean.square().mean(-1, keepdim=True).sqrt() if expected.scale is None else expected.scale.to(got.device)
    scale = torch.where(mask, scale.expand(mask.shape), 0.0)
    error = torch.where(mask, (value - want).abs(), 0.0)
    error = torch.where(error.isnan(), math.inf, error)
    limit = bound.rtol * clean.abs() + bound.atol * scale + bound.floor
    ratio = torch.where(error == 0, 0.0, error / limit)
    norm, reference = float(error.square().sum().sqrt()), float(scale.square().sum().sqrt())
    count = max(int(mask.sum()), 1)
    relative = 0.0 if norm <= bound.floor * count**0.5 else norm / reference if reference else math.inf
    worst = float(ratio.max()) if ratio.numel() else 0.0
    score = max(worst, relative / bound.norm if bound.norm else 0.0)
    if score <= 1:
        return Outcome(result, True, relative, bound.norm, score, "")
    where = _index(ratio)
    text = (
        f"{result}{where} = {float(value[tuple(where)]):.9g}, must be {float(want[tuple(where)]):.9g} "
        f"(error {worst:.3g} of the allowed); norm of the error {relative:.3g}, allowed {bound.norm:.3g}; "
        f"{int((ratio > 1).sum())} of {int(mask.sum())} elements are out of bounds"
    )
    return Outcome(result, False, relative, bound.norm, score, text)


def _exact(result: str, got: Tensor, want: Tensor, mask: Tensor) -> Outcome:
    if got.dtype != want.dtype:
        text = f"{result}: dtype {got.dtype}, must be {want.dtype}"
        return Outcome(result, False, math.inf, 0.0, math.inf, text)
    wrong = (bits(got) != bits(want)) & mask
    if got.is_floating_point():
        wrong &= ~((got == 0) & (want == 0))  # -0 and +0 are the same value
    if not bool(wrong.any()):
        return Outcome(result, True, 0.0, 0.0, 0.0, "")
    where = _index(wrong.to(torch.float32))
    text = (
        f"{result}{where} = {got[tuple(where)].item()!r}, must be exactly {want[tuple(where)].item()!r}; "
        f"{int(wrong.sum())} of {int(mask.sum())} elements differ"
    )
    return Outcome(result, False, math.inf, 0.0, math.inf, text)


def _index(x: Tensor) -> list[int]:
    flat = int(x.contiguous().argmax())
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape)]
