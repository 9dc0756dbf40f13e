"""AttnRes for many tokens: rows stream through a ring of asynchronous copies, one row at a time.

Same formula, operands and rounding as :mod:`k3_nvidia.kernels.attn_res`. What differs is how bytes stay in flight: the
rows of all tokens of a program (delta, prefix, blocks, then the next token's) are one sequence, and STAGES - 1 rows of
it are on their way to shared memory while one is reduced. Registers hold the running mix and the folded weights only,
so two programs fit a multiprocessor, and one's reductions fall into the other's arithmetic.
"""

# mypy: allow-untyped-defs
# mypy: disable-error-code="assignment, misc, attr-defined, no-untyped-def, operator"
# (tuples grow inside the kernel, which Triton types by itself)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_nvidia.kernels.attn_res_rows import ask_for_rows, row_sums, store_row, sum2


@triton.jit
def _row(ptr, H: tl.constexpr, CHUNK: tl.constexpr, KC: tl.constexpr):
    """One row as KC tensors of CHUNK elements; lanes past H read zero."""
    cols = tl.arange(0, CHUNK)
    row = ()
    for c in tl.static_range(KC):
        if (c + 1) * CHUNK <= H:
            row = row + (tl.load(ptr + c * CHUNK + cols),)
        else:
            row = row + (tl.load(ptr + c * CHUNK + cols, mask=c * CHUNK + cols < H, other=0.0),)
    return row


@triton.jit
def _nothing(CHUNK: tl.constexpr, KC: tl.constexpr, dtype: tl.constexpr):
    row = ()
    for _ in tl.static_range(KC):
        row = row + (tl.zeros((CHUNK,), dtype),)
    return row


@triton.jit
def _fold(row, folded, mixed, top, total, H: tl.constexpr, eps, KC: tl.constexpr, WEIGHTED: tl.constexpr):
    """One more source row in the running softmax: (mixed, top logit, sum of weights) after it."""
    renewed = ()
    if WEIGHTED:
        squares, products = row_sums(row, folded, KC)
        square, product = tl.reduce((squares, products), 0, sum2)
        logit = product * tl.rsqrt(square / H + eps)
        newest = tl.maximum(top, logit)
        kept = tl.exp(top - newest)
        weight = tl.exp(logit - newest)
        total = total * kept + weight
        for c in tl.static_range(KC):
            renewed = renewed + (kept * mixed[c] + weight * row[c].to(tl.float32),)
        top = newest
    else:
        total = total + 1.0
        for c in tl.static_range(KC):
            renewed = renewed + (row[c].to(tl.float32),)
    return renewed, top, total


@triton.jit(do_not_specialize=["num_tokens", "write_block"])
def attn_res_ring_kernel(
    out_ptr, prefix_ptr, delta_ptr, bank_ptr, norm_ptr, proj_ptr, out_norm_ptr,
    prefix_stride, delta_stride, bank_stride, block_stride, num_tokens, eps, out_eps,
    write_block,
    NUM_BLOCKS: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_WRITE: tl.constexpr, HAS_NORM: tl.constexpr,
    H: tl.constexpr, CHUNK: tl.constexpr, KC: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program of tokens first, first + programs, ...; arguments as ``attn_res._attn_res_kernel``."""
    SEQ: tl.constexpr = NUM_BLOCKS + 2 if HAS_DELTA else NUM_BLOCKS + 1
    PREFIX: tl.constexpr = 1 if HAS_DELTA else 0
    if PDL:
        gdc_launch_dependents()
    step = tl.num_programs(0)
    first = tl.program_id(0)
    if PDL:
        ask_for_rows(
            first.to(tl.int64), prefix_ptr, delta_ptr, bank_ptr, prefix_stride, delta_stride, bank_stride,
            block_stride, NUM_BLOCKS, HAS_DELTA, H,
        )  # fmt: skip
    norm_weight = _row(norm_ptr, H, CHUNK, KC)
    proj_weight = _row(proj_ptr, H, CHUNK, KC)
    folded = ()
    for c in tl.static_range(KC):
        folded = folded + (norm_weight[c].to(tl.float32) * proj_weight[c].to(tl.float32),)
    if PDL:
        gdc_wait()
    mine = (num_tokens - first + step - 1) // step
    held = _nothing(CHUNK, KC, prefix_ptr.dtype.element_ty)
    mixed = _nothing(CHUNK, KC, tl.float32)
    top = -float("inf")
    total = 0.0
    for i in tl.range(0, mine * SEQ, num_stages=STAGES):
        turn = i // SEQ
        j = i - turn * SEQ
        token = (first + turn * step).to(tl.int64)
        block = (j - PREFIX - 1).to(tl.int64)
        ptr = bank_ptr + token * bank_stride + block * block_stride
        ptr = tl.where(j == PREFIX, prefix_ptr + token * prefix_stride, ptr)
        if HAS_DELTA:
            ptr = tl.where(j == 0, delta_ptr + token * delta_stride, ptr)
        row = _row(ptr, H, CHUNK, KC)
        if j < PREFIX:
            held = row
        else:
            if j == PREFIX:
                if HAS_DELTA:
                    summed = ()
                    for c in tl.static_range(KC):
                        summed = summed + ((row[c].to(tl.float32) + held[c].to(tl.float32)).to(row[c].dtype),)
                    row = summed
                    store_row(prefix_ptr + token * prefix_stride, row, H, CHUNK, KC)
                if HAS_WRITE:
                    store_row(bank_ptr + token * bank_stride + write_block * block_stride, row, H, CHUNK, KC)
            mixed, top, total = _fold(row, folded, mixed, top, total, H, eps, KC, NUM_BLOCKS > 0)
            if j == SEQ - 1:
                scale = 1.0 / total
                if HAS_NORM:
                    squares = mixed[0] * mixed[0]
                    for c in tl.static_range(1, KC):
                        squares += mixed[c] * mixed[c]
                    # the mean of (mixed * scale)^2, with the scale taken out of the sum
                    scale = scale * tl.rsqrt(tl.sum(squares, 0) * scale * scale / H + out_eps)
                    out_weight = _row(out_norm_ptr, H, CHUNK, KC)
                result = ()
                for c in tl.static_range(KC):
                    value = mixed[c] * scale
                    if HAS_NORM:
                        value = value * out_weight[c].to(tl.float32)
                    result = result + (value.to(out_ptr.dtype.element_ty),)
                store_row(out_ptr + token * H, result, H, CHUNK, KC)
                # a new token begins from nothing, whatever this one held
                mixed = _nothing(CHUNK, KC, tl.float32)
                top = -float("inf")
                total = 0.0
