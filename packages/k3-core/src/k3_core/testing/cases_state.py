"""Cases of state_gather and state_scatter: moves of bits, with pages that don't touch and indices that don't fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from k3_core.testing.case import Case, Draw, Inputs, Sizes, far_strides, padded
from k3_core.testing.cases_kda import row_masks
from k3_core.testing.compare import Expected


def _indices(case: Case, draw: Draw) -> torch.Tensor:
    """Row 0 and the last row, invalid ones on both sides, repeats for a gather."""
    R, S = case.sizes["R"], case.sizes["S"]
    index = draw.permutation(S)[:R]
    if R > 4:
        index[0] = 0 if not bool((index[1:] == 0).any()) else index[0]
        index[1], index[3] = -1, S
        if case.operator == "state_gather":
            index[4] = index[2]
    return index.to(case.options["index"])


def _strides(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    cache = tensors["cache"]
    if case.scale == "huge":
        return far_strides(case, cache=cache)
    if not case.options["strided"]:
        return {}
    strides: dict[str, tuple[int, ...]] = {"cache": padded(cache, 1040), "indices": (2,)}
    return strides | ({"has_initial_state": (3,)} if "has_initial_state" in tensors else {})


def make_gather(case: Case, draw: Draw) -> Inputs:
    """A cache with NaN in some rows: they are data here, and move as they are."""
    R, S, N, V, K = (case.sizes[s] for s in ("R", "S", "N", "V", "K"))
    cache = draw.normal(S, N, V, K).to(case.dtype)
    cache[S // 2, 0, 0] = float("nan")
    tensors = {"cache": cache, "indices": _indices(case, draw)}
    if case.options["flags"]:
        tensors["has_initial_state"] = draw.uniform(R) > 0.4
    return Inputs(tensors, {}, _strides(case, tensors))


def expect_gather(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """Row by row."""
    t = inputs.tensors
    flags = t["has_initial_state"].tolist() if "has_initial_state" in t else [True] * len(t["indices"])
    out = torch.zeros((len(t["indices"]), *t["cache"].shape[1:]), dtype=case.dtype, device=t["cache"].device)
    for r, (i, flag) in enumerate(zip(t["indices"].tolist(), flags, strict=True)):
        if flag and 0 <= i < t["cache"].shape[0]:
            out[r] = t["cache"][i]
    return {"out": Expected(out), "cache": Expected(t["cache"])}


def make_scatter(case: Case, draw: Draw) -> Inputs:
    """Rows of NaN elsewhere in the cache must stay, rows of NaN in the packed tensor must arrive."""
    R, S, N, V, K = (case.sizes[s] for s in ("R", "S", "N", "V", "K"))
    packed = draw.normal(R, N, V, K).to(case.dtype)
    if R:
        packed[R // 2, 0, 0] = float("nan")
    tensors = {"cache": draw.normal(S, N, V, K).to(case.dtype), "indices": _indices(case, draw), "packed": packed}
    return Inputs(tensors, {}, _strides(case, tensors))


def expect_scatter(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """Row by row."""
    t = inputs.tensors
    cache, written = t["cache"].clone(), []
    for r, i in enumerate(t["indices"].tolist()):
        if 0 <= i < cache.shape[0]:
            cache[i] = t["packed"][r]
            written.append(i)
    return {"cache": Expected(cache, row_masks(cache, written))}


def cases(operator: str, dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """Both operators."""
    make, expect = (make_gather, expect_gather) if operator == "state_gather" else (make_scatter, expect_scatter)
    S, N, V, K = {"small": (9, 2, 8, 16), "real": (40, 12, 128, 128), "huge": (3, 6, 128, 128)}[scale]

    def case(R: int, index: torch.dtype, strided: bool, flags: bool = False) -> Case:
        o: dict[str, Any] = {"index": index, "strided": strided, "flags": flags, "far": ("cache",)}
        name = f"R{R}.{'i64' if index is torch.int64 else 'i32'}" + (".strided" if strided else "")
        name += ".flags" if flags else ""
        sizes = {"R": R, "S": S, "N": N, "V": V, "K": K}
        return Case(operator, name, dtype, make, expect, sizes, o, scale)

    for index in (torch.int32, torch.int64):
        for strided in (False, True):
            for R in (2,) if scale == "huge" else (0, 1, 7):
                yield case(R, index, strided, flags=operator == "state_gather" and (R != 7 or strided))
        if operator == "state_gather" and scale != "huge":
            yield case(7, index, True, flags=False)
