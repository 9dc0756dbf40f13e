"""Which kernel computes a product of 1..32 rows: measured winners by (M, N, K), ``skinny.json`` says where and when.

Rule: a device, a matrix size or a row count that was not measured is cuBLAS's, and so is every size where no kernel of
ours was faster by ``MARGIN``. M in between takes the entry of the next larger M that was measured. Where the CuTe DSL
is not installed its entries are passed over for the next best. An empty table changes nothing.

``hold`` of a row is how many steps of W a product of Triton loads before it waits for x (``skinny_gemm.Config``); none
without it. ``K3_HOLD`` overrides it, for measurements: ``vector:2,dot:1`` by kind of kernel, a kind that is not named
holds nothing. The entries of an H200 are what an engine with that setting won against one without (bench_engine.py,
2026-11-30): one row of TP16. ``benchmarks/sweep_moe_step.py --hold`` measures size by size; it has not run on a device.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from importlib import resources
from typing import Any

from k3_nvidia.kernels.skinny_gemm import MAX_HOLD, MAX_ROWS

VARIABLE = "K3_HOLD"

#: A kernel replaces cuBLAS, and CuTe replaces Triton, only if it takes at most this part of the time. Measured behind a
#: copy, which nothing overlaps: behind a kernel that lets it start early, as in the layers, a product of ours takes 0.3
#: to 1.4 us less and cuBLAS no less (benchmarks/results/chain.json), so a tie is ours.
MARGIN, CUTE_MARGIN = 1.0, 0.97
KINDS = ("vector", "dot")


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


def override(text: str) -> dict[str, int]:
    """``K3_HOLD`` read: steps by kind of kernel; raises ValueError that says what is wrong with it."""
    found = dict.fromkeys(KINDS, 0)
    try:
        for entry in filter(None, text.split(",")):
            kind, _, steps = entry.partition(":")
            if kind not in KINDS or not 0 <= int(steps) <= MAX_HOLD:
                raise ValueError(f"{entry!r} is none of {', '.join(KINDS)} with 0 to {MAX_HOLD} steps")
            found[kind] = int(steps)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r}: {error}; it is read as vector:2,dot:1") from error
    return found


def _config(entry: dict[str, Any], hold: int) -> tuple[tuple[str, Any], ...]:
    """Arguments of a table entry's ``Config``; CuTe's kernel holds nothing."""
    held = {"hold": hold} if entry["kernel"] == "triton" and hold else {}
    return tuple(sorted((entry["config"] | held).items()))


@functools.cache
def _winners(device: str) -> dict[tuple[int, int], dict[int, list[Choice]]]:
    """(N, K) -> M -> kernels that beat cuBLAS, best first; an empty list is cuBLAS."""
    found: dict[tuple[int, int], dict[int, list[Choice]]] = {}
    for row in table()["devices"].get(device, {"rows": []})["rows"]:
        best = [Choice(entry["kernel"], _config(entry, row.get("hold", 0))) for entry in row["best"]]
        found.setdefault((row["n"], row["k"]), {})[row["m"]] = best
    return found


def measured(device: str) -> bool:
    """Whether this device (its name as CUDA reports it) has a table."""
    return bool(_winners(device))


def choices(n: int, k: int, device: str, kernels: frozenset[str]) -> list[Choice | None]:
    """What computes [M, K] x [N, K]^T for M = index 0..32; None is cuBLAS. ``kernels``: those that can be used here.
    Raises ValueError for a ``K3_HOLD`` that cannot be read."""
    by_rows = _winners(device).get((n, k), {})
    result: list[Choice | None] = [None]
    for rows in range(1, MAX_ROWS + 1):
        measured_rows = min((m for m in by_rows if m >= rows), default=None)
        entry = [] if measured_rows is None else by_rows[measured_rows]
        result.append(next((choice for choice in entry if choice.kernel in kernels), None))
    if (text := os.environ.get(VARIABLE)) is not None:
        hold = override(text)
        return [None if choice is None else holding(choice, hold) for choice in result]
    return result


def holding(choice: Choice, hold: dict[str, int]) -> Choice:
    """The same choice with other steps held, by kind of kernel."""
    config: Any = dict(choice.config)
    if choice.kernel != "triton":
        return choice
    return Choice(choice.kernel, tuple(sorted((config | {"hold": hold[config["kind"]]}).items())))
