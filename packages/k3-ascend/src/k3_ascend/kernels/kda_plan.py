"""The host side of a prefill: the chunks of a packed batch. Built once a step, for all layers.

Everything is one int32 buffer and one copy to the device. Building it from a CPU cu_seqlens never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

#: Tokens a chunk.
CHUNK = 64


@dataclass(frozen=True)
class PrefillPlan:
    """Device tables of one packed batch.

    chunks int32 [num_chunks, 4]: first token, rows, sequence, index in its sequence. sequences int32 [B, 4]: first
    chunk, chunks, first token, tokens. end: the row after the last sequence.
    """

    num_seqs: int
    end: int
    chunks: Tensor
    sequences: Tensor

    @property
    def num_chunks(self) -> int:
        """Chunks of all sequences."""
        return self.chunks.shape[0]


def plan_prefill(cu_seqlens: Tensor | Sequence[int], device: torch.device | str) -> PrefillPlan:
    """Tables for sequences bounded by cu_seqlens ([B + 1], starts at 0, does not decrease).

    A CPU tensor or a list costs one asynchronous copy; a device tensor is read back first, which waits for the device.
    Raises ValueError for boundaries that are not boundaries.
    """
    bounds = [int(b) for b in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
    if not bounds or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"kda_prefill: cu_seqlens must start at 0 and not decrease, got {bounds[:8]}...")
    chunks: list[int] = []
    sequences: list[int] = []
    for seq, (start, end) in enumerate(pairwise(bounds)):
        count = -(-(end - start) // CHUNK)
        sequences += [len(chunks) // 4, count, start, end - start]
        for i in range(count):
            chunks += [start + i * CHUNK, min(CHUNK, end - start - i * CHUNK), seq, i]
    packed = torch.tensor(chunks + sequences, dtype=torch.int32)
    if torch.device(device).type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    first, second = packed.split([len(chunks), len(sequences)])
    return PrefillPlan(len(bounds) - 1, bounds[-1], first.view(-1, 4), second.view(-1, 4))


def check_plan(op: str, plan: PrefillPlan, sequences: int, tokens: int) -> None:
    """Raises ValueError where a plan is not that of a call."""
    if plan.num_seqs != sequences or plan.end > tokens:
        raise ValueError(
            f"{op}: the plan is for {plan.num_seqs} sequences ending at row {plan.end}, the call has {sequences} "
            f"sequences and {tokens} rows"
        )
