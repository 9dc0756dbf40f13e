"""Launch choices as data, one table an architecture.

No AMD device was available: none of these figures was measured on one. They follow from what the compiler reports
(registers, LDS, occupancy; packages/k3-amd/tests/amd_kernels_table.json) and from the architecture's own numbers. They
change speed, never results.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

ARCHITECTURES = ("gfx942", "gfx950")
#: Bytes of LDS that one workgroup may have.
LDS = {"gfx942": 65536, "gfx950": 163840}
#: Compute units: MI300X and MI325X (gfx942), MI350X and MI355X (gfx950). Used where the device does not say.
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}


@cache
def table(arch: str) -> dict[str, Any]:
    """All launch choices for an architecture. KeyError names the known ones."""
    text = resources.files("k3_amd.tuning").joinpath("launch.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    if arch not in ARCHITECTURES:
        raise KeyError(f"no launch choices for {arch!r}; known: {', '.join(ARCHITECTURES)}")
    merged = {**data["common"], **data[arch]}
    return {name: entry for name, entry in merged.items() if name != "about"}


def launch(kernel: str, arch: str) -> dict[str, Any]:
    """Constants and options of one kernel: tile sizes, `threads` of a program, compiler options."""
    return dict(table(arch)[kernel])


def expert_plans(arch: str) -> list[dict[str, Any]]:
    """Tiles of the expert products, smallest batch first; each has max_pairs, the last one None."""
    return [dict(row) for row in table(arch)["experts"]]


def expert_plan(arch: str, pairs: float) -> dict[str, Any]:
    """The tiles for a call in which an expert can expect that many pairs (tokens * top_k / experts)."""
    rows = expert_plans(arch)
    return next((r for r in rows if r["max_pairs"] is None or pairs <= r["max_pairs"]), rows[-1])


def product(plan: dict[str, Any], which: str, K: int) -> dict[str, Any]:
    """Tiles and options of the gate/up ("13") or down ("2") product of a plan over K columns.

    Where K has an odd number of blocks of 64 a step is 64 deep; small tiles then have half the threads, so that a lane
    still loads 16 bytes of codes.
    """
    deep = plan["BK" + which]
    depth = deep if K % deep == 0 else 64
    threads = plan["threads"] // 2 if depth < deep and plan["BM"] <= 32 else plan["threads"]
    kept = {k: v for k, v in plan.items() if k not in ("max_pairs", "BN13", "BK13", "BN2", "BK2")}
    return kept | {"BN": plan["BN" + which], "BK": depth, "threads": threads}
