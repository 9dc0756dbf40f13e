"""Which kernel computes a product of 1..32 rows: measured winners by (M, N, K), ``skinny.json`` says where and when.

Rule: a device, a matrix size or a row count that was not measured is cuBLAS's, and so is every size where no kernel of
ours was faster by ``MARGIN``. M in between takes the entry of the next larger M that was measured. Where the CuTe DSL
is not installed its entries are passed over for the next best. An empty table changes nothing.

``ahead_mb`` of a row is how much of its weight a product of Triton asks the L2 for before it waits for its input: what
memory can bring while the kernels that a layer has before it still run (``benchmarks/sweep_ahead.py``). Without one
each program asks for its first step. ``K3_AHEAD`` overrides it, for measurements: ``7168x3584:24,4352x7168:8`` are
megabytes by N x K, every other size has its first step only; an empty value is that for all.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from importlib import resources
from typing import Any

from k3_nvidia.kernels.skinny_gemm import MAX_ROWS, Config

VARIABLE = "K3_AHEAD"

#: A kernel replaces cuBLAS, and CuTe replaces Triton, only if it takes at most this part of the time. Measured behind a
#: copy, which nothing overlaps: behind a kernel that lets it start early, as in the layers, a product of ours takes 0.3
#: to 1.4 us less and cuBLAS no less (benchmarks/results/chain.json), so a tie is ours.
MARGIN, CUTE_MARGIN = 1.0, 0.97
Size = tuple[int, int]


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


def override(text: str) -> dict[Size, float]:
    """``K3_AHEAD`` read: (N, K) -> megabytes; raises ValueError that says what is wrong with it."""
    found = {}
    try:
        for entry in filter(None, text.split(",")):
            size, _, megabytes = entry.partition(":")
            n, k = map(int, size.split("x"))
            found[n, k] = float(megabytes)
            if not 0 <= found[n, k] < float("inf"):
                raise ValueError(f"{megabytes} is no size")
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r}: {error}; it is read as 7168x3584:24,4352x7168:8") from error
    return found


def _ahead(device: str) -> dict[Size, dict[int, float]]:
    """(N, K) -> M -> megabytes asked for ahead."""
    found: dict[Size, dict[int, float]] = {}
    for row in table()["devices"].get(device, {"rows": []})["rows"]:
        if "ahead_mb" in row:
            found.setdefault((row["n"], row["k"]), {})[row["m"]] = row["ahead_mb"]
    return found


@functools.cache
def _winners(device: str) -> dict[Size, dict[int, list[Choice]]]:
    """(N, K) -> M -> kernels that beat cuBLAS, best first; an empty list is cuBLAS."""
    found: dict[Size, dict[int, list[Choice]]] = {}
    for row in table()["devices"].get(device, {"rows": []})["rows"]:
        best = [Choice(entry["kernel"], tuple(sorted(entry["config"].items()))) for entry in row["best"]]
        found.setdefault((row["n"], row["k"]), {})[row["m"]] = best
    return found


def measured(device: str) -> bool:
    """Whether this device (its name as CUDA reports it) has a table."""
    return bool(_winners(device))


def choices(n: int, k: int, device: str, kernels: frozenset[str]) -> list[Choice | None]:
    """What computes [M, K] x [N, K]^T for M = index 0..32; None is cuBLAS. ``kernels``: those that can be used here.
    Raises ValueError for a ``K3_AHEAD`` that cannot be read."""
    by_rows = _winners(device).get((n, k), {})
    ahead = _ahead(device).get((n, k), {})
    if (text := os.environ.get(VARIABLE)) is not None:
        ahead = dict.fromkeys(by_rows, override(text).get((n, k), 0.0))
    result: list[Choice | None] = [None]
    for rows in range(1, MAX_ROWS + 1):
        measured_rows = min((m for m in by_rows if m >= rows), default=None)
        entry = [] if measured_rows is None else by_rows[measured_rows]
        choice = next((choice for choice in entry if choice.kernel in kernels), None)
        if choice is not None and measured_rows in ahead:
            choice = _asking(choice, ahead[measured_rows], n, k)
        result.append(choice)
    return result


def _asking(choice: Choice, megabytes: float, n: int, k: int) -> Choice:
    """The same choice whose programs ask for so much of the weight ahead; CuTe's ask for their first batch."""
    if choice.kernel != "triton":
        return choice
    config: Any = dict(choice.config)
    steps = Config(**config).asking(megabytes, n, k).ahead
    return Choice(choice.kernel, tuple(sorted((config | {"ahead": steps}).items())))
