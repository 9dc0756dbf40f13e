"""Expert products of one token, whose items hold one pair each: the columns that stand idle split the work.

A product on tensor cores has eight columns or more, and one token fills one of them. Here each column holds something
else, the rows of weights are stacked accordingly, and of the result only what belongs together is kept and summed:

* gate/up: column s holds part s of the latent's columns, and the tile holds the same rows of weights once a part, each
  from its own columns on. So a tile of few rows has work for four warps, and its chain of dependent steps is ``PARTS``
  times shorter.
* down: column j holds the activations of the token's j-th expert, and the tile holds the same rows of eight experts.
  One program sums a token's experts in fp32 with their weights, in a fixed order, and writes the output: no rows in
  between, no weighted sum, one rounding less.

Bytes read are those of the general kernels (``experts_gemm``), and so are layout and decode.
"""

# mypy: allow-untyped-defs
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_nvidia.kernels.experts_decode import ahead, columns, decode, load, multiply
from k3_nvidia.kernels.experts_gemm import block_index, gated_act, load_y, next_weights

PARTS = tl.constexpr(4)  # of the latent's columns
COLUMNS = tl.constexpr(8)  # of the narrowest product
TOGETHER = tl.constexpr(8)  # experts in one down product


@triton.jit
def _own(acc, factor, there, PILES: tl.constexpr, ROWS: tl.constexpr):
    """fp32 [PILES ROWS, COLUMNS], factor and there [COLUMNS] -> [PILES, ROWS, COLUMNS]: pile p times its factor in
    column p if that is there, else zero, whatever stands in the product."""
    acc = tl.reshape(acc, (PILES, ROWS, COLUMNS))
    pile = tl.reshape(tl.arange(0, PILES), (PILES, 1, 1))
    column = tl.reshape(tl.arange(0, COLUMNS), (1, 1, COLUMNS))
    factor = tl.reshape(factor, (1, 1, COLUMNS))
    there = tl.reshape(there, (1, 1, COLUMNS))
    return tl.where((pile == column) & there, acc * factor, 0.0)


@triton.jit
def w13_one_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, work_ptr, num_ptr, beta, linear_beta,
    stride_we, stride_se, stride_y, MB, KB, w2_ptr, s2_ptr, stride_w2e, stride_s2e,
    MT: tl.constexpr, KT: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr, NEXT: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (item * row tiles + row tile) of one token's gate/up product: y[item, channels of the tile].

    KB must be a multiple of PARTS * KT.
    """
    tiles = MB // MT
    pid = tl.program_id(0)
    item = pid // tiles
    tile = pid % tiles
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.load(work_ptr + item * 4, volatile=True)  # else it waits for the number: two round trips
    if item >= tl.load(num_ptr):
        return
    part = KB // PARTS
    stack = tl.arange(0, PARTS * MT)[:, None, None]
    block = block_index(tile * MT + stack % MT, stack // MT * part + tl.arange(0, KT)[None, :, None], KB)
    e = e.to(tl.int64)
    w_ptrs = w_ptr + e * stride_we + block * 256 + tl.arange(0, 256)[None, None, :]
    s_ptrs = s_ptr + e * stride_se + block * 8 + tl.arange(0, 8)[None, None, :]
    next_w, next_s = w_ptrs, s_ptrs
    if NEXT > 0:
        next_w, next_s = next_weights(w2_ptr, s2_ptr, e, stride_w2e, stride_s2e, tile, KB, MT, PARTS * KT, NEXT)
    n = tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + (n % PARTS)[None, :] * (part * 64) + columns(KT, False)
    acc = tl.zeros((PARTS * MT * 16, COLUMNS), tl.float32)
    for _ in range(0, part, KT):
        scale = tl.load(s_ptrs)  # before the codes: the later load decides the layout of what is made of both
        words = tl.load(w_ptrs)
        x = load(x_ptrs, n < COLUMNS, False)
        acc = multiply(decode(words, scale, PARTS * MT, KT, False, WIDE, INTERPRET), x, acc, False, INTERPRET)
        w_ptrs += KT * 1024
        s_ptrs += KT * 32
        x_ptrs += KT * 64
        if NEXT > 0:
            ahead(next_w)
            ahead(next_s)
            next_w += MT * PARTS * KT * 32 * NEXT
            next_s += MT * PARTS * KT * NEXT
    own = _own(acc, tl.full((COLUMNS,), 1.0, tl.float32), n < PARTS, PARTS, MT * 16)
    total = tl.sum(tl.sum(own, 2), 0)
    gate, up = tl.split(tl.permute(tl.reshape(total, (MT, 2, 8)), (0, 2, 1)))
    y = tl.reshape(gated_act(gate, up, beta, linear_beta, ACT), (MT * 8,)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + item * stride_y + tile * MT * 8 + tl.arange(0, MT * 8), y)


@triton.jit
def _several(weights_ptr, sorted_ptr, work_ptr, number, start, MT: tl.constexpr):
    """Items start .. + TOGETHER: expert of each stacked row block [TOGETHER MT, 1, 1], weights, and which are there (an
    item past the last is allocated, not written)."""
    item = start + tl.arange(0, TOGETHER * MT) // MT
    e = tl.load(work_ptr + item * 4)
    e = tl.where(item < number, e, 0).to(tl.int64)[:, None, None]
    there = start + tl.arange(0, COLUMNS) < number
    pair = tl.load(sorted_ptr + start + tl.arange(0, COLUMNS), mask=there, other=0)
    return e, tl.load(weights_ptr + pair, mask=there, other=0.0), there


@triton.jit
def _codes(w_ptrs, s_ptrs, m, kb, KB):
    """Codes and scale words of row blocks m, one an expert that the pointers [.., 1, 1] stand at, column blocks kb."""
    block = block_index(m[:, None, None], kb[None, :, None], KB)
    scale = tl.load(s_ptrs + block * 8 + tl.arange(0, 8)[None, None, :])  # first, as in experts_gemm
    return tl.load(w_ptrs + block * 256 + tl.arange(0, 256)[None, None, :]), scale


@triton.jit
def w2_one_kernel(
    y_ptr, w_ptr, s_ptr, out_ptr, weights_ptr, sorted_ptr, work_ptr, num_ptr,
    stride_y, stride_we, stride_se, per_program, MB, L,
    K1: tl.constexpr, K2: tl.constexpr, HAS2: tl.constexpr, MT: tl.constexpr, SLOTS: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program p of one token, row tiles p*per_program .. +per_program: out[rows] = sum over its experts that are here
    of weight * W2_e y_e. SLOTS: TOGETHER or twice that, at least the token's choices; so many items are allocated."""
    KB: tl.constexpr = K1 + K2 if HAS2 else K1
    PILE: tl.constexpr = TOGETHER * MT
    BOTH: tl.constexpr = SLOTS > TOGETHER
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()  # first: behind a norm the up projection asks for its weights meanwhile
        gdc_wait()
    number = tl.load(num_ptr)
    y_ptrs = y_ptr + tl.arange(0, COLUMNS)[None, :] * stride_y
    ea, a_factor, a_there = _several(weights_ptr, sorted_ptr, work_ptr, number, 0, MT)
    a1, a2 = load_y(y_ptrs, a_there, K1, K2, HAS2, False)
    if BOTH:
        eb, b_factor, b_there = _several(weights_ptr, sorted_ptr, work_ptr, number, TOGETHER, MT)
        b1, b2 = load_y(y_ptrs + TOGETHER * stride_y, b_there, K1, K2, HAS2, False)
    k1 = tl.arange(0, K1)
    k2 = K1 + tl.arange(0, K2)
    for tile in tl.range(pid * per_program, tl.minimum((pid + 1) * per_program, MB // MT), num_stages=STAGES):
        m = tile * MT + tl.arange(0, PILE) % MT
        ca1, sa1 = _codes(w_ptr + ea * stride_we, s_ptr + ea * stride_se, m, k1, KB)
        if HAS2:
            ca2, sa2 = _codes(w_ptr + ea * stride_we, s_ptr + ea * stride_se, m, k2, KB)
        if BOTH:
            cb1, sb1 = _codes(w_ptr + eb * stride_we, s_ptr + eb * stride_se, m, k1, KB)
            if HAS2:
                cb2, sb2 = _codes(w_ptr + eb * stride_we, s_ptr + eb * stride_se, m, k2, KB)
        acc = tl.zeros((PILE * 16, COLUMNS), tl.float32)
        acc = multiply(decode(ca1, sa1, PILE, K1, False, WIDE, INTERPRET), a1, acc, False, INTERPRET)
        if HAS2:
            acc = multiply(decode(ca2, sa2, PILE, K2, False, WIDE, INTERPRET), a2, acc, False, INTERPRET)
        total = _own(acc, a_factor, a_there, TOGETHER, MT * 16)
        if BOTH:
            acc = tl.zeros((PILE * 16, COLUMNS), tl.float32)
            acc = multiply(decode(cb1, sb1, PILE, K1, False, WIDE, INTERPRET), b1, acc, False, INTERPRET)
            if HAS2:
                acc = multiply(decode(cb2, sb2, PILE, K2, False, WIDE, INTERPRET), b2, acc, False, INTERPRET)
            total += _own(acc, b_factor, b_there, TOGETHER, MT * 16)
        row = tile * MT * 16 + tl.arange(0, MT * 16)
        out = tl.sum(tl.sum(total, 2), 0)
        tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=row < L)
