"""Prefill plans cut by this wheel's cost model; the tables themselves are k3_core.operators.kda_plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3_core.operators import kda_plan as shared
from k3_core.operators.kda_plan import FIRST, LAST, SEVERAL, PrefillPlan, check_plan
from k3_nvidia.tuning import kda as tuning

__all__ = ["FIRST", "LAST", "SEVERAL", "PrefillPlan", "check_plan", "plan_prefill"]


def plan_prefill(
    cu_seqlens: Tensor | Sequence[int],
    heads: int,
    device: torch.device | str,
    *,
    dim: int = 128,
    segment_chunks: int | None = None,
) -> PrefillPlan:
    """Tables for sequences bounded by cu_seqlens ([B + 1], starts at 0, does not decrease).

    A CPU tensor or a list costs one asynchronous copy; a device tensor is read back first, which waits for the device.
    segment_chunks: chunks a segment (0: uncut); None asks the cost model in tuning/kda.py. Raises ValueError for
    boundaries that are not boundaries.
    """

    def cost_model(chunks: list[int]) -> int:
        units = None
        if torch.device(device).type == "cuda":
            units = torch.cuda.get_device_properties(device).multi_processor_count
        return tuning.segment_length(chunks, heads, dim, units)

    return shared.plan_prefill(cu_seqlens, device, cost_model if segment_chunks is None else segment_chunks)
