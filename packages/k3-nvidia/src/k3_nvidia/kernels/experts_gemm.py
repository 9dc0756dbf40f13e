"""MXFP4 W4A16 expert products on tensor cores: gate/up with the activation in the epilogue, and down.

Formulas (x: latent rows, one **pair** is a (token, chosen expert)):

    y[pair] = act(x[token] W1_e^T, x[token] W3_e^T)          ``w13_kernel``          rounded once to bf16
    d[pair] = y[pair] W2_e^T                                  ``w2_kernel``, ``w2_wide_kernel``    rounded once to bf16

Weights are the left operand (rows = output channels), tokens the right one, so that a handful of tokens wastes little
of a tensor-core tile; a lane's 16-byte load is its operand (``moe_layout``) and is decoded in registers. On Hopper
Triton turns the products into ``wgmma`` with the left operand in registers and interleaves decode and products column
step by column step.

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

# Two half words (a word) -> four bf16 pairs, one a position. Operands: 4 out, word, multiplier of columns 0..31
# twice (one a
# half), multiplier of columns 32..63 twice.
_DECODE = tl.constexpr("""
{
.reg .b32 t, u;
and.b32 $0, $4, 0x81C081C0;
shl.b32 u, $4, 3;
and.b32 $1, u, 0x81C081C0;
shl.b32 u, $4, 6;
and.b32 $2, u, 0x81C081C0;
shl.b32 u, $4, 1;
and.b32 t, u, 0x80008000;
shr.b32 u, $4, 3;
lop3.b32 t, u, 0x01800180, t, 0xEA;
shr.b32 u, $4, 7;
lop3.b32 $3, u, 0x00400040, t, 0xEA;
mul.rn.bf16x2 $0, $0, $5;
mul.rn.bf16x2 $1, $1, $5;
mul.rn.bf16x2 $2, $2, $7;
mul.rn.bf16x2 $3, $3, $7;
}
""")
# The same with a first product by 2^126, for scale bytes above 128 (their multiplier times 2^126 has no bf16).
_DECODE_WIDE = tl.constexpr(
    _DECODE.value.replace(
        "mul.rn.bf16x2 $0, $0, $5;",
        "mov.b32 u, 0x7E807E80;\n"
        + "\n".join(f"mul.rn.bf16x2 ${i}, ${i}, u;" for i in range(4))
        + "\nmul.rn.bf16x2 $0, $0, $5;",
    )
)
# Two low scale bytes of a word -> two bf16 pairs 2^(s - 1): exponent field s + 126, for s <= 128.
_SCALE = tl.constexpr(
    "{\n.reg .b32 q;\n"
    + "\n".join(f"prmt.b32 q, $2, 0, 0x4{i}4{i}; mad.lo.u32 ${i}, q, 0x80, 0x3F003F00;" for i in range(2))
    + "\n}"
)


@triton.jit
def _wide_scale(scale, half: tl.constexpr):
    """bf16 pair of 2^(s - 127), exact for every byte: 0 is subnormal, 255 NaN."""
    s = (scale >> (8 * half)) & 255
    bits = tl.where(s == 0, 0x40, tl.where(s == 255, 0x7FC0, s << 7))
    return bits | (bits << 16)


@triton.jit
def _plain_value(bits, scale, half: tl.constexpr):
    """fp32 of bf16 bits (subnormal) times 2^126 times the scale: what the interpreter runs."""
    multiplier = (_wide_scale(scale, half) << 16).to(tl.float32, bitcast=True)
    return (bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37 * multiplier


@triton.jit
def decode_tile(codes, scale, MT: tl.constexpr, KT: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """Codes [MT, KT, 256] and scale words [MT, KT, 8] -> the four operands [16 MT, 16 KT] (columns 16 p .. of each
    block).

    bf16; fp32 in the interpreter.
    """
    shape: tl.constexpr = (MT, KT, 8, 4, 2, 2, 2)  # g, t, u, r, h
    codes = tl.reshape(codes, shape)
    pair = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 2, 1)) * 16
    scale = tl.reshape(scale, (MT, KT, 8, 1, 1, 1, 1)) >> pair  # the two bytes of row half r come down
    if INTERPRET:
        scale = tl.broadcast_to(scale, shape)
        w = codes.to(tl.int32) & 0xFFFF
        p0 = _plain_value(w & 0x81C0, scale, 0)
        p1 = _plain_value((w << 3) & 0x81C0, scale, 0)
        p2 = _plain_value((w << 6) & 0x81C0, scale, 1)
        p3 = _plain_value(((w << 1) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 7) & 0x0040), scale, 1)
    else:
        if WIDE:
            s0, s1 = _wide_scale(scale, 0), _wide_scale(scale, 1)
        else:
            s0, s1 = tl.inline_asm_elementwise(
                _SCALE, "=&r,=&r,r", [scale], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        s0 = tl.broadcast_to(s0, shape)
        s1 = tl.broadcast_to(s1, shape)
        asm: tl.constexpr = _DECODE_WIDE if WIDE else _DECODE
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            asm, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, s0, s1],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return _operand(p0, MT, KT), _operand(p1, MT, KT), _operand(p2, MT, KT), _operand(p3, MT, KT)


@triton.jit
def _operand(part, MT: tl.constexpr, KT: tl.constexpr):
    """[MT, KT, g, t, u, r, h] -> [MT r g, KT u t h]."""
    return tl.reshape(tl.permute(part, (0, 5, 2, 1, 4, 3, 6)), (MT * 16, KT * 16))


@triton.jit
def _load4(ptrs, valid):
    """The four 16-column slices of each 64-column block of the right operand."""
    mask = valid[None, :]
    return (
        tl.load(ptrs, mask=mask, other=0.0),
        tl.load(ptrs + 16, mask=mask, other=0.0),
        tl.load(ptrs + 32, mask=mask, other=0.0),
        tl.load(ptrs + 48, mask=mask, other=0.0),
    )


@triton.jit
def _slice_columns(KT: tl.constexpr):
    """[16 KT, 1]: offsets of the first slice of KT blocks."""
    k = tl.arange(0, KT * 16)
    return ((k // 16) * 64 + k % 16)[:, None]


@triton.jit
def _dot4(w, x, acc, INTERPRET: tl.constexpr):
    """Sum of the four products on top of acc; the interpreter multiplies bf16 wrongly, so it gets fp32."""
    if INTERPRET:
        acc = tl.dot(w[0], x[0].to(tl.float32), acc, input_precision="ieee")
        acc = tl.dot(w[1], x[1].to(tl.float32), acc, input_precision="ieee")
        acc = tl.dot(w[2], x[2].to(tl.float32), acc, input_precision="ieee")
        return tl.dot(w[3], x[3].to(tl.float32), acc, input_precision="ieee")
    acc = tl.dot(w[0], x[0], acc)
    acc = tl.dot(w[1], x[1], acc)
    acc = tl.dot(w[2], x[2], acc)
    return tl.dot(w[3], x[3], acc)


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
    x_ptr, rows1, valid1, rows2, valid2, stride_x, w_ptrs, s_ptrs, KB,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Weights [16 MT, 64 KB] times the rows of x: fp32 [16 MT, BN] and, if BX, the columns behind them [16 MT, BX].

    The decoded tile serves both products, which is how a tile gets a width that is no power of two.
    """
    k = _slice_columns(KT)
    x1_ptrs = x_ptr + rows1[None, :] * stride_x + k
    acc1 = tl.zeros((MT * 16, BN), tl.float32)
    acc2 = tl.zeros((MT * 16, BX if BX > 0 else 16), tl.float32)
    if BX > 0:
        x2_ptrs = x_ptr + rows2[None, :] * stride_x + k
    for _ in range(0, KB, KT):
        scale = tl.load(s_ptrs)  # before the codes: the later load decides the layout of what is made of both
        words = tl.load(w_ptrs)
        x1 = _load4(x1_ptrs, valid1)
        if BX > 0:
            x2 = _load4(x2_ptrs, valid2)
        weight = decode_tile(words, scale, MT, KT, WIDE, INTERPRET)
        acc1 = _dot4(weight, x1, acc1, INTERPRET)
        if BX > 0:
            acc2 = _dot4(weight, x2, acc2, INTERPRET)
            x2_ptrs += KT * 64
        w_ptrs += KT * 1024
        s_ptrs += KT * 32
        x1_ptrs += KT * 64
    return acc1, acc2


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
    x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, beta, linear_beta, stride_x, stride_y, top_k, KB,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    n1 = tl.arange(0, BN)
    n2 = BN + tl.arange(0, BX if BX > 0 else 16)
    valid1, valid2 = n1 < count, n2 < count
    token1 = (tl.load(sorted_ptr + first + n1, mask=valid1, other=0) // top_k).to(tl.int64)
    token2 = token1
    if BX > 0:
        token2 = (tl.load(sorted_ptr + first + n2, mask=valid2, other=0) // top_k).to(tl.int64)
    acc1, acc2 = _product(
        x_ptr, token1, valid1, token2, valid2, stride_x, w_ptrs, s_ptrs, KB, MT, KT, BN, BX, WIDE, INTERPRET
    )
    _store_act(acc1, y_ptr, first + n1, valid1, stride_y, tile, beta, linear_beta, MT, BN, ACT)
    if BX > 0:
        _store_act(acc2, y_ptr, first + n2, valid2, stride_y, tile, beta, linear_beta, MT, BX, ACT)


@triton.jit
def w13_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, sorted_ptr, work_ptr, num_ptr, beta, linear_beta,
    stride_x, stride_we, stride_se, stride_y, top_k, MB, KB,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (item * row tiles + row tile): y[first + j, channels of the tile] for the item's tokens j.

    An item has up to BN + BX tokens; the width of the product follows its count: BN/4 (if BX), BN, BN + BX/2 or BN +
    BX.
    """
    tiles = MB // MT
    pid = tl.program_id(0)
    item = pid // tiles
    tile = pid % tiles
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if item >= tl.load(num_ptr):
        return
    e = tl.load(work_ptr + item * 4).to(tl.int64)
    first = tl.load(work_ptr + item * 4 + 1).to(tl.int64)
    count = tl.load(work_ptr + item * 4 + 2)
    block = block_index(tile * MT + tl.arange(0, MT)[:, None, None], tl.arange(0, KT)[None, :, None], KB)
    w_ptrs = w_ptr + e * stride_we + block * 256 + tl.arange(0, 256)[None, None, :]
    s_ptrs = s_ptr + e * stride_se + block * 8 + tl.arange(0, 8)[None, None, :]
    if BX == 0:
        _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, beta, linear_beta, stride_x, stride_y,
                  top_k, KB, MT, KT, BN, 0, ACT, WIDE, INTERPRET)  # fmt: skip
    elif count <= BN // 4:
        _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, beta, linear_beta, stride_x, stride_y,
                  top_k, KB, MT, KT, BN // 4, 0, ACT, WIDE, INTERPRET)  # fmt: skip
    elif count <= BN:
        _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, beta, linear_beta, stride_x, stride_y,
                  top_k, KB, MT, KT, BN, 0, ACT, WIDE, INTERPRET)  # fmt: skip
    elif count <= BN + BX // 2:
        _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, beta, linear_beta, stride_x, stride_y,
                  top_k, KB, MT, KT, BN, BX // 2, ACT, WIDE, INTERPRET)  # fmt: skip
    else:
        _w13_tile(x_ptr, y_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, beta, linear_beta, stride_x, stride_y,
                  top_k, KB, MT, KT, BN, BX, ACT, WIDE, INTERPRET)  # fmt: skip


@triton.jit
def _load_y(ptrs, valid, K1: tl.constexpr, K2: tl.constexpr, HAS2: tl.constexpr):
    """The whole width of some rows of y, in slices; without K2 the first slices stand in for the unused ones."""
    first = _load4(ptrs + _slice_columns(K1), valid)
    second = first
    if HAS2:
        second = _load4(ptrs + K1 * 64 + _slice_columns(K2), valid)
    return first, second


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
    n = tl.arange(0, BN)
    valid = n < count
    pair = tl.load(sorted_ptr + first + n, mask=valid, other=0).to(tl.int64)
    y1, y2 = _load_y(y_ptr + (first + n)[None, :] * stride_y, valid, K1, K2, HAS2)
    nx = BN + tl.arange(0, BX if BX > 0 else 16)
    valid_x = nx < count
    pair_x, x1, x2 = pair, y1, y2
    if BX > 0:
        pair_x = tl.load(sorted_ptr + first + nx, mask=valid_x, other=0).to(tl.int64)
        x1, x2 = _load_y(y_ptr + (first + nx)[None, :] * stride_y, valid_x, K1, K2, HAS2)
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
        weight = decode_tile(codes, scale, MT, K1, WIDE, INTERPRET)
        acc = _dot4(weight, y1, tl.zeros((MT * 16, BN), tl.float32), INTERPRET)
        if BX > 0:
            acc_x = _dot4(weight, x1, tl.zeros((MT * 16, BX), tl.float32), INTERPRET)
        if HAS2:
            weight2 = decode_tile(codes2, scale2, MT, K2, WIDE, INTERPRET)
            acc = _dot4(weight2, y2, acc, INTERPRET)
            if BX > 0:
                acc_x = _dot4(weight2, x2, acc_x, INTERPRET)
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
    if item >= tl.load(num_ptr):
        return
    e = tl.load(work_ptr + item * 4).to(tl.int64)
    first = tl.load(work_ptr + item * 4 + 1).to(tl.int64)
    count = tl.load(work_ptr + item * 4 + 2)
    start = group * per_group
    stop = tl.minimum(start + per_group, MB // MT)
    w_base = w_ptr + e * stride_we
    s_base = s_ptr + e * stride_se
    if BX == 0 or count <= BN:
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
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    n1 = tl.arange(0, BN)
    n2 = BN + tl.arange(0, BX if BX > 0 else 16)
    valid1, valid2 = n1 < count, n2 < count
    acc1, acc2 = _product(
        y_ptr, first + n1, valid1, first + n2, valid2, stride_y, w_ptrs, s_ptrs, KB, MT, KT, BN, BX, WIDE, INTERPRET
    )
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
    INTERPRET: tl.constexpr,
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
    if item >= tl.load(num_ptr):
        return
    e = tl.load(work_ptr + item * 4).to(tl.int64)
    first = tl.load(work_ptr + item * 4 + 1).to(tl.int64)
    count = tl.load(work_ptr + item * 4 + 2)
    block = block_index(tile * MT + tl.arange(0, MT)[:, None, None], tl.arange(0, KT)[None, :, None], KB)
    w_ptrs = w_ptr + e * stride_we + block * 256 + tl.arange(0, 256)[None, None, :]
    s_ptrs = s_ptr + e * stride_se + block * 8 + tl.arange(0, 8)[None, None, :]
    if BX == 0:
        _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                 MT, KT, BN, 0, WIDE, INTERPRET)  # fmt: skip
    elif count <= BN // 4:
        _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                 MT, KT, BN // 4, 0, WIDE, INTERPRET)  # fmt: skip
    elif count <= BN:
        _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                 MT, KT, BN, 0, WIDE, INTERPRET)  # fmt: skip
    elif count <= BN + BX // 2:
        _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                 MT, KT, BN, BX // 2, WIDE, INTERPRET)  # fmt: skip
    else:
        _w2_tile(y_ptr, d_ptr, sorted_ptr, w_ptrs, s_ptrs, first, count, tile, stride_y, stride_d, KB, L,
                 MT, KT, BN, BX, WIDE, INTERPRET)  # fmt: skip
