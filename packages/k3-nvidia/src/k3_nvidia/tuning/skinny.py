"""Which kernel computes a product of 1..16 rows: measured winners by (M, N, K), ``skinny.json`` says where and when.

Rule: a device, a matrix size or a row count that was not measured is cuBLAS's, and so is every size where no kernel of
ours was faster by ``MARGIN``. M in between takes the entry of the next larger M that was measured. Where the CuTe DSL
is not installed its entries are passed over for the next best. An empty table changes nothing.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from k3_nvidia.kernels.skinny_gemm import MAX_ROWS

#: A kernel replaces cuBLAS, and CuTe replaces Triton, only if it takes at most this part of the time. Measured behind a
#: copy, which nothing overlaps: behind a kernel that lets it start early, as in the layers, a product of ours takes 0.3
#: to 1.4 us less and cuBLAS no less (benchmarks/results/chain.json), so a tie is ours.
MARGIN, CUTE_MARGIN = 1.0, 0.97


@dataclass(frozen=True)
class Choice:
    """kernel: ``triton`` or ``cute``; config: the arguments of that kernel's ``Config``."""

    kernel: str
    config: tuple[tuple[str, Any], ...]


@functools.cache
def table() -> dict[str, Any]:
    """skinny.json, read once: devices -> name -> date, measured, rows [{m, n, k, cublas_us, floor_us, best: [...]}]."""
    text = resources.files("k3_nvidia.tuning").joinpath("skinny.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@functools.cache
def _winners(device: str) -> dict[tuple[int, int], dict[int, list[Choice]]]:
    """(N, K) -> M -> kernels that beat cuBLAS, best first; an empty list is cuBLAS."""
    found: dict[tuple[int, int], dict[int, list[Choice]]] = {}
    for row in table()["devices"].get(device, {"rows": []})["rows"]:
        best = [Choice(entry["kernel"], tuple(sorted(entry["config"].items()))) for entry in row["best"]]
        found.setdefault((row["n"], row["k"]), {})[row["m"]] = best
    return found


def measured(device: str) -> bool:
    """Whether this device (its name as CUDA reports it) has a table."""
    return bool(_winners(device))


def choices(n: int, k: int, device: str, kernels: frozenset[str]) -> list[Choice | None]:
    """What computes [M, K] x [N, K]^T for M = index 0..16; None is cuBLAS. ``kernels``: those that can be used here."""
    by_rows = _winners(device).get((n, k), {})
    result: list[Choice | None] = [None]
    for rows in range(1, MAX_ROWS + 1):
        measured_rows = min((m for m in by_rows if m >= rows), default=None)
        entry = [] if measured_rows is None else by_rows[measured_rows]
        result.append(next((choice for choice in entry if choice.kernel in kernels), None))
    return result
