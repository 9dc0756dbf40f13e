"""How a layer of experts is laid over two streams, by token count and width of a rank's experts (``moe_step.json``).

Rule: a device, a width or a token count that was not measured runs on one stream, with one input product.
``K3_MOE_STEP`` overrides the table, for measurements: ``16:choice+shared,128:split+choice`` is up to 16 tokens choice
and shared, up to 128 split and choice, nothing beyond; an empty value is one stream everywhere.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

VARIABLE = "K3_MOE_STEP"


@dataclass(frozen=True)
class Schedule:
    """What runs where.

    split: the latent's rows and the shared experts' rows of the joined input matrix are two products.
    choice: router and choice run beside the input product.
    shared: the shared experts run beside the routed ones; with split their input product does, too.
    early: the shared experts run on the same stream, before the routed ones instead of behind them, so that nothing
    but a norm stands between the routed experts and the up projection, whose programs ask for their weights meanwhile.
    shared goes before early. Measured on one rank: with several, a sum over ranks stands there as well.
    """

    split: bool = False
    choice: bool = False
    shared: bool = False
    early: bool = False

    @property
    def two_streams(self) -> bool:
        """Whether a side stream is used."""
        return self.choice or self.shared

    @property
    def name(self) -> str:
        """One word for tables of results."""
        return "+".join(f.name for f in fields(self) if getattr(self, f.name)) or "one stream"


#: (last token count, schedule), in order; beyond the last there is one stream.
Schedules = tuple[tuple[int, Schedule], ...]


@cache
def table() -> dict[str, Any]:
    """moe_step.json, read once: devices -> name -> measured, widths [{max_width, rows: [{up_to, schedule}]}]."""
    data: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return data


def parse(words: str) -> Schedule:
    """``split+choice+shared`` in any selection, or ``one stream``; raises ValueError for another word."""
    known = [f.name for f in fields(Schedule)]
    chosen = [] if words in ("", "one stream") else words.split("+")
    if wrong := [word for word in chosen if word not in known]:
        raise ValueError(f"{wrong[0]!r} is none of {', '.join(known)}")
    return Schedule(**dict.fromkeys(chosen, True))


def override(text: str) -> Schedules:
    """``K3_MOE_STEP`` read; raises ValueError that says what is wrong with it."""
    try:
        pairs = [entry.split(":") for entry in text.split(",") if entry]
        found = tuple((int(up_to), parse(words)) for up_to, words in pairs)
        if [up_to for up_to, _ in found] != sorted({up_to for up_to, _ in found}) or any(t < 1 for t, _ in found):
            raise ValueError("token counts must grow")
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r}: {error}; it is read as 16:choice+shared,128:split") from error
    return found


def schedules(device: str, width: int) -> Schedules:
    """Of a device's rank whose experts are ``width`` wide; () is one stream for every token count."""
    if (text := os.environ.get(VARIABLE)) is not None:
        return override(text)
    widths = table()["devices"].get(device, {"widths": []})["widths"]
    rows: list[dict[str, Any]] = next((entry["rows"] for entry in widths if width <= entry["max_width"]), [])
    return tuple((row["up_to"], parse(row["schedule"])) for row in rows)


def choose(found: Schedules, tokens: int) -> Schedule:
    """The schedule of a batch of ``tokens``."""
    return next((schedule for up_to, schedule in found if tokens <= up_to), Schedule())


def edges(device: str | None = None) -> list[int]:
    """Token counts after which some schedule of ``device`` (None: the first GPU) is another.

    The warm-up meets both sides of each in every table whose kernels a schedule launches differently.
    """
    if (text := os.environ.get(VARIABLE)) is not None:
        return [up_to for up_to, _ in override(text)]
    if device is None:
        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    widths = table()["devices"].get(device, {"widths": []})["widths"]
    return sorted({row["up_to"] for entry in widths for row in entry["rows"]})
