"""Triton kernels of the KDA state copy: selected cache pages to and from a packed tensor. Language level 3.2.

Bits move, nothing is computed: the element type may be an integer of the same width. One task is one block of one row
(dense pages) or one run of one row (pages whose inner axes have strides of their own); programs walk over the tasks, so
that the grid can stay at the number of vector cores whatever the number of rows. Everything that belongs to the layout
is a constexpr; rows, index values and the grid are run-time data and select no other variant (``num_rows`` is not
specialised, neither on one nor on multiples of sixteen).

Masks have the form ``offsets < length``, which Ascend's compiler turns into the size of a copy; a length of zero copies
nothing. An invalid row therefore reads slot 0's address without loading from it. Page offsets are multiplied in int64:
the index is widened first, and pages may lie more than 4 GiB apart.

Pointer arguments: ``cache`` and ``packed`` of one element type, ``indices`` int32 or int64 [R], ``flags`` int8 [R] (the
bytes of a bool tensor), all but ``cache`` contiguous. PAGE and the run strides count elements. BLOCK: elements a task
(a power of two). CLEAR: whether invalid rows become zeros (else they are left alone, the caller has cleared them).
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def gather_pages(
    cache,
    indices,
    flags,
    packed,
    num_rows,
    NUM_SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    PAYLOAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """packed[r] = cache[indices[r]] for valid flagged rows of dense pages of PAYLOAD elements."""
    BLOCKS: tl.constexpr = (PAYLOAD + BLOCK - 1) // BLOCK
    offsets = tl.arange(0, BLOCK)
    first, programs = tl.program_id(0), tl.num_programs(0)
    for step in range(0, (num_rows * BLOCKS - first + programs - 1) // programs):
        task = first + step * programs
        row = task // BLOCKS
        start = (task % BLOCKS) * BLOCK
        slot = tl.load(indices + row).to(tl.int64)
        valid = (slot >= 0) & (slot < NUM_SLOTS) & (tl.load(flags + row) != 0)
        length = PAYLOAD - start
        live = tl.where(valid, length, 0)
        source = cache + tl.where(valid, slot, 0) * PAGE + start
        data = tl.load(source + offsets, mask=offsets < live, other=0)
        target = packed + row.to(tl.int64) * PAYLOAD + start
        if CLEAR:
            tl.store(target + offsets, data, mask=offsets < length)
        else:
            tl.store(target + offsets, data, mask=offsets < live)


@triton.jit(do_not_specialize=["num_rows"])
def scatter_pages(
    cache,
    indices,
    packed,
    num_rows,
    NUM_SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    PAYLOAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """cache[indices[r]] = packed[r] for valid rows of dense pages of PAYLOAD elements."""
    BLOCKS: tl.constexpr = (PAYLOAD + BLOCK - 1) // BLOCK
    offsets = tl.arange(0, BLOCK)
    first, programs = tl.program_id(0), tl.num_programs(0)
    for step in range(0, (num_rows * BLOCKS - first + programs - 1) // programs):
        task = first + step * programs
        row = task // BLOCKS
        start = (task % BLOCKS) * BLOCK
        slot = tl.load(indices + row).to(tl.int64)
        valid = (slot >= 0) & (slot < NUM_SLOTS)
        live = tl.where(valid, PAYLOAD - start, 0)
        data = tl.load(packed + row.to(tl.int64) * PAYLOAD + start + offsets, mask=offsets < live, other=0)
        target = cache + tl.where(valid, slot, 0) * PAGE + start
        tl.store(target + offsets, data, mask=offsets < live)


@triton.jit(do_not_specialize=["num_rows"])
def gather_runs(
    cache,
    indices,
    flags,
    packed,
    num_rows,
    NUM_SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    H_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As gather_pages without clearing, for pages [H, V, K] of any inner strides: one run along K a task."""
    offsets = tl.arange(0, BLOCK)
    first, programs = tl.program_id(0), tl.num_programs(0)
    for step in range(0, (num_rows * H * V - first + programs - 1) // programs):
        task = first + step * programs
        row = task // (H * V)
        run = task % (H * V)
        slot = tl.load(indices + row).to(tl.int64)
        valid = (slot >= 0) & (slot < NUM_SLOTS) & (tl.load(flags + row) != 0)
        live = tl.where(valid, K, 0)
        inner = (run // V).to(tl.int64) * H_STRIDE + (run % V).to(tl.int64) * V_STRIDE
        source = cache + tl.where(valid, slot, 0) * PAGE + inner
        data = tl.load(source + offsets * K_STRIDE, mask=offsets < live, other=0)
        tl.store(packed + task.to(tl.int64) * K + offsets, data, mask=offsets < live)


@triton.jit(do_not_specialize=["num_rows"])
def scatter_runs(
    cache,
    indices,
    packed,
    num_rows,
    NUM_SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    H_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As scatter_pages, for pages [H, V, K] of any inner strides: one run along K a task."""
    offsets = tl.arange(0, BLOCK)
    first, programs = tl.program_id(0), tl.num_programs(0)
    for step in range(0, (num_rows * H * V - first + programs - 1) // programs):
        task = first + step * programs
        row = task // (H * V)
        run = task % (H * V)
        slot = tl.load(indices + row).to(tl.int64)
        valid = (slot >= 0) & (slot < NUM_SLOTS)
        live = tl.where(valid, K, 0)
        inner = (run // V).to(tl.int64) * H_STRIDE + (run % V).to(tl.int64) * V_STRIDE
        data = tl.load(packed + task.to(tl.int64) * K + offsets, mask=offsets < live, other=0)
        target = cache + tl.where(valid, slot, 0) * PAGE + inner
        tl.store(target + offsets * K_STRIDE, data, mask=offsets < live)
