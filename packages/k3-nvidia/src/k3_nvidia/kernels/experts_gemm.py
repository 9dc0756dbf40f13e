"""MXFP4 W4A16 expert products on tensor cores: gate/up with the activation in the epilogue, and down.

Formulas (x: latent rows, one **pair** is a (token, chosen expert)):

    y[pair] = act(x[token] W1_e^T, x[token] W3_e^T)          ``w13_kernel``          rounded once to bf16
    d[pair] = y[pair] W2_e^T                                  ``w2_kernel``, ``w2_wide_kernel``    rounded once to bf16

Weights are the left operand (rows = output channels), tokens the right one, so that a handful of tokens wastes little of a
tensor-core tile; a lane's 16-byte load is its operand (``moe_layout``) and is decoded in registers. On Hopper Triton turns the
products into ``wgmma`` with the left operand in registers and interleaves decode and products column step by column step.

Work comes as a list of items (expert, first position, count) over the expert-sorted pairs (``moe_worklist``): only touched
experts are there, its length is read on the device, so a CUDA graph replays for any routing. Rows of y are in sorted order;
rows of d are in pair order (token * top_k + slot), ready for the weighted sum. Pairs without an item (expert elsewhere) are not
written; the weighted sum does not read them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Word -> eight codes as bf16, scaled. Operands: 8 x bf16 out (two a position), word, four multipliers (bf16 pairs).
_DECODE = tl.constexpr("""
{
.reg .b32 t0, t1, t2, t3, u;
and.b32 t0, $8, 0x81C081C0;
shl.b32 u, $8, 3;
and.b32 t1, u, 0x81C081C0;
shl.b32 u, $8, 6;
and.b32 t2, u, 0x81C081C0;
shl.b32 u, $8, 1;
and.b32 t3, u, 0x80008000;
shr.b32 u, $8, 3;
lop3.b32 t3, u, 0x01800180, t3, 0xEA;
shr.b32 u, $8, 7;
lop3.b32 t3, u, 0x00400040, t3, 0xEA;
mul.rn.bf16x2 t0, t0, $9;
mul.rn.bf16x2 t1, t1, $10;
mul.rn.bf16x2 t2, t2, $11;
mul.rn.bf16x2 t3, t3, $12;
mov.b32 {$0, $1}, t0;
mov.b32 {$2, $3}, t1;
mov.b32 {$4, $5}, t2;
mov.b32 {$6, $7}, t3;
}
""")
# The same with a first product by 2^126, for scale bytes above 128 (their multiplier times 2^126 has no bf16).
_DECODE_WIDE = tl.constexpr(
    _DECODE.value.replace(
        "mul.rn.bf16x2 t0, t0, $9;",
        "mov.b32 u, 0x7E807E80;\n"
        + "\n".join(f"mul.rn.bf16x2 t{i}, t{i}, u;" for i in range(4))
        + "\nmul.rn.bf16x2 t0, t0, $9;",
    )
)
# Scale word -> four bf16 pairs 2^(s - 1): exponent field s + 126, for s <= 128.
_SCALE = tl.constexpr(
    "{\n.reg .b32 p;\n"
    + "\n".join(f"prmt.b32 p, $4, 0, 0x4{i}4{i}; mad.lo.u32 ${i}, p, 0x80, 0x3F003F00;" for i in range(4))
    + "\n}"
)


@triton.jit
def _wide_scale(scale, position: tl.constexpr):
    """bf16 pair of 2^(s - 127), exact for every byte: 0 is subnormal, 255 NaN."""
    s = (scale >> (8 * position)) & 255
    bits = tl.where(s == 0, 0x40, tl.where(s == 255, 0x7FC0, s << 7))
    return bits | (bits << 16)


@triton.jit
def _half_value(bits):
    """fp32 of the bf16 in the low 16 bits, times 2^126 (interpreter only)."""
    return ((bits & 0xFFFF) << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _decode_plain(word, scale):
    """``_DECODE`` in plain arithmetic, in fp32: what the interpreter runs."""
    t0 = word & -0x7E3F7E40
    t1 = (word << 3) & -0x7E3F7E40
    t2 = (word << 6) & -0x7E3F7E40
    t3 = ((word << 1) & -0x7FFF8000) | ((word >> 3) & 0x01800180) | ((word >> 7) & 0x00400040)
    s0 = _half_scale(scale, 0)
    s1 = _half_scale(scale, 1)
    s2 = _half_scale(scale, 2)
    s3 = _half_scale(scale, 3)
    return (
        _half_value(t0) * s0, _half_value(t0 >> 16) * s0, _half_value(t1) * s1, _half_value(t1 >> 16) * s1,
        _half_value(t2) * s2, _half_value(t2 >> 16) * s2, _half_value(t3) * s3, _half_value(t3 >> 16) * s3,
    )  # fmt: skip


@triton.jit
def _half_scale(scale, position: tl.constexpr):
    """fp32 2^(s - 127) (interpreter only)."""
    return ((_wide_scale(scale, position) & 0xFFFF) << 16).to(tl.float32, bitcast=True)


@triton.jit
def decode_tile(words, scale, MT: tl.constexpr, KT: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """Words [MT, KT, 128] and scale words [MT, KT, 8] -> weights [16 MT, 64 KT] in bf16 (fp32 in the interpreter)."""
    words = tl.reshape(words, (MT, KT, 8, 4, 4))
    shape: tl.constexpr = (MT, KT, 8, 4, 4)
    if INTERPRET:
        scale = tl.broadcast_to(scale[:, :, :, None, None], shape)
        a0, a1, b0, b1, c0, c1, d0, d1 = _decode_plain(words, scale)
    else:
        if WIDE:
            s0, s1 = _wide_scale(scale, 0), _wide_scale(scale, 1)
            s2, s3 = _wide_scale(scale, 2), _wide_scale(scale, 3)
        else:
            s0, s1, s2, s3 = tl.inline_asm_elementwise(
                _SCALE, "=r,=r,=r,=r,r", [scale], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
            )
        s0 = tl.broadcast_to(s0[:, :, :, None, None], shape)
        s1 = tl.broadcast_to(s1[:, :, :, None, None], shape)
        s2 = tl.broadcast_to(s2[:, :, :, None, None], shape)
        s3 = tl.broadcast_to(s3[:, :, :, None, None], shape)
        asm: tl.constexpr = _DECODE_WIDE if WIDE else _DECODE
        a0, a1, b0, b1, c0, c1, d0, d1 = tl.inline_asm_elementwise(
            asm, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r", [words, s0, s1, s2, s3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    first = tl.join(tl.join(a0, a1), tl.join(b0, b1))  # [MT, KT, g, t, q, h, r]
    second = tl.join(tl.join(c0, c1), tl.join(d0, d1))
    weight = tl.reshape(tl.join(first, second), (MT, KT, 8, 4, 2, 2, 2, 2, 2))  # MT KT g t q1 q0 h r c
    weight = tl.permute(weight, (0, 7, 2, 1, 8, 4, 5, 3, 6))  # MT r g | KT c q1 q0 t h
    return tl.reshape(weight, (MT * 16, KT * 64))


@triton.jit
def _dot(weight, x, acc, INTERPRET: tl.constexpr):
    """Weight times x plus acc; the interpreter multiplies bf16 wrongly, so it gets fp32."""
    if INTERPRET:
        return tl.dot(weight, x.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(weight, x, acc)


@triton.jit
def _tanh(x):
    """fp32 tanh to about 3 ulp of bf16-relevant precision everywhere: the series near 0, where 1 - 2/(e^2x + 1) cancels."""
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
def w13_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, sorted_ptr, work_ptr, num_ptr, beta, linear_beta,
    stride_x, stride_we, stride_se, stride_y, top_k, MB, KB,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (item * row tiles + row tile): y[first + j, channels of the tile] for the item's tokens j."""
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
    n = tl.arange(0, BN)
    valid = n < count
    token = tl.load(sorted_ptr + first + n, mask=valid, other=0) // top_k
    block = (tile * MT + tl.arange(0, MT)[:, None, None]) * KB + tl.arange(0, KT)[None, :, None]
    w_ptrs = w_ptr + e * stride_we + block * 128 + tl.arange(0, 128)[None, None, :]
    s_ptrs = s_ptr + e * stride_se + block * 8 + tl.arange(0, 8)[None, None, :]
    x_ptrs = x_ptr + token.to(tl.int64)[None, :] * stride_x + tl.arange(0, KT * 64)[:, None]
    acc = tl.zeros((MT * 16, BN), tl.float32)
    for _ in range(0, KB, KT):
        words = tl.load(w_ptrs)
        scale = tl.load(s_ptrs)
        x = tl.load(x_ptrs, mask=valid[None, :], other=0.0)
        acc = _dot(decode_tile(words, scale, MT, KT, WIDE, INTERPRET), x, acc, INTERPRET)
        w_ptrs += KT * 128
        s_ptrs += KT * 8
        x_ptrs += KT * 64
    # gate is row g, up row g + 8 of a block: the two halves of one thread's accumulators
    gate, up = tl.split(tl.permute(tl.reshape(acc, (MT, 2, 8, BN)), (0, 2, 3, 1)))
    y = gated_act(gate, up, beta, linear_beta, ACT)
    y = tl.reshape(y, (MT * 8, BN)).to(y_ptr.dtype.element_ty)
    channel = tile * MT * 8 + tl.arange(0, MT * 8)
    tl.store(y_ptr + (first + n)[None, :] * stride_y + channel[:, None], y, mask=valid[None, :])


@triton.jit
def w2_kernel(
    y_ptr, w_ptr, s_ptr, d_ptr, sorted_ptr, work_ptr, num_ptr,
    stride_y, stride_we, stride_se, stride_d, groups, per_group, MB, L,
    K1: tl.constexpr, K2: tl.constexpr, HAS2: tl.constexpr, MT: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Narrow experts (K1 column blocks, and K2 more if HAS2): the item's y stays on chip while rows of weights stream past.

    Program (item * groups + group): row tiles group*per_group .. +per_group.
    """
    KB: tl.constexpr = K1 + K2 if HAS2 else K1
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
    n = tl.arange(0, BN)
    valid = n < count
    pair = tl.load(sorted_ptr + first + n, mask=valid, other=0).to(tl.int64)
    y_ptrs = y_ptr + (first + n)[None, :] * stride_y
    y1 = tl.load(y_ptrs + tl.arange(0, K1 * 64)[:, None], mask=valid[None, :], other=0.0)
    if HAS2:
        y2 = tl.load(y_ptrs + K1 * 64 + tl.arange(0, K2 * 64)[:, None], mask=valid[None, :], other=0.0)
    start = group * per_group
    stop = tl.minimum(start + per_group, MB // MT)
    m = tl.arange(0, MT)[:, None, None] * KB
    lane = tl.arange(0, 128)[None, None, :]
    octet = tl.arange(0, 8)[None, None, :]
    k1 = tl.arange(0, K1)[None, :, None]
    w_base = w_ptr + e * stride_we
    s_base = s_ptr + e * stride_se
    for tile in tl.range(start, stop, num_stages=STAGES):
        block = tile * (MT * KB) + m
        words = tl.load(w_base + (block + k1) * 128 + lane)
        scale = tl.load(s_base + (block + k1) * 8 + octet)
        acc = tl.zeros((MT * 16, BN), tl.float32)
        if HAS2:
            k2 = K1 + tl.arange(0, K2)[None, :, None]
            words2 = tl.load(w_base + (block + k2) * 128 + lane)
            scale2 = tl.load(s_base + (block + k2) * 8 + octet)
        acc = _dot(decode_tile(words, scale, MT, K1, WIDE, INTERPRET), y1, acc, INTERPRET)
        if HAS2:
            acc = _dot(decode_tile(words2, scale2, MT, K2, WIDE, INTERPRET), y2, acc, INTERPRET)
        row = tile * MT * 16 + tl.arange(0, MT * 16)
        d_ptrs = d_ptr + pair[None, :] * stride_d + row[:, None]
        tl.store(d_ptrs, acc.to(d_ptr.dtype.element_ty), mask=valid[None, :] & (row < L)[:, None])


@triton.jit
def w2_wide_kernel(
    y_ptr, w_ptr, s_ptr, d_ptr, sorted_ptr, work_ptr, num_ptr,
    stride_y, stride_we, stride_se, stride_d, MB, KB, L,
    MT: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Any width: one row tile a program, columns streamed. Program (item * row tiles + row tile)."""
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
    n = tl.arange(0, BN)
    valid = n < count
    pair = tl.load(sorted_ptr + first + n, mask=valid, other=0).to(tl.int64)
    block = (tile * MT + tl.arange(0, MT)[:, None, None]) * KB + tl.arange(0, KT)[None, :, None]
    w_ptrs = w_ptr + e * stride_we + block * 128 + tl.arange(0, 128)[None, None, :]
    s_ptrs = s_ptr + e * stride_se + block * 8 + tl.arange(0, 8)[None, None, :]
    y_ptrs = y_ptr + (first + n)[None, :] * stride_y + tl.arange(0, KT * 64)[:, None]
    acc = tl.zeros((MT * 16, BN), tl.float32)
    for _ in range(0, KB, KT):
        words = tl.load(w_ptrs)
        scale = tl.load(s_ptrs)
        y = tl.load(y_ptrs, mask=valid[None, :], other=0.0)
        acc = _dot(decode_tile(words, scale, MT, KT, WIDE, INTERPRET), y, acc, INTERPRET)
        w_ptrs += KT * 128
        s_ptrs += KT * 8
        y_ptrs += KT * 64
    row = tile * MT * 16 + tl.arange(0, MT * 16)
    d_ptrs = d_ptr + pair[None, :] * stride_d + row[:, None]
    tl.store(d_ptrs, acc.to(d_ptr.dtype.element_ty), mask=valid[None, :] & (row < L)[:, None])
