"""Prefill plans cut by this wheel's cost model; the tables themselves are k3_core.operators.kda_plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from k3_core.operators import kda_plan as shared
from k3_core.operators.kda_plan import FIRST, LAST, SEVERAL, PrefillPlan, check_plan
from k3_nvidia.tuning import kda as tuning

__all__ = ["CHUNKS", "FIRST", "FLASH", "LAST", "SEVERAL", "Plan", "PrefillPlan", "check_plan", "plan_prefill"]

#: Implementations of kda_prefill: this wheel's kernels, and vLLM's FlashKDA operator (kda_flash).
CHUNKS, FLASH = "chunks", "flash"


@dataclass(frozen=True)
class Plan(PrefillPlan):
    """A PrefillPlan and the implementation that the measurements favour for the batch.

    forced: the choice was the caller's, so a call that the implementation cannot take is an error.
    """

    engine: str = CHUNKS
    forced: bool = False


def plan_prefill(
    cu_seqlens: Tensor | Sequence[int],
    heads: int,
    device: torch.device | str,
    *,
    dim: int = 128,
    segment_chunks: int | None = None,
    engine: str | None = None,
) -> Plan:
    """Tables for sequences bounded by cu_seqlens ([B + 1], starts at 0, does not decrease).

    A CPU tensor or a list costs one asynchronous copy; a device tensor is read back first, which waits for the device.
    segment_chunks: chunks a segment (0: uncut); None asks the cost model in tuning/kda.py. engine: CHUNKS
    or FLASH; None asks the measurements of this device (tuning.prefill_engine) unless the call says how to cut.
    Raises ValueError for boundaries that are not boundaries and for an engine that there is not.
    """
    if engine not in (None, CHUNKS, FLASH):
        raise ValueError(f"kda_prefill: engine must be {CHUNKS!r}, {FLASH!r} or None, got {engine!r}")
    bounds = [int(b) for b in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]

    def cost_model(chunks: list[int]) -> int:
        units = None
        if torch.device(device).type == "cuda":
            units = torch.cuda.get_device_properties(device).multi_processor_count
        return tuning.segment_length(chunks, heads, dim, units)

    base = shared.plan_prefill(bounds, device, cost_model if segment_chunks is None else segment_chunks)
    chosen = engine or CHUNKS
    lengths = [b - a for a, b in pairwise(bounds)]
    # The operator is not asked about sequences without tokens, nor about heads it is not compiled for.
    if engine is None and segment_chunks is None and dim == 128 and min(lengths, default=0) > 0:
        chosen = tuning.prefill_engine(heads, sum(lengths), max(lengths), _device_name(torch.device(device)))
    if chosen == FLASH and min(lengths, default=0) <= 0:
        raise ValueError("kda_prefill: FlashKDA is called for sequences that have a token each")
    return Plan(**vars(base), engine=chosen, forced=engine is not None)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
