"""Tiles of the small kernels between products (``glue.json``): SiTU, the fp32 sigmoid, the choice of experts.

Rule for every device: the same rows are used. They change speed, never results. The gated norm's rows a program are in
``kda.json``, the weighted sum's columns in ``experts.json``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from k3_nvidia.tuning import entries


@cache
def table() -> dict[str, Any]:
    """glue.json, read once."""
    data: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return data


def situ(rows: int) -> dict[str, int]:
    """{"rows", "columns", "warps"} of a program: the first entry that reaches that far."""
    return entries.reaching(table()["situ"], rows, "situ")


def situ_edges() -> list[int]:
    """Row counts after which the tile of SiTU is another."""
    return entries.edges(table()["situ"])


def sigmoid() -> tuple[int, int]:
    """(most elements, warps) of a program of ``sigmoid_fp32``."""
    return table()["sigmoid"]["elements"], table()["sigmoid"]["warps"]


def choice_warps(listing: bool, few: bool) -> int:
    """Warps of a program that chooses a token's experts; listing: it may also build the list; few: up to 128 tokens."""
    return int(table()["choice"]["listing" if listing else "few" if few else "many"])
