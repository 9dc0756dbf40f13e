"""Tables whose entries follow one another by size: each has ``up_to``, the largest size it is for, null for any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def reaching(entries: Sequence[dict[str, Any]], size: int, name: str) -> dict[str, Any]:
    """What the first entry that reaches as far as ``size`` says, without ``up_to``.

    Raises ValueError, with the table's ``name``, where none does: the last entry must be open-ended.
    """
    for entry in entries:
        if entry["up_to"] is None or size <= entry["up_to"]:
            return {key: value for key, value in entry.items() if key != "up_to"}
    raise ValueError(f"tuning of {name} has no open-ended entry: none reaches {size}")


def edges(entries: Sequence[dict[str, Any]]) -> list[int]:
    """Sizes behind which another entry holds."""
    return [entry["up_to"] for entry in entries if entry["up_to"] is not None]
