"""Launch parameters of the KDA kernels and the cost model that cuts a prefill into segments.

The figures were measured on the device that kda.json names. On another device they are used as they are: they change
speed, never results; the multiprocessor count is read from the device where one is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from k3_core.operators.kda_plan import Costs
from k3_core.operators.kda_plan import segment_length as shared_segment_length
from k3_nvidia.tuning import entries


def _read(name: str) -> dict[str, Any]:
    text = resources.files("k3_nvidia.tuning").joinpath(name).read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@cache
def table() -> dict[str, Any]:
    """kda.json, read once."""
    return _read("kda.json")


@cache
def prefill_table() -> dict[str, Any]:
    """kda_prefill.json, read once: times of both prefill implementations, a row a measured shape."""
    return _read("kda_prefill.json")


def prefill_engine(heads: int, tokens: int, longest: int, device: str) -> str:
    """ "flash" where vLLM's FlashKDA operator is expected to be the faster one, else "chunks".

    On a device that was not measured it is this wheel's kernels.
    """
    data = prefill_table()
    if device != data["device"]:
        return "chunks"
    return "flash" if log_ratio((heads, tokens, longest), data["rows"]) < 0 else "chunks"


#: Microseconds of both implementations by count, fitted to kda_prefill.json: of a call, of a token and head, of a token
#: of the longest sequence (FlashKDA walks its chunks one after another).
COUNTED = {"chunks": (20.0, 1.35e-3, 0.0), "flash": (25.0, 0.95e-3, 0.03)}


def _counted_ratio(shape: Sequence[float]) -> float:
    """Logarithm of flash / chunks at (heads, tokens, longest) by count alone."""
    heads, tokens, longest = shape[:3]
    us = {name: call + work * heads * tokens + chain * longest for name, (call, work, chain) in COUNTED.items()}
    return math.log(us["flash"] / us["chunks"])


def log_ratio(shape: Sequence[int], rows: Sequence[Sequence[float]]) -> float:
    """Logarithm of flash / chunks at a shape: a measured one's own, else by count, corrected by all measured ones.

    shape: heads, tokens of the batch, tokens of its longest sequence. The correction is the mean of measured less
    counted with weights 1 / distance, the sum of the three doublings between shapes. With each measured shape left out
    of the table in turn this picked the slower side once in 45 and lost 9 per cent; a mean of the ratios themselves
    with weights distance^-3 did so nine times and lost up to 19.
    """
    total = weights = 0.0
    for row in rows:
        ratio = math.log(row[4] / row[3])
        distance = sum(abs(math.log2(a / b)) for a, b in zip(shape, row[:3], strict=True))
        if distance == 0:
            return ratio
        total += (ratio - _counted_ratio(row)) / distance
        weights += 1 / distance
    return _counted_ratio(shape) + total / weights


#: Shared memory of one pipeline stage at D = 128, bytes: what the loop over chunks (or segments) loads per step.
STAGE_BYTES = {"local": 41_000, "scan": 66_000, "output": 66_000}


def launch(kernel: str, shared: int | None = None) -> dict[str, Any]:
    """Launch keywords of one kernel; entries that are null are left out.

    shared: bytes of shared memory a block may have; the pipeline is cut to what fits. None: no limit known.
    """
    options = {k: v for k, v in table()[kernel].items() if v is not None}
    if shared is not None and kernel in STAGE_BYTES:
        options["STAGES"] = max(min(options["STAGES"], shared // STAGE_BYTES[kernel]), 1)
    return options


def chunk_cuda() -> dict[str, Any]:
    """How kda_chunk_cuda is compiled: blocks a multiprocessor; empty: the Triton kernels."""
    return dict(table().get("chunk_cuda", {}))


def passes() -> dict[str, Any]:
    """Groups (rows of the scan) and stages of kda_passes_cuda, an entry a kernel; empty: the Triton passes.

    overlap: whether a pass may start before the kernel before it has ended.
    """
    found: dict[str, Any] = table().get("passes_cuda", {})
    return {name: found[name] for name in ("local", "scan", "output", "overlap")} if found else {}


@cache
def shared_limit(device: int) -> int:
    """Bytes of shared memory a block may have on a CUDA device."""
    import torch

    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave this field out
    return int(properties.shared_memory_per_block_optin)


def step_launch(kernel: str, programs: int, dim: int) -> dict[str, Any]:
    """Launch keywords of decode or verify for this many (row, head) pairs: the first entry that reaches that far."""
    options = {k: v for k, v in entries.reaching(table()[kernel], programs, kernel).items() if v is not None}
    return options | {"BV": min(options["BV"], dim)}


def step_rows(heads: int, most: int) -> list[int]:
    """Row counts up to `most` on each side of every boundary of the decode and verify tables: one a variant or more."""
    edges = [up_to // heads for name in ("decode", "verify") for up_to in entries.edges(table()[name])]
    return sorted({1, max(most, 1), *(min(max(r + d, 1), max(most, 1)) for r in edges for d in (0, 1))})


def segment_length(chunks: Sequence[int], heads: int, dim: int, multiprocessors: int | None = None) -> int:
    """Chunks a segment that the shared cost model likes best with the figures of kda.json; 0 means uncut."""
    data = table()
    explicit = data.get("passes_cuda") if dim == 128 else None
    if explicit:
        rows = {name: {"local": 4, "output": 2}[name] // explicit[name]["groups"] for name in ("local", "output")}
    else:
        rows = {name: max(dim // data[name]["BR"], 1) for name in ("local", "output")}
        rows["local"] *= 2
    measured = explicit or data
    costs = Costs(
        units=multiprocessors or data["multiprocessors"],
        **measured["cost_us"],
        rows_local=rows["local"],
        rows_output=rows["output"],
        concurrent_local=measured["concurrent"]["local"],
        concurrent_output=measured["concurrent"]["output"],
    )
    return shared_segment_length(chunks, heads, costs)
