"""Rows of AttnRes as tuples of tensors: what its kernels do with one, wherever its bytes come from."""

# mypy: allow-untyped-defs
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum2(a0, a1, b0, b1):
    """Two sums at once, for ``tl.reduce``."""
    return a0 + b0, a1 + b1


@triton.jit
def store_row(ptr, row, H: tl.constexpr, CHUNK: tl.constexpr, KC: tl.constexpr):
    """KC tensors of CHUNK elements to memory; lanes past H write nothing."""
    cols = tl.arange(0, CHUNK)
    for c in tl.static_range(KC):
        if (c + 1) * CHUNK <= H:
            tl.store(ptr + c * CHUNK + cols, row[c])
        else:
            tl.store(ptr + c * CHUNK + cols, row[c], mask=c * CHUNK + cols < H)


@triton.jit
def row_sums(row, folded, KC: tl.constexpr):
    """Per-lane partial sums of squares and of products with the folded weight."""
    x = row[0].to(tl.float32)
    squares = x * x
    products = x * folded[0]
    for c in tl.static_range(1, KC):
        y = row[c].to(tl.float32)
        squares += y * y
        products += y * folded[c]
    return squares, products


@triton.jit
def ask_for_row(ptr, H: tl.constexpr, SECTORS: tl.constexpr):
    """Ask the L2 for the row of H 16-bit elements at ptr; SECTORS: the power of two from H / 16 up.

    Nothing is read, so the row need not be final: what is written later is written in the L2.
    """
    at = tl.minimum(tl.arange(0, SECTORS) * 16, H - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr + at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def ask_for_rows(
    token, prefix_ptr, delta_ptr, bank_ptr, prefix_stride, delta_stride, bank_stride, block_stride,
    NUM_BLOCKS: tl.constexpr, HAS_DELTA: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Ask the L2 for every row of a token, before anything else and before they are final."""
    SECTORS: tl.constexpr = triton.next_power_of_2((H + 15) // 16)
    ask_for_row(prefix_ptr + token * prefix_stride, H, SECTORS)
    if HAS_DELTA:
        ask_for_row(delta_ptr + token * delta_stride, H, SECTORS)
    for j in tl.static_range(NUM_BLOCKS):
        ask_for_row(bank_ptr + token * bank_stride + j * block_stride, H, SECTORS)
