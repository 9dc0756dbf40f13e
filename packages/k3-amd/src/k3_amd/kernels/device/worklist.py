"""From chosen experts to the work list of the expert kernels, without a host read, atomics or memory to be zeroed.

A pair is a (token, chosen expert): number token * top_k + slot. Programs compare a chunk of pairs with a few experts
and count; the place of a pair is the sum of what comes before it. The result does not depend on the order in which
programs ran.

    count   [chunks, EB]   pairs of each local expert in each chunk            count_kernel
    total   [EB]           sum over the chunks (count itself where there is one)   total_kernel
    sorted  [pairs]        pair numbers by expert, then pair                   place_kernel
    work    [items, 4]     expert, first position, pairs (at most BM), 0       place_kernel
    number  [1]            items                                               place_kernel
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl


@triton.jit
def local_ids(ids, map_ptr, num_local, HAS_MAP: tl.constexpr, valid):
    """Local expert of each global id, and whether it is here (ids < 0: no expert)."""
    valid = valid & (ids >= 0)
    local = ids
    if HAS_MAP:
        local = tl.load(map_ptr + ids, mask=valid, other=-1)
    valid = valid & (local >= 0) & (local < num_local)
    return tl.where(valid, local, -1), valid


@triton.jit
def _matches(ids_ptr, map_ptr, pairs, num_local, expert, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr):
    """(pair numbers [CHUNK], which of them chose which expert: int32 [CHUNK, EC]) of this program's chunk."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = pair < pairs
    ids = tl.load(ids_ptr + pair, mask=inside, other=-1)
    local, _ = local_ids(ids, map_ptr, num_local, HAS_MAP, inside)
    return pair, (local[:, None] == expert[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "num_local"])
def count_kernel(
    ids_ptr, map_ptr, count_ptr, pairs, num_local,
    EB: tl.constexpr, EC: tl.constexpr, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, EB / EC)."""
    expert = tl.program_id(1) * EC + tl.arange(0, EC)
    _, ones = _matches(ids_ptr, map_ptr, pairs, num_local, expert, HAS_MAP, CHUNK)
    tl.store(count_ptr + tl.program_id(0) * EB + expert, tl.sum(ones, 0))


@triton.jit(do_not_specialize=["chunks"])
def total_kernel(count_ptr, total_ptr, chunks, EB: tl.constexpr, EC: tl.constexpr, ROWS: tl.constexpr):
    """Grid (EB / EC)."""
    expert = tl.program_id(0) * EC + tl.arange(0, EC)
    total = tl.zeros((EC,), tl.int32)
    for start in range(0, chunks, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < chunks)[:, None]
        total += tl.sum(tl.load(count_ptr + row[:, None] * EB + expert[None, :], mask=there, other=0), 0)
    tl.store(total_ptr + expert, total)


@triton.jit(do_not_specialize=["pairs", "num_local"])
def place_kernel(
    ids_ptr, map_ptr, count_ptr, total_ptr, sorted_ptr, work_ptr, number_ptr, pairs, num_local,
    EB: tl.constexpr, EC: tl.constexpr, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, EB / EC). Programs of the first chunk also write the items of their experts."""
    chunk = tl.program_id(0)
    block = tl.program_id(1)
    every = tl.arange(0, EB)
    total = tl.load(total_ptr + every)
    before = every < block * EC
    first = tl.sum(tl.where(before, total, 0), 0)
    expert = block * EC + tl.arange(0, EC)
    own = tl.load(total_ptr + expert)
    offset = first + tl.cumsum(own, 0) - own
    if chunk == 0:
        all_items = (total + BM - 1) // BM
        items = (own + BM - 1) // BM
        item = tl.sum(tl.where(before, all_items, 0), 0) + tl.cumsum(items, 0) - items
        for j in range(0, tl.max(items, 0)):
            there = j < items
            at = work_ptr + (item + j) * 4
            tl.store(at, expert, mask=there)
            tl.store(at + 1, offset + j * BM, mask=there)
            tl.store(at + 2, tl.minimum(own - j * BM, BM), mask=there)
            tl.store(at + 3, tl.zeros((EC,), tl.int32), mask=there)
        if block == 0:
            tl.store(number_ptr, tl.sum(all_items, 0))
    for start in range(0, chunk, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < chunk)[:, None]
        offset += tl.sum(tl.load(count_ptr + row[:, None] * EB + expert[None, :], mask=there, other=0), 0)
    pair, ones = _matches(ids_ptr, map_ptr, pairs, num_local, expert, HAS_MAP, CHUNK)
    position = offset[None, :] + tl.cumsum(ones, 0) - ones
    tl.store(sorted_ptr + position, tl.broadcast_to(pair[:, None], (CHUNK, EC)), mask=ones > 0)
