"""Measured launch choices of the AttnRes kernel; ``attn_res.json`` says on which device and when.

Rule for a device that was not measured: the table of the nearest one measured is used as it is; the kernel's results do
not depend on the choice beyond fp32 rounding order.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Config:
    """How the kernel is compiled and launched for one range of sizes.

    chunk: elements of a row piece; warps; group: rows a reduction; prefetch: load the next token's first rows early;
    programs: persistent programs a multiprocessor (0: one program a token); maxnreg: register cap, None for none.
    ring: rows in a ring of asynchronous copies (:mod:`k3_nvidia.kernels.attn_res_ring`; group and prefetch do not
    matter then), 0 for rows in registers.
    cluster: blocks a token (:mod:`k3_nvidia.kernels.attn_res_cluster`; programs are then the blocks that must fit a
    multiprocessor or 0, and nothing else matters), 0 for none.
    """

    chunk: int
    warps: int
    group: int
    prefetch: bool
    programs: int
    maxnreg: int | None = None
    ring: int = 0
    cluster: int = 0


@functools.cache
def _table() -> list[tuple[int, int, Config]]:
    """(largest number of tokens, largest number of blocks, choice), in the order they are tried."""
    return read(Path(__file__).with_suffix(".json"))


def read(path: Path) -> list[tuple[int, int, Config]]:
    """The rows of a table's file."""
    data = json.loads(path.read_text())
    return [(row["max_tokens"], row["max_blocks"], Config(**row["config"])) for row in data["rows"]]


def choose(num_tokens: int, num_blocks: int, hidden_size: int, clusters: bool = False) -> Config:
    """The choice for a call: first row whose bounds hold; the last row has none.

    clusters: whether the cluster kernel can take the call; without, its rows are passed over.
    """
    for max_tokens, max_blocks, config in _table():
        if num_tokens <= max_tokens and num_blocks <= max_blocks and (clusters or not config.cluster):
            return config
    return _table()[-1][2]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; 2 for the interpreter on a CPU, so that persistence is exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
