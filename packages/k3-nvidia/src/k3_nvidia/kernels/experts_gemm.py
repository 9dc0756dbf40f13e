"""MXFP4 W4A16 expert products on tensor cores: gate/up with the activation in the epilogue, and down.

Formulas (x: latent rows, one **pair** is a (token, chosen expert)):

    y[pair] = act(x[token] W1_e^T, x[token] W3_e^T)          ``w13_kernel``          rounded once to bf16
    d[pair] = y[pair] W2_e^T                                  ``w2_kernel``, ``w2_wide_kernel``    rounded once to bf16

Weights are the left operand (rows = output channels), tokens the right one, so that a handful of tokens wastes little
of a tensor-core tile; a lane's 16-byte load is its operand (``moe_layout``) and is decoded in registers
(``experts_decode``). From 16 columns on Hopper runs ``wgmma`` with the left operand in registers.

Work comes as a list of items (expert, first position, count) over the expert-sorted pairs (``moe_worklist``): only
touched experts are there, its length is read on the device, so a CUDA graph replays for any routing. Rows of y are in
sorted order; rows of d are in pair order (token * top_k + slot), ready for the weighted sum. Pairs without an item
(expert elsewhere) are not written; the weighted sum does not read them.
"""

# mypy: allow-untyped-defs
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_nvidia.kernels.experts_decode import ahead, columns, decode, load, multiply, settled

NARROWED = tl.constexpr(32)  # items of so many tokens and more have narrower products for what they hold
JOINED = tl.constexpr(16)  # from so many columns on the decoded tile is one operand (``experts_decode``)


@triton.jit
def _tanh(x):
    """fp32 tanh to about 3 ulp of bf16-relevant precision everywhere: the series near 0, where 1 - 2/(e^2x + 1)
    cancels."""
    x2 = x * x
    series = x * (1.0 + x2 * (-0.3333333333 + x2 * (0.1333333333 - x2 * 0.05396825397)))
    return tl.where(x2 < 0.01, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def gated_act(gate, up, beta, linear_beta, ACT: tl.constexpr):
    """fp32 gated activation. ACT 0: silu(g) u; 1: SiTU; 2: SiTU whose up half stays linear."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    if ACT == 0:
        return gate * sigmoid * up
    left = beta * _tanh(gate / beta) * sigmoid
    if ACT == 1:
        return left * (linear_beta * _tanh(up / linear_beta))
    return left * up


@triton.jit
def block_index(mt, kb, KB):
    """Where block (row block, column block) lies: [MB/4][KB][4]."""
    return ((mt // 4) * KB + kb) * 4 + mt % 4


@triton.jit
def _product(
    x_ptr, rows1, valid1, rows2, valid2, stride_x, w_ptrs, s_ptrs, next_w, next_s, KB,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, WIDE: tl.constexpr, NEXT: tl.constexpr,
    WGMMA: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Weights [16 MT, 64 KB] times the rows of x: fp32 [16 MT, BN] and, if BX, the columns behind them [16 MT, BX].

    The decoded tile serves both products, which is how a tile gets a width that is no power of two. next_w, next_s:
    what NEXT asks for on the way (``next_weights``).
    """
    JOIN: tl.constexpr = BN >= JOINED
    k = columns(KT, JOIN)
    x1_ptrs = x_ptr + rows1[None, :] * stride_x + k
    acc1 = tl.zeros((MT * 16, BN), tl.float32)
    acc2 = tl.zeros((MT * 16, BX if BX > 0 else 16), tl.float32)
    if BX > 0:
        x2_ptrs = x_ptr + rows2[None, :] * stride_x + k
    for _ in range(0, KB, KT):
        scale = tl.load(s_ptrs)  # before the codes: the later load decides the layout of what is made of both
        words = tl.load(w_ptrs)
        x1 = load(x1_ptrs, valid1, JOIN)
        if BX > 0:
            x2 = load(x2_ptrs, valid2, JOIN)
        if WGMMA and JOIN:
            words = settled(words)
        weight = decode(words, scale, MT, KT, JOIN, WIDE, INTERPRET)
        acc1 = multiply(weight, x1, acc1, JOIN, INTERPRET)
        if BX > 0:
            acc2 = multiply(weight, x2, acc2, JOIN, INTERPRET)
            x2_ptrs += KT * 64
        w_ptrs += KT * 1024
        s_ptrs += KT * 32
        x1_ptrs += KT * 64
        if NEXT > 0:
            ahead(next_w)
            ahead(next_s)
            next_w += MT * KT * 32 * NEXT
            next_s += MT * KT * NEXT
    return acc1, acc2


@triton.jit
def next_weights(
    w2_ptr, s2_ptr, e, stride_w2e, stride_s2e, tile, KB, MT: tl.constexpr, KT: tl.constexpr, NEXT: tl.constexpr
):
    """Where a gate/up tile starts to ask for its share of the expert's down weights: 128 pointers to codes and scales.

    The down product of an expert has half the bytes of the other, so a tile of MT row blocks asks, step by step, for
    NEXT quarters of half its own: memory is busy where the gate/up product alone does not keep it so, and the down
    product finds its weights in the L2.
    """
    i = tl.arange(0, 128)
    codes = w2_ptr + e * stride_w2e + tile * (KB * (MT * 32 * NEXT)) + i * (MT * KT * NEXT // 4)
    return codes, s2_ptr + e * stride_s2e + tile * (KB * (MT * NEXT)) + i * (MT * KT * NEXT) // 128


@triton.jit
def _item(num_ptr, work_ptr, item):
    """Number of items, and expert, first position and count of one: four loads in one round trip (an item past the
    last is allocated, not written)."""
    e = tl.load(work_ptr + item * 4)
    first = tl.load(work_ptr + item * 4 + 1)
    count = tl.load(work_ptr + item * 4 + 2)
    return tl.load(num_ptr), e.to(tl.int64), first.to(tl.int64), count


@triton.jit
def _store_act(
    acc, y_ptr, rows, valid, stride_y, tile, beta, linear_beta, MT: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr
):
    """Activation of a gate/up accumulator and its store. Gate is row g, up row g + 8 of a block: one thread has
    both."""
    gate, up = tl.split(tl.permute(tl.reshape(acc, (MT, 2, 8, BN)), (0, 2, 3, 1)))
    y = tl.reshape(gated_act(gate, up, beta, linear_beta, ACT), (MT * 8, BN)).to(y_ptr.dtype.element_ty)
    channel = tile * MT * 8 + tl.arange(0, MT * 8)
    tl.store(y_ptr + rows[None, :] * stride_y + channel[:, None], y, mask=valid[None, :])


@triton.jit
def _w13_tile(
    x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, next_w, next_s, first, count, tile, beta, linear_beta, stride_x, stride_y,
    top_k, KB,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr,
    NEXT: tl.constexpr, WGMMA: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    n1 = tl.arange(0, BN)
    n2 = BN + tl.arange(0, BX if BX > 0 else 16)
    valid1, valid2 = n1 < count, n2 < count
    token1 = (tl.load(sorted_ptr + first + n1, mask=valid1, other=0) // top_k).to(tl.int64)
    token2 = token1
    if BX > 0:
        token2 = (tl.load(sorted_ptr + first + n2, mask=valid2, other=0) // top_k).to(tl.int64)
    acc1, acc2 = _product(
        x_ptr, token1, valid1, token2, valid2, stride_x, w_ptrs, s_ptrs, next_w, next_s, KB,
        MT, KT, BN, BX, WIDE, NEXT, WGMMA, INTERPRET,
    )  # fmt: skip
    _store_act(acc1, y_ptr, first + n1, valid1, stride_y, tile, beta, linear_beta, MT, BN, ACT)
    if BX > 0:
        _store_act(acc2, y_ptr, first + n2, valid2, stride_y, tile, beta, linear_beta, MT, BX, ACT)


@triton.jit
def w13_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, sorted_ptr, work_ptr, num_ptr, beta, linear_beta,
    stride_x, stride_we, stride_se, stride_y, top_k, MB, KB, w2_ptr, s2_ptr, stride_w2e, stride_s2e,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr,
    NEXT: tl.constexpr, PDL: tl.constexpr, WGMMA: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (item * row tiles + row tile): y[first + j, channels of the tile] for the item's tokens j.

    An item has up to BN + BX tokens; the width of the product follows its count: BN/4, BN/2 or BN without BX (one
    width below ``NARROWED``), else BN/4, BN, BN + BX/2 or BN + BX. So the last item of an expert costs what it holds.
    """
    tiles = MB // MT
    pid = tl.program_id(0)
    item = pid // tiles
    tile = pid % tiles
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number, e, first, count = _item(num_ptr, work_ptr, item)
    if item >= number:
        return
    block = block_index(tile * MT + tl.arange(0, MT)[:, None, None], tl.arange(0, KT)[None, :, None], KB)
    w_ptrs = w_ptr + e * stride_we + block * 256 + tl.arange(0, 256)[None, None, :]
    s_ptrs = s_ptr + e * stride_se + block * 8 + tl.arange(0, 8)[None, None, :]
    next_w, next_s = w_ptrs, s_ptrs
    if NEXT > 0:
        next_w, next_s = next_weights(w2_ptr, s2_ptr, e, stride_w2e, stride_s2e, tile, KB, MT, KT, NEXT)
    if BX == 0:
        if BN < NARROWED:
            _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, next_w, next_s, first, count, tile, beta,
                      linear_beta, stride_x, stride_y, top_k, KB, MT, KT, BN, 0, ACT, WIDE, NEXT, WGMMA,
                      INTERPRET)  # fmt: skip
        elif count <= BN // 4:
            _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, next_w, next_s, first, count, tile, beta,
                      linear_beta, stride_x, stride_y, top_k, KB, MT, KT, BN // 4, 0, ACT, WIDE, NEXT, WGMMA,
                      INTERPRET)  # fmt: skip
        elif count <= BN // 2:
            _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, next_w, next_s, first, count, tile, beta,
                      linear_beta, stride_x, stride_y, top_k, KB, MT, KT, BN // 2, 0, ACT, WIDE, NEXT, WGMMA,
                      INTERPRET)  # fmt: skip
        else:
            _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, next_w, next_s, first, count, tile, beta,
                      linear_beta, stride_x, stride_y, top_k, KB, MT, KT, BN, 0, ACT, WIDE, NEXT, WGMMA,
                      INTERPRET)  # fmt: skip
    elif count <= BN // 4:
        _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, next_w, next_s, first, count, tile, beta,
                  linear_beta, stride_x, stride_y, top_k, KB, MT, KT, BN // 4, 0, ACT, WIDE, NEXT, WGMMA,
                  INTERPRET)  # fmt: skip
    elif count <= BN:
        _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, next_w, next_s, first, count, tile, beta,
                  linear_beta, stride_x, stride_y, top_k, KB, MT, KT, BN, 0, ACT, WIDE, NEXT, WGMMA,
                  INTERPRET)  # fmt: skip
    elif count <= BN + BX // 2:
        _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, next_w, next_s, first, count, tile, beta,
                  linear_beta, stride_x, stride_y, top_k, KB, MT, KT, BN, BX // 2, ACT, WIDE, NEXT, WGMMA,
                  INTERPRET)  # fmt: skip
    else:
        _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, next_w, next_s, first, count, tile, beta,
                  linear_beta, stride_x, stride_y, top_k, KB, MT, KT, BN, BX, ACT, WIDE, NEXT, WGMMA,
                  INTERPRET)  # fmt: skip


@triton.jit
def load_y(ptrs, valid, K1: tl.constexpr, K2: tl.constexpr, HAS2: tl.constexpr, JOIN: tl.constexpr):
    """The whole width of some rows of y as two operands; without K2 the first stands in for the unused one."""
    first = load(ptrs + columns(K1, JOIN), valid, JOIN)
    if HAS2:
        return first, load(ptrs + K1 * 64 + columns(K2, JOIN), valid, JOIN)
    else:
        return first, first


@triton.jit
def _store_pairs(acc, d_ptr, pair, row, valid, stride_d, L):
    ptrs = d_ptr + pair[None, :] * stride_d + row[:, None]
    tl.store(ptrs, acc.to(d_ptr.dtype.element_ty), mask=valid[None, :] & (row < L)[:, None])


@triton.jit
def _w2_rows(
    y_ptr, d_ptr, sorted_ptr, w_base, s_base, first, count, start, stop, stride_y, stride_d, L,
    K1: tl.constexpr, K2: tl.constexpr, HAS2: tl.constexpr, MT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Row tiles start..stop of one item, y on chip."""
    KB: tl.constexpr = K1 + K2 if HAS2 else K1
    JOIN: tl.constexpr = BN >= JOINED
    n = tl.arange(0, BN)
    valid = n < count
    pair = tl.load(sorted_ptr + first + n, mask=valid, other=0).to(tl.int64)
    y1, y2 = load_y(y_ptr + (first + n)[None, :] * stride_y, valid, K1, K2, HAS2, JOIN)
    nx = BN + tl.arange(0, BX if BX > 0 else 16)
    valid_x = nx < count
    pair_x, x1, x2 = pair, y1, y2
    if BX > 0:
        pair_x = tl.load(sorted_ptr + first + nx, mask=valid_x, other=0).to(tl.int64)
        x1, x2 = load_y(y_ptr + (first + nx)[None, :] * stride_y, valid_x, K1, K2, HAS2, JOIN)
    m = tl.arange(0, MT)[:, None, None]
    lane = tl.arange(0, 256)[None, None, :]
    octet = tl.arange(0, 8)[None, None, :]
    k1 = tl.arange(0, K1)[None, :, None]
    k2 = K1 + tl.arange(0, K2)[None, :, None]
    for tile in tl.range(start, stop, num_stages=STAGES):
        block = block_index(tile * MT + m, k1, KB)
        scale = tl.load(s_base + block * 8 + octet)
        codes = tl.load(w_base + block * 256 + lane)
        if HAS2:
            block2 = block_index(tile * MT + m, k2, KB)
            scale2 = tl.load(s_base + block2 * 8 + octet)
            codes2 = tl.load(w_base + block2 * 256 + lane)
        row = tile * MT * 16 + tl.arange(0, MT * 16)
        weight = decode(codes, scale, MT, K1, JOIN, WIDE, INTERPRET)
        acc = multiply(weight, y1, tl.zeros((MT * 16, BN), tl.float32), JOIN, INTERPRET)
        if BX > 0:
            acc_x = multiply(weight, x1, tl.zeros((MT * 16, BX), tl.float32), JOIN, INTERPRET)
        if HAS2:
            weight2 = decode(codes2, scale2, MT, K2, JOIN, WIDE, INTERPRET)
            acc = multiply(weight2, y2, acc, JOIN, INTERPRET)
            if BX > 0:
                acc_x = multiply(weight2, x2, acc_x, JOIN, INTERPRET)
        _store_pairs(acc, d_ptr, pair, row, valid, stride_d, L)
        if BX > 0:
            _store_pairs(acc_x, d_ptr, pair_x, row, valid_x, stride_d, L)


@triton.jit
def w2_kernel(
    y_ptr, w_ptr, s_ptr, d_ptr, sorted_ptr, work_ptr, num_ptr,
    stride_y, stride_we, stride_se, stride_d, groups, per_group, MB, L,
    K1: tl.constexpr, K2: tl.constexpr, HAS2: tl.constexpr, MT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Narrow experts (K1 column blocks, and K2 more if HAS2): the item's y stays on chip while rows of weights
    stream past.

    Program (item * groups + group): row tiles group*per_group .. +per_group. Widths as ``w13_kernel``.
    """
    pid = tl.program_id(0)
    item = pid // groups
    group = pid % groups
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number, e, first, count = _item(num_ptr, work_ptr, item)
    if item >= number:
        return
    start = group * per_group
    stop = tl.minimum(start + per_group, MB // MT)
    w_base = w_ptr + e * stride_we
    s_base = s_ptr + e * stride_se
    if BX == 0:
        if BN < NARROWED:
            _w2_rows(y_ptr, d_ptr, sorted_ptr, w_base, s_base, first, count, start, stop, stride_y, stride_d, L,
                     K1, K2, HAS2, MT, BN, 0, WIDE, STAGES, INTERPRET)  # fmt: skip
        elif count <= BN // 4:
            _w2_rows(y_ptr, d_ptr, sorted_ptr, w_base, s_base, first, count, start, stop, stride_y, stride_d, L,
                     K1, K2, HAS2, MT, BN // 4, 0, WIDE, STAGES, INTERPRET)  # fmt: skip
        elif count <= BN // 2:
            _w2_rows(y_ptr, d_ptr, sorted_ptr, w_base, s_base, first, count, start, stop, stride_y, stride_d, L,
                     K1, K2, HAS2, MT, BN // 2, 0, WIDE, STAGES, INTERPRET)  # fmt: skip
        else:
            _w2_rows(y_ptr, d_ptr, sorted_ptr, w_base, s_base, first, count, start, stop, stride_y, stride_d, L,
                     K1, K2, HAS2, MT, BN, 0, WIDE, STAGES, INTERPRET)  # fmt: skip
    elif count <= BN:
        _w2_rows(y_ptr, d_ptr, sorted_ptr, w_base, s_base, first, count, start, stop, stride_y, stride_d, L,
                 K1, K2, HAS2, MT, BN, 0, WIDE, STAGES, INTERPRET)  # fmt: skip
    elif count <= BN + BX // 2:
        _w2_rows(y_ptr, d_ptr, sorted_ptr, w_base, s_base, first, count, start, stop, stride_y, stride_d, L,
                 K1, K2, HAS2, MT, BN, BX // 2, WIDE, STAGES, INTERPRET)  # fmt: skip
    else:
        _w2_rows(y_ptr, d_ptr, sorted_ptr, w_base, s_base, first, count, start, stop, stride_y, stride_d, L,
                 K1, K2, HAS2, MT, BN, BX, WIDE, STAGES, INTERPRET)  # fmt: skip


@triton.jit
def _w2_tile(
    y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, WIDE: tl.constexpr, WGMMA: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    n1 = tl.arange(0, BN)
    n2 = BN + tl.arange(0, BX if BX > 0 else 16)
    valid1, valid2 = n1 < count, n2 < count
    acc1, acc2 = _product(
        y_ptr, first + n1, valid1, first + n2, valid2, stride_y, w_ptrs, s_ptrs, w_ptrs, s_ptrs, KB,
        MT, KT, BN, BX, WIDE, 0, WGMMA, INTERPRET,
    )  # fmt: skip
    row = tile * MT * 16 + tl.arange(0, MT * 16)
    pair1 = tl.load(sorted_ptr + first + n1, mask=valid1, other=0).to(tl.int64)
    _store_pairs(acc1, d_ptr, pair1, row, valid1, stride_d, L)
    if BX > 0:
        pair2 = tl.load(sorted_ptr + first + n2, mask=valid2, other=0).to(tl.int64)
        _store_pairs(acc2, d_ptr, pair2, row, valid2, stride_d, L)


@triton.jit
def w2_wide_kernel(
    y_ptr, w_ptr, s_ptr, d_ptr, sorted_ptr, work_ptr, num_ptr,
    stride_y, stride_we, stride_se, stride_d, MB, KB, L,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    WGMMA: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Any width: one row tile a program, columns streamed. Program (item * row tiles + row tile); widths as
    ``w13_kernel``."""
    tiles = MB // MT
    pid = tl.program_id(0)
    item = pid // tiles
    tile = pid % tiles
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number, e, first, count = _item(num_ptr, work_ptr, item)
    if item >= number:
        return
    block = block_index(tile * MT + tl.arange(0, MT)[:, None, None], tl.arange(0, KT)[None, :, None], KB)
    w_ptrs = w_ptr + e * stride_we + block * 256 + tl.arange(0, 256)[None, None, :]
    s_ptrs = s_ptr + e * stride_se + block * 8 + tl.arange(0, 8)[None, None, :]
    if BX == 0:
        if BN < NARROWED:
            _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                     MT, KT, BN, 0, WIDE, WGMMA, INTERPRET)  # fmt: skip
        elif count <= BN // 4:
            _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                     MT, KT, BN // 4, 0, WIDE, WGMMA, INTERPRET)  # fmt: skip
        elif count <= BN // 2:
            _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                     MT, KT, BN // 2, 0, WIDE, WGMMA, INTERPRET)  # fmt: skip
        else:
            _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                     MT, KT, BN, 0, WIDE, WGMMA, INTERPRET)  # fmt: skip
    elif count <= BN // 4:
        _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                 MT, KT, BN // 4, 0, WIDE, WGMMA, INTERPRET)  # fmt: skip
    elif count <= BN:
        _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                 MT, KT, BN, 0, WIDE, WGMMA, INTERPRET)  # fmt: skip
    elif count <= BN + BX // 2:
        _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                 MT, KT, BN, BX // 2, WIDE, WGMMA, INTERPRET)  # fmt: skip
    else:
        _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                 MT, KT, BN, BX, WIDE, WGMMA, INTERPRET)  # fmt: skip
