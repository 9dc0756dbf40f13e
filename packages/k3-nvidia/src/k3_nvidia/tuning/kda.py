"""Launch parameters of the KDA kernels and the cost model that cuts a prefill into segments.

The figures were measured on the device that kda.json names. On another device they are used as they are: they change
speed, never results; the multiprocessor count is read from the device where one is given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

CANDIDATES = (4, 5, 6, 8, 10, 11, 12, 13, 16, 20, 24, 32, 40, 48, 64, 96, 128)


@cache
def table() -> dict[str, Any]:
    """kda.json, read once."""
    text = resources.files("k3_nvidia.tuning").joinpath("kda.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def launch(kernel: str) -> dict[str, Any]:
    """Launch keywords of one kernel; entries that are null are left out."""
    return {k: v for k, v in table()[kernel].items() if v is not None}


def step_launch(kernel: str, programs: int, dim: int) -> dict[str, Any]:
    """Launch keywords of decode or verify for this many (row, head) pairs: the first entry whose limit is not passed."""
    for entry in table()[kernel]:
        if entry["up_to"] is None or programs <= entry["up_to"]:
            options = {k: v for k, v in entry.items() if v is not None and k != "up_to"}
            return options | {"BV": min(options["BV"], dim)}
    raise ValueError(f"tuning of {kernel} has no open-ended entry")


def segment_length(chunks: Sequence[int], heads: int, dim: int, multiprocessors: int | None = None) -> int:
    """Chunks a segment that the cost model likes best for sequences of these many chunks; 0 means uncut.

    The passes are chains of steps of one chunk. A pass lasts as long as its longest chain, or as long as all its
    chains need on all multiprocessors, whichever is more; half a chain is added for the ragged end of the latter.
    """
    data = table()
    units = multiprocessors or data["multiprocessors"]
    cost, slots = data["cost_us"], data["concurrent"]
    rows_local = 2 * max(dim // data["local"]["BR"], 1)
    rows_output = max(dim // data["output"]["BR"], 1)

    def length(chain: int, work: float, places: int) -> float:
        return max(float(chain), work / places + 0.5 * chain if work > places * chain else 0.0)

    def estimate(cut: int) -> float:
        longest = max(min(c, cut) for c in chunks)
        output = length(longest, heads * rows_output * sum(chunks), units * slots["output"]) * cost["output"]
        split = [c for c in chunks if c > cut]
        if not split:
            return output
        local = length(longest, heads * rows_local * sum(c - cut for c in split), units * slots["local"])
        segments = max(-(-c // cut) for c in split)
        return output + local * cost["local"] + segments * cost["scan"] + cost["cut"]

    longest = max(chunks, default=0)
    options = [c for c in CANDIDATES if c < longest] + [longest]
    best = min(options, key=estimate) if longest else 0
    return 0 if best >= longest else best
