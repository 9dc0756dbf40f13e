"""The host side of a prefill: which chunks, segments and scans a packed batch has. Built once a step, for all layers.

Everything is one int32 buffer and one copy to the device. Building it from a CPU cu_seqlens never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 64
FIRST, LAST, SEVERAL = 1, 2, 4


@dataclass(frozen=True)
class PrefillPlan:
    """Device tables of one packed batch.

    chunks int32 [num_chunks, 4]: first token, rows, sequence, index in its sequence. segments int32 [num_segments, 4]:
    first chunk, chunks, sequence, flags (FIRST, LAST, SEVERAL). order int32 [num_local]: segments with a successor.
    scans int32 [num_scans, 2]: first segment and segment count of sequences of more than two segments.
    """

    num_seqs: int
    end: int
    chunks: Tensor
    segments: Tensor
    order: Tensor
    scans: Tensor

    @property
    def num_chunks(self) -> int:
        """Chunks of all sequences."""
        return self.chunks.shape[0]

    @property
    def num_segments(self) -> int:
        """Segments of all sequences."""
        return self.segments.shape[0]


def plan_prefill(
    cu_seqlens: Tensor | Sequence[int],
    device: torch.device | str,
    segment_chunks: int | Callable[[list[int]], int],
) -> PrefillPlan:
    """Tables for sequences bounded by cu_seqlens ([B + 1], starts at 0, does not decrease).

    A CPU tensor or a list costs one asynchronous copy; a device tensor is read back first, which waits for the device.
    segment_chunks: chunks a segment (0: uncut), or a cost model that says it for the chunk counts of the sequences that
    have any. Raises ValueError for boundaries that are not boundaries.
    """
    bounds = [int(b) for b in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
    if not bounds or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"kda_prefill: cu_seqlens must start at 0 and not decrease, got {bounds[:8]}...")
    counts = [-(-(b - a) // CHUNK) for a, b in pairwise(bounds)]
    if callable(segment_chunks):
        segment_chunks = segment_chunks([n for n in counts if n]) if any(counts) else 0
    chunks: list[int] = []
    segments: list[int] = []
    order: list[int] = []
    scans: list[int] = []
    for seq, (count, (start, end)) in enumerate(zip(counts, pairwise(bounds), strict=True)):
        pieces = -(-count // segment_chunks) if segment_chunks else min(count, 1)
        first_chunk, first_segment = len(chunks) // 4, len(segments) // 4
        for i in range(count):
            token = start + i * CHUNK
            chunks += [token, min(CHUNK, end - token), seq, i]
        for p in range(pieces):
            lo, hi = p * count // pieces, (p + 1) * count // pieces
            flags = (FIRST if p == 0 else 0) | (LAST if p == pieces - 1 else 0) | (SEVERAL if pieces > 1 else 0)
            segments += [first_chunk + lo, hi - lo, seq, flags]
        order += range(first_segment, first_segment + max(pieces - 1, 0))
        if pieces > 2:
            scans += [first_segment, pieces]
    # Every table starts on 16 bytes whatever the batch: pointers of varying alignment would be varying kernel variants.
    filler = [0] * (-len(order) % 4)
    packed = torch.tensor(chunks + segments + order + filler + scans, dtype=torch.int32)
    if torch.device(device).type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    c, s, o, _, x = packed.split([len(chunks), len(segments), len(order), len(filler), len(scans)])
    return PrefillPlan(len(bounds) - 1, bounds[-1], c.view(-1, 4), s.view(-1, 4), o, x.view(-1, 2))


def check_plan(op: str, plan: PrefillPlan, sequences: int, tokens: int) -> None:
    """Raises ValueError where a plan was made for another batch."""
    if plan.num_seqs != sequences or plan.end > tokens:
        raise ValueError(
            f"{op}: the plan is for {plan.num_seqs} sequences ending at row {plan.end}, the call has {sequences} "
            f"sequences and {tokens} rows"
        )


MAX_SEGMENTS = 64
MIN_CHUNKS = 3


@dataclass(frozen=True)
class Costs:
    """What the cost model knows of a device. Times are microseconds: a chunk of a local or output chain, a segment of
    a scan, and once for cutting at all; wave: what a chain takes before its first step, for each wave but the first.
    rows_*: programs of one head and segment; concurrent_*: programs a unit runs.
    """

    units: int
    local: float
    scan: float
    output: float
    cut: float
    rows_local: int
    rows_output: int
    concurrent_local: int
    concurrent_output: int
    wave: float = 0.0


def segment_length(chunks: Sequence[int], heads: int, costs: Costs) -> int:
    """Chunks a segment that the cost model likes best for sequences of these many chunks; 0 means uncut.

    The passes are chains of steps of one chunk. A few waves of equal chains last that many chains; many waves even out,
    half a chain is added for their ragged end.
    """

    def duration(chain: int, chains: int, work: int, places: int, step: float) -> float:
        waves = -(-chains // places)
        steps = chain * waves if waves <= 4 else work / places + 0.5 * chain
        return steps * step + (waves - 1) * costs.wave

    def estimate(cut: int) -> float:
        pieces = [-(-c // cut) for c in chunks]
        longest = max(-(-c // n) for c, n in zip(chunks, pieces, strict=True))
        programs = heads * costs.rows_output
        places = costs.units * costs.concurrent_output
        output = duration(longest, programs * sum(pieces), programs * sum(chunks), places, costs.output)
        more = sum(n - 1 for n in pieces)
        if not more:
            return output
        chains = heads * costs.rows_local * more
        local = duration(longest, chains, chains * longest, costs.units * costs.concurrent_local, costs.local)
        return output + local + max(pieces) * costs.scan + costs.cut

    longest = max(chunks, default=0)
    if longest <= MIN_CHUNKS:
        return 0
    options = {max(-(-longest // n), MIN_CHUNKS) for n in range(1, MAX_SEGMENTS + 1)}
    best = min(sorted(options, reverse=True), key=estimate)
    return 0 if best >= longest else best
