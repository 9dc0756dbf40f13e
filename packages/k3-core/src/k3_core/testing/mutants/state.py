"""Faults of the state copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_core.testing.mutants.base import Arguments, Run, dense_view, plant


@plant("state_gather", "has_initial_state is ignored", "R7.i32.strided.flags")
def _flags_ignored(a: Arguments, run: Run) -> Any:
    return run(has_initial_state=None)


@plant("state_gather", "invalid rows are left as they were", "R7.i32")
def _invalid_rows_unwritten(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    result[a["indices"] < 0] = float("nan")
    return result


@plant("state_gather", "row 0 is taken for the null block", "R7.i32")
def _gather_skips_row_zero(a: Arguments, run: Run) -> Any:
    return run(indices=torch.where(a["indices"] == 0, -1, a["indices"]))


@plant("state_gather", "pages are taken to touch", "R7.i64.strided")
def _gather_page_stride(a: Arguments, run: Run) -> Any:
    return run(cache=dense_view(a["cache"]))


@plant("state_gather", "the index past the end is clamped", "R7.i32")
def _gather_clamps(a: Arguments, run: Run) -> Any:
    return run(indices=a["indices"].clamp(max=a["cache"].shape[0] - 1))


@plant("state_scatter", "index -1 writes the last row", "R7.i32")
def _scatter_wraps(a: Arguments, run: Run) -> None:
    n = a["cache"].shape[0]
    run(indices=torch.where(a["indices"] == -1, n - 1, a["indices"]))


@plant("state_scatter", "row 0 is taken for the null block", "R7.i32")
def _scatter_skips_row_zero(a: Arguments, run: Run) -> None:
    run(indices=torch.where(a["indices"] == 0, -1, a["indices"]))


@plant("state_scatter", "a page is copied with its gap", "R7.i32.strided")
def _gap_overwritten(a: Arguments, run: Run) -> None:
    run()
    cache, payload = a["cache"], a["cache"][0].numel()
    if cache.stride(0) > payload and len(a["indices"]):
        flat = cache.as_strided((cache.shape[0], payload + 8), (cache.stride(0), 1))
        flat[int(a["indices"][0]), payload:] = 0.0


@plant("state_scatter", "the stride of the indices is ignored", "R7.i32.strided")
def _scatter_index_stride(a: Arguments, run: Run) -> None:
    run(indices=dense_view(a["indices"]))
