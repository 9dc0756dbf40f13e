"""Tile choices of the expert kernels as data, and the rule for devices that nobody measured.

A plan is chosen by the width of a rank's experts, which says how many programs share an expert, and by the number of
pairs an expert can expect, ``pairs = tokens * top_k / experts``: that, not the token count, decides how many columns a
tile should have. The tables are per device name; an unmeasured device of capability 9.0 uses the rows of ``HOPPER``, a
newer one ``default`` (tiles that fit every architecture's shared memory), one below 9.0 those with fewer stages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

HOPPER = "NVIDIA H200"  # whose rows other devices of capability 9.0 use
ANY = 1e6  # expected pairs that no step reaches: a row up to so many is the last


@dataclass(frozen=True)
class Plan:
    """Tiles of one expert call. block_n: tokens a tile, plus up to extra_n (0, or 32 and more) in a second accumulator;
    w13: row blocks (16 rows each), column blocks (64 each), warps, stages;
    w2: row blocks, warps, stages and row tiles a program (narrow kernel), or wide_mt row blocks and kt2 column blocks;
    one13, one2: row blocks of the kernels for one token (0: the general ones), the former's stages, the latter's row
    tiles a program;
    next_quarters: how much of the down weights gate/up asks into the L2; regs13: most registers a thread of gate/up (0:
    any); block_n2, extra_n2: tokens a tile of the down product above 128 tokens (0: as gate/up)."""

    block_n: int
    mt13: int
    kt13: int
    warps13: int
    stages13: int
    mt2: int
    kt2: int
    warps2: int
    stages2: int
    rows2: int
    combine_block: int
    pdl: bool
    extra_n: int = 0
    wide_mt: int = 8
    one13: int = 0
    one2: int = 0
    one_stages: int = 5
    one_rows: int = 2
    next_quarters: int = 0
    regs13: int = 0
    block_n2: int = 0
    extra_n2: int = 0

    @property
    def item_n(self) -> int:
        """Most tokens of one work item."""
        return self.block_n + self.extra_n

    @property
    def down_n(self) -> tuple[int, int]:
        """Tokens a tile of the down product, and in its second accumulator, for more than 128 tokens."""
        return (self.block_n2, self.extra_n2) if self.block_n2 else (self.block_n, self.extra_n)


@dataclass(frozen=True)
class Row:
    """A plan, and the widest expert and the largest expected pairs an expert it is for."""

    max_width: float
    max_pairs: float
    plan: Plan


@lru_cache(maxsize=1)
def _tables() -> dict[str, list[Row]]:
    """Rows of each device, narrow experts first, then few pairs first."""
    raw = json.loads((Path(__file__).parent / "experts.json").read_text())
    return {
        device: [
            Row(float(table["max_width"]), float(row["max_pairs"]), Plan(**row["plan"]))
            for table in entry["tables"]
            for row in table["rows"]
        ]
        for device, entry in raw["devices"].items()
    }


def rows(device: str, width: int | None = None) -> list[Row]:
    """The rows of a device (``default`` if it has none): all, or those of the narrowest table that holds ``width``."""
    tables = _tables()
    found = tables.get(device, tables["default"])
    if width is None:
        return found
    limit = next((r.max_width for r in found if width <= r.max_width), found[-1].max_width)
    return [r for r in found if r.max_width == limit]


def measured(device: str, capability: int) -> str:
    """The device whose rows are used for ``device``."""
    return HOPPER if device not in _tables() and capability == 90 else device


def last_tokens(max_pairs: float, top_k: int, num_experts: int) -> int:
    """The largest token count for which ``choose`` takes a row of ``max_pairs`` pairs an expert; 0 for none."""
    tokens = int(max_pairs * num_experts / top_k) + 1
    while tokens and tokens * top_k / max(num_experts, 1) > max_pairs:
        tokens -= 1
    return tokens


def choose(tokens: int, top_k: int, num_experts: int, device: str, capability: int, width: int) -> Plan:
    """The plan for a call: ``num_experts`` over all ranks, ``width`` of one rank's expert (padded to 64)."""
    table = rows(measured(device, capability), width)
    pairs = tokens * top_k / max(num_experts, 1)
    plan = next((r.plan for r in table if pairs <= r.max_pairs), table[-1].plan)
    if capability < 90:
        plan = replace(plan, stages13=min(plan.stages13, 2), stages2=min(plan.stages2, 2), one13=0, one2=0, pdl=False)
    return plan


def plans(device: str = "default", width: int | None = None) -> list[Plan]:
    """All plans of a device, or of one width, smallest batch first (warm-up compiles each)."""
    return [r.plan for r in rows(device, width)]
