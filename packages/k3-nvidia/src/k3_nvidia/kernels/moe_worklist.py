"""From chosen experts to the work list of the expert kernels, without a host read and for any routing.

A bit matrix says which token chose which local expert: word t/32 of expert e has bit t%32. (An expert occurs at most
once among a token's choices.) Counts are population counts, the place of a pair among its expert's pairs is a
population count of lower bits: the result is the same whatever order the programs ran in, although the bits are set by
atomic or.

Buffers (int32, one allocation, see ``Worklist``):
    mask    [WORDS, EB]   EB = experts rounded up to a power of two; must be zero before, with ``ticket``
    ticket  [1]           programs that have finished their tokens; the last one builds the list (up to 128 tokens)
    number  [1]           items
    offset  [EB]          first sorted position of each expert
    work    [items, 4]    expert, first position, count, 0; ascending experts; at most BN pairs an item
    sorted  [T * top_k]   pair numbers (token * top_k + slot), by expert, then token
    number2, work2        the items of the down product, where it takes others than gate/up (more than 128 tokens)

One token (``few``) needs neither mask nor offset: its pairs are compared with each other.
"""

# mypy: allow-untyped-defs
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators.triton_host import interpreting

ONE_LAUNCH_TOKENS = 128
FEW_PAIRS = 64  # of one token


@triton.jit
def popcount(x):
    """Set bits of each int32."""
    v = x.to(tl.uint32, bitcast=True)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return ((v * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def mark(mask_ptr, local, token, valid, EB: tl.constexpr):
    """Set the bit of ``token`` in the rows of the ``local`` experts."""
    bit = (tl.full(local.shape, 1, tl.int32) << (token % 32)).to(tl.int32)
    tl.atomic_or(mask_ptr + (token // 32) * EB + local, bit, mask=valid, sem="relaxed")


@triton.jit
def build_list(count, work_ptr, number_ptr, offset_ptr, EB: tl.constexpr, BN: tl.constexpr):
    """Offsets, number of items and items from the counts [EB] of all local experts (one program)."""
    tl.store(offset_ptr + tl.arange(0, EB), tl.cumsum(count, 0) - count)
    build_items(count, work_ptr, number_ptr, EB, BN)


@triton.jit
def build_items(count, work_ptr, number_ptr, EB: tl.constexpr, BN: tl.constexpr):
    """``build_list`` without the offsets."""
    expert = tl.arange(0, EB)
    first = tl.cumsum(count, 0) - count
    items = (count + BN - 1) // BN
    item = tl.cumsum(items, 0) - items
    tl.store(number_ptr, tl.sum(items, 0))
    for j in range(0, tl.max(items, 0)):
        there = j < items
        out = work_ptr + (item + j) * 4
        tl.store(out, expert, mask=there)
        tl.store(out + 1, first + j * BN, mask=there)
        tl.store(out + 2, tl.minimum(count - j * BN, BN), mask=there)
        tl.store(out + 3, tl.zeros((EB,), tl.int32), mask=there)


@triton.jit
def local_ids(ids, map_ptr, num_local, HAS_MAP: tl.constexpr, valid):
    """Local expert of each global id, and whether it is here (ids < 0: no expert)."""
    valid = valid & (ids >= 0)
    local = ids
    if HAS_MAP:
        local = tl.load(map_ptr + ids, mask=valid, other=-1)
    valid = valid & (local >= 0) & (local < num_local)
    return tl.where(valid, local, 0), valid


@triton.jit
def finish_small(
    mask_ptr, ids_ptr, map_ptr, work_ptr, number_ptr, offset_ptr, sorted_ptr, tokens, top_k, num_local,
    EB: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The whole list in one program, for at most 32 * WORDS tokens; every mask word is set already."""
    expert = tl.arange(0, EB)
    count = tl.zeros((EB,), tl.int32)
    for w in tl.static_range(WORDS):
        count += popcount(tl.load(mask_ptr + w * EB + expert, cache_modifier=".cg"))
    build_list(count, work_ptr, number_ptr, offset_ptr, EB, BN)
    tl.debug_barrier()
    for start in range(0, tokens * top_k, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        inside = pair < tokens * top_k
        ids = tl.load(ids_ptr + pair, mask=inside, other=-1, cache_modifier=".cg")
        local, valid = local_ids(ids, map_ptr, num_local, HAS_MAP, inside)
        token = pair // top_k
        position = tl.load(offset_ptr + local, mask=valid, other=0, cache_modifier=".cg")
        for w in tl.static_range(WORDS):
            bits = tl.load(mask_ptr + w * EB + local, mask=valid, other=0, cache_modifier=".cg")
            # all bits of earlier words, the lower bits of the token's own word, none of later ones
            below = tl.minimum(tl.maximum(token - w * 32, 0), 32)
            keep = tl.where(below == 32, -1, (tl.full((CHUNK,), 1, tl.int32) << tl.minimum(below, 31)) - 1)
            position += popcount(bits & keep)
        tl.store(sorted_ptr + position, pair, mask=valid)


@triton.jit
def few_pairs(
    ids, pair, inside, map_ptr, work_ptr, number_ptr, sorted_ptr, num_local, PAIRS: tl.constexpr, HAS_MAP: tl.constexpr
):
    """The whole list of at most PAIRS pairs, ids [PAIRS] in pair order, no expert with more than one item: every two
    pairs are compared, nothing is counted through memory."""
    local, valid = local_ids(ids, map_ptr, num_local, HAS_MAP, inside)
    key = tl.where(valid, local * PAIRS + pair, 0x7FFFFFFF)  # in the order of the list; a pair that is not here is last
    expert = tl.where(valid, local, -1)
    before = key[:, None] < key[None, :]
    same = (expert[:, None] == expert[None, :]) & valid[:, None]
    position = tl.sum(before.to(tl.int32), 0)
    count = tl.sum(same.to(tl.int32), 0)
    leads = valid & (tl.sum((before & same).to(tl.int32), 0) == 0)  # first of its expert
    item = tl.sum((before & leads[:, None]).to(tl.int32), 0)
    tl.store(sorted_ptr + position, pair, mask=valid)
    tl.store(number_ptr, tl.sum(leads.to(tl.int32), 0))
    out = work_ptr + item * 4
    tl.store(out, local, mask=leads)
    tl.store(out + 1, position, mask=leads)
    tl.store(out + 2, count, mask=leads)
    tl.store(out + 3, tl.zeros((PAIRS,), tl.int32), mask=leads)


@triton.jit
def load_few_pairs(
    ids_ptr, map_ptr, work_ptr, number_ptr, sorted_ptr, pairs, num_local, PAIRS: tl.constexpr, HAS_MAP: tl.constexpr
):
    """``few_pairs`` of ids in memory."""
    pair = tl.arange(0, PAIRS)
    inside = pair < pairs
    ids = tl.load(ids_ptr + pair, mask=inside, other=-1, cache_modifier=".cg")
    few_pairs(ids, pair, inside, map_ptr, work_ptr, number_ptr, sorted_ptr, num_local, PAIRS, HAS_MAP)


@triton.jit(do_not_specialize=["tokens"])
def few_kernel(
    ids_ptr, map_ptr, work_ptr, number_ptr, sorted_ptr, tokens, top_k, num_local,
    PAIRS: tl.constexpr, HAS_MAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the list of a few tokens from given ids."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    load_few_pairs(ids_ptr, map_ptr, work_ptr, number_ptr, sorted_ptr, tokens * top_k, num_local, PAIRS, HAS_MAP)


@triton.jit(do_not_specialize=["tokens"])
def small_kernel(
    ids_ptr, map_ptr, mask_ptr, ticket_ptr, work_ptr, number_ptr, offset_ptr, sorted_ptr, tokens, top_k, num_local,
    TK: tl.constexpr, EB: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr, HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: marks and list from given ids, at most 32 * WORDS tokens. Zeroes the mask itself."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for w in tl.static_range(WORDS):
        tl.store(mask_ptr + w * EB + tl.arange(0, EB), tl.zeros((EB,), tl.int32))
    tl.debug_barrier()
    slot = tl.arange(0, TK)
    rows: tl.constexpr = CHUNK // TK
    for start in range(0, tokens, rows):
        token = start + tl.arange(0, rows)[:, None] + tl.zeros((rows, TK), tl.int32)
        inside = (token < tokens) & (slot < top_k)[None, :]
        ids = tl.load(ids_ptr + token * top_k + slot[None, :], mask=inside, other=-1)
        local, valid = local_ids(ids, map_ptr, num_local, HAS_MAP, inside)
        mark(mask_ptr, local, token, valid, EB)
    tl.debug_barrier()
    finish_small(
        mask_ptr, ids_ptr, map_ptr, work_ptr, number_ptr, offset_ptr, sorted_ptr, tokens, top_k, num_local,
        EB, WORDS, BN, HAS_MAP, CHUNK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def mark_kernel(
    ids_ptr, map_ptr, mask_ptr, tokens, top_k, num_local, TK: tl.constexpr, EB: tl.constexpr, HAS_MAP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Marks of ROWS tokens a program; the mask is zero before."""
    slot = tl.arange(0, TK)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None] + tl.zeros((ROWS, TK), tl.int32)
    inside = (token < tokens) & (slot < top_k)[None, :]
    ids = tl.load(ids_ptr + token.to(tl.int64) * top_k + slot[None, :], mask=inside, other=-1)
    local, valid = local_ids(ids, map_ptr, num_local, HAS_MAP, inside)
    mark(mask_ptr, local, token, valid, EB)


@triton.jit(do_not_specialize=["words"])
def count_kernel(
    mask_ptr, prefix_ptr, count_ptr, ticket_ptr, work_ptr, number_ptr, offset_ptr, words,
    EB: tl.constexpr, EC: tl.constexpr, WC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Program of EC experts: exclusive counts before each word, and totals; the last program builds the list."""
    expert = tl.program_id(0) * EC + tl.arange(0, EC)
    total = tl.zeros((EC,), tl.int32)
    for start in range(0, words, WC):
        w = start + tl.arange(0, WC)
        at = w[:, None] * EB + expert[None, :]
        inside = (w < words)[:, None]
        ones = popcount(tl.load(mask_ptr + at, mask=inside, other=0))
        running = tl.cumsum(ones, 0)
        tl.store(prefix_ptr + at, total[None, :] + running - ones, mask=inside)
        total += tl.sum(ones, 0)
    tl.store(count_ptr + expert, total)
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == EB // EC - 1:
        tl.debug_barrier()
        count = tl.load(count_ptr + tl.arange(0, EB), cache_modifier=".cg")
        build_list(count, work_ptr, number_ptr, offset_ptr, EB, BN)


@triton.jit(do_not_specialize=["pairs"])
def place_kernel(
    ids_ptr, map_ptr, mask_ptr, prefix_ptr, count_ptr, offset_ptr, sorted_ptr, work2_ptr, number2_ptr,
    pairs, top_k, num_local,
    EB: tl.constexpr, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, BN2: tl.constexpr,
):  # fmt: skip
    """Sorted position of CHUNK pairs a program; with BN2 program 0 also builds the down product's items."""
    if (BN2 > 0) & (tl.program_id(0) == 0):
        build_items(tl.load(count_ptr + tl.arange(0, EB)), work2_ptr, number2_ptr, EB, BN2)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = pair < pairs
    ids = tl.load(ids_ptr + pair, mask=inside, other=-1)
    local, valid = local_ids(ids, map_ptr, num_local, HAS_MAP, inside)
    token = pair // top_k
    at = (token // 32) * EB + local
    bits = tl.load(mask_ptr + at, mask=valid, other=0)
    keep = (tl.full((CHUNK,), 1, tl.int32) << (token % 32)) - 1
    position = tl.load(offset_ptr + local, mask=valid, other=0) + tl.load(prefix_ptr + at, mask=valid, other=0)
    tl.store(sorted_ptr + position + popcount(bits & keep), pair, mask=valid)


@dataclass
class Worklist:
    """The list on the device, and the bound on its items that grids use."""

    sorted: torch.Tensor
    work: torch.Tensor
    number: torch.Tensor
    max_items: int
    block_n: int
    offset: torch.Tensor
    mask: torch.Tensor
    ticket: torch.Tensor
    work2: torch.Tensor  # items of the down product: the same, or a list of their own
    number2: torch.Tensor
    max_items2: int
    block_n2: int


def max_items(tokens: int, top_k: int, num_local: int, block_n: int) -> int:
    """No routing gives more items than this (an expert has at most one pair a token)."""
    pairs = tokens * top_k
    touched = max(1, min(num_local, pairs))
    return touched if tokens <= block_n else max(1, min(pairs, touched + pairs // block_n))


def few(tokens: int, padded_top_k: int) -> int:
    """Pairs that ``few_pairs`` compares for so many tokens (its PAIRS), 0 where it does not apply.

    One token only: at 8 tokens and 128 pairs it took 14.8 us with the choice, the mask 12.6 with a slower choice.
    """
    return padded_top_k if tokens == 1 and padded_top_k <= FEW_PAIRS else 0


def allocate(
    tokens: int, top_k: int, num_local: int, block_n: int, device: torch.device, block_n2: int = 0
) -> Worklist:
    """Buffers for ``tokens`` tokens; nothing is initialised (the kernels do it, or ``build`` for long batches)."""
    eb = max(16, triton.next_power_of_2(num_local))
    words = triton.cdiv(max(tokens, 1), 32)
    items = max_items(tokens, top_k, num_local, block_n)
    block_n2 = block_n2 if block_n2 and tokens > ONE_LAUNCH_TOKENS else block_n
    items2 = max_items(tokens, top_k, num_local, block_n2)
    pairs = max(1, tokens * top_k)
    own = block_n2 != block_n
    # The down product of one token reads the entries of 16 items at once (``experts_one``).
    sizes = (words * eb, 16, 16, eb, max(items, 16) * 4, pairs, 16 * own, items2 * 4 * own)
    sizes = tuple(triton.cdiv(s, 16) * 16 for s in sizes)  # 16: keeps every part on 64 bytes
    mask, ticket, number, offset, work, order, number2, work2 = torch.empty(
        sum(sizes), dtype=torch.int32, device=device
    ).split(sizes)
    second = (work2, number2) if own else (work, number)
    return Worklist(order, work, number, items, block_n, offset, mask, ticket, *second, items2, block_n2)


def build(
    topk_ids: torch.Tensor,
    num_local: int,
    block_n: int,
    expert_map: torch.Tensor | None = None,
    pdl: bool = False,
    block_n2: int = 0,
) -> Worklist:
    """Work list of given ids: int32 [T, top_k] contiguous, global (with ``expert_map`` [A] int32) or local; < 0: none.

    One launch up to 128 tokens, a memset and three beyond, where the down product may have items of ``block_n2``
    tokens. Ids of a row are distinct (the operator ``route`` promises it).
    """
    tokens, top_k = topk_ids.shape
    lst = allocate(tokens, top_k, num_local, block_n, topk_ids.device, block_n2)
    eb = lst.offset.numel()
    has_map = expert_map is not None
    emap = topk_ids if expert_map is None else expert_map
    tk = triton.next_power_of_2(top_k)
    if pairs := few(tokens, tk):
        options = {} if interpreting() else {"launch_pdl": pdl}
        few_kernel[(1,)](
            topk_ids, emap, lst.work, lst.number, lst.sorted, tokens, top_k, num_local,
            PAIRS=pairs, HAS_MAP=has_map, PDL=pdl and not interpreting(), num_warps=4, **options,
        )  # fmt: skip
        return lst
    if tokens <= ONE_LAUNCH_TOKENS:
        words = triton.next_power_of_2(triton.cdiv(max(tokens, 1), 32))
        if words * eb > lst.mask.numel():
            lst.mask = torch.empty(words * eb, dtype=torch.int32, device=topk_ids.device)
        options = {} if interpreting() else {"launch_pdl": pdl}
        small_kernel[(1,)](
            topk_ids, emap, lst.mask, lst.ticket, lst.work, lst.number, lst.offset, lst.sorted, tokens, top_k,
            num_local,
            TK=tk, EB=eb, WORDS=words, BN=block_n, HAS_MAP=has_map, CHUNK=max(1024, tk), PDL=pdl and not interpreting(),
            num_warps=8, **options,
        )  # fmt: skip
        return lst
    words = triton.cdiv(tokens, 32)
    scratch = torch.empty(words * eb + eb, dtype=torch.int32, device=topk_ids.device)
    prefix, count = scratch[: words * eb], scratch[words * eb :]
    lst.mask.zero_()
    lst.ticket.zero_()
    rows = max(1, 256 // tk)
    mark_kernel[(triton.cdiv(tokens, rows),)](
        topk_ids, emap, lst.mask, tokens, top_k, num_local, TK=tk, EB=eb, HAS_MAP=has_map, ROWS=rows
    )
    finish_long(lst, topk_ids, emap, has_map, prefix, count, num_local)
    return lst


def finish_long(
    lst: Worklist,
    topk_ids: torch.Tensor,
    emap: torch.Tensor,
    has_map: bool,
    prefix: torch.Tensor,
    count: torch.Tensor,
    num_local: int,
) -> None:
    """Counts, list and positions once the mask is set (more than 128 tokens)."""
    tokens, top_k = topk_ids.shape
    eb = lst.offset.numel()
    ec = min(16, eb)
    count_kernel[(eb // ec,)](
        lst.mask, prefix, count, lst.ticket, lst.work, lst.number, lst.offset, triton.cdiv(tokens, 32),
        EB=eb, EC=ec, WC=32, BN=lst.block_n,
    )  # fmt: skip
    pairs = tokens * top_k
    place_kernel[(triton.cdiv(pairs, 1024),)](
        topk_ids, emap, lst.mask, prefix, count, lst.offset, lst.sorted, lst.work2, lst.number2,
        pairs, top_k, num_local,
        EB=eb, HAS_MAP=has_map, CHUNK=1024, BN2=lst.block_n2 if lst.block_n2 != lst.block_n else 0,
    )  # fmt: skip
