"""MXFP4 expert products on CDNA's matrix cores: gate/up with the activation in the epilogue, down, weighted sum.

    y[pair] = act(x[token] W1_e^T, x[token] W3_e^T)          ``w13_kernel``      rounded once
    d[pair] = y[pair] W2_e^T                                  ``w2_kernel``       rounded once
    out[token] = sum over its pairs of weight * d[pair]       ``combine_kernel``  fp32 sum in the order of the choices

FORM says how codes meet the matrix cores (`k3_amd.kernels.experts_layout` says how they lie in memory):

    0  unpacked here, exactly, to bf16 (gfx942, whose matrix cores know no 4-bit type). The code's bits become a tiny
       fp32 number, 2^-126 times the value; one product with 2^126 * scale is exact, and so is cutting it to bf16. The
       layout puts a block's columns 0..31 in the low and 32..63 in the high nibbles: no interleave.
    1  ``tl.dot_scaled`` with bf16 activations: gfx950 converts codes and scales in one instruction
       (v_cvt_scalef32_pk_bf16_fp4) and multiplies bf16. Exact as form 0.
    2  ``tl.dot_scaled`` with activations rounded to MXFP8 (e4m3, one scale for 32): scaled matrix instructions
       (v_mfma_scale_f32_*_f8f6f4). Lossy; only where it was asked for by name.

Tokens are the left operand: with few of them an instruction of 16 rows wastes little, and a lane's results are
neighbouring channels of one row. Work comes as items (expert, first position, count) over expert-sorted pairs
(``worklist``): only touched experts are there and the length is read on the device, so a captured graph replays for any
routing. Consecutive workgroups go to different XCDs, each with its own L2, so the tiles are renumbered to give
each XCD a contiguous run: items of one expert meet its weights in one L2.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"

import triton
import triton.language as tl

from k3_amd.kernels.device.math import dot, gated_act
from k3_amd.kernels.device.worklist import local_ids

XCDS = tl.constexpr(8)


@triton.jit
def place_on_xcd(pid, total):
    """Number of this workgroup's tile: XCD pid % 8 works through a contiguous run; >= total if there is none."""
    run = (total + XCDS - 1) // XCDS
    mine = (pid % XCDS) * run + pid // XCDS
    return tl.where(pid // XCDS < run, mine, total)


@triton.jit
def scale_factor(s, WIDE: tl.constexpr):
    """fp32 factor that completes ``code_value`` for scale bytes s (int32): 2^(s - 1), s <= 128; WIDE: 2^(s - 127)."""
    if not WIDE:
        return ((s + 126) << 23).to(tl.float32, bitcast=True)
    return tl.where(s == 0, 0x00400000, tl.where(s == 255, 0x7FC00000, s << 23)).to(tl.float32, bitcast=True)


@triton.jit
def code_value(code, SHIFT: tl.constexpr, factor, WIDE: tl.constexpr):
    """bf16 value of the codes at bits SHIFT..SHIFT+3 of int32, times their scale; exact."""
    bits = ((code & (7 << SHIFT)) << (22 - SHIFT)) | ((code & (8 << SHIFT)) << (28 - SHIFT))
    value = bits.to(tl.float32, bitcast=True)
    if WIDE:
        value = value * 8.507059173023462e37  # 2^126
    value = value * factor
    return (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def unpack(w, s_low, s_high, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr):
    """Bytes [BN, BK/64, 32], scale bytes [BN, BK/64, 1] twice -> bf16 operands [BN, BK/2] of the two column halves."""
    w = w.to(tl.int32)
    low = code_value(w, 0, scale_factor(s_low.to(tl.int32), WIDE), WIDE)
    high = code_value(w, 4, scale_factor(s_high.to(tl.int32), WIDE), WIDE)
    return tl.reshape(low, (BN, BK // 2)), tl.reshape(high, (BN, BK // 2))


@triton.jit
def _load_packed(w_row, s_row, k, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Codes and the two scale bytes of each 64-column block; w_row, s_row [BN, 1, 1] point at the rows' starts."""
    b = k // 64 + tl.arange(0, BK // 64)[None, :, None]
    w = tl.load(w_row + b * 32 + tl.arange(0, 32)[None, None, :])
    return w, tl.load(s_row + b * 2), tl.load(s_row + b * 2 + 1)


@triton.jit
def _unpacked_product(x_row, inside, w_row, s_row, acc, k, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
                      UPCAST: tl.constexpr):  # fmt: skip
    """acc [BM, BN] plus columns k .. k + BK of the product; x_row [BM, 1] points at the rows' starts."""
    j = tl.arange(0, BK // 2)
    at = x_row + (k + (j // 32) * 64 + j % 32)[None, :]
    w, s_low, s_high = _load_packed(w_row, s_row, k, 0, BN, BK)
    x_low = tl.load(at, mask=inside, other=0.0)
    x_high = tl.load(at + 32, mask=inside, other=0.0)
    low, high = unpack(w, s_low, s_high, BN, BK, WIDE)
    acc = dot(x_low, tl.trans(low), acc, UPCAST)
    return dot(x_high, tl.trans(high), acc, UPCAST)


@triton.jit
def _scaled_product(x_row, xs_row, inside, w_row, s_row, acc, k, BK: tl.constexpr, FORM: tl.constexpr):
    """As ``_unpacked_product`` with codes two columns a byte; w_row, s_row [BN, 1]."""
    w = tl.load(w_row + (k // 2 + tl.arange(0, BK // 2))[None, :])
    s = tl.load(s_row + (k // 32 + tl.arange(0, BK // 32))[None, :])
    x = tl.load(x_row + (k + tl.arange(0, BK))[None, :], mask=inside, other=0.0)
    if FORM == 2:
        xs = tl.load(xs_row + (k // 32 + tl.arange(0, BK // 32))[None, :], mask=inside, other=127)
        return tl.dot_scaled(x, xs, "e4m3", tl.trans(w), s, "e2m1", acc)
    else:
        return tl.dot_scaled(x, None, "bf16", tl.trans(w), s, "e2m1", acc)


@triton.jit
def w13_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, y_ptr, sorted_ptr, work_ptr, number_ptr, beta, linear_beta,
    x_stride, xs_stride, we_stride, se_stride, up_w, up_s, y_stride, top_k, tiles,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    ACT: tl.constexpr, FORM: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (items * tiles, rounded up to XCDS): y[first + j, channels of the tile] for the item's tokens j.

    Gate row n of an expert lies at w + n * K/2, its up row up_w bytes later; scales at K/32 a row and up_s.
    """
    pid = place_on_xcd(tl.program_id(0), tl.load(number_ptr) * tiles)
    item = pid // tiles
    if item >= tl.load(number_ptr):
        return
    e = tl.load(work_ptr + item * 4).to(tl.int64)
    first = tl.load(work_ptr + item * 4 + 1).to(tl.int64)
    count = tl.load(work_ptr + item * 4 + 2)
    m = tl.arange(0, BM)
    inside = (m < count)[:, None]
    token = (tl.load(sorted_ptr + first + m, mask=m < count, other=0) // top_k).to(tl.int64)
    x_row = x_ptr + token[:, None] * x_stride
    n = (pid % tiles) * BN + tl.arange(0, BN)
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    if FORM == 0:
        w_row = w_ptr + e * we_stride + n[:, None, None] * (K // 2)
        s_row = s_ptr + e * se_stride + n[:, None, None] * (K // 32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            gate = _unpacked_product(x_row, inside, w_row, s_row, gate, k, BN, BK, WIDE, UPCAST)
            up = _unpacked_product(x_row, inside, w_row + up_w, s_row + up_s, up, k, BN, BK, WIDE, UPCAST)
    else:
        xs_row = xs_ptr + token[:, None] * xs_stride
        w_row2 = w_ptr + e * we_stride + n[:, None] * (K // 2)
        s_row2 = s_ptr + e * se_stride + n[:, None] * (K // 32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            gate = _scaled_product(x_row, xs_row, inside, w_row2, s_row2, gate, k, BK, FORM)
            up = _scaled_product(x_row, xs_row, inside, w_row2 + up_w, s_row2 + up_s, up, k, BK, FORM)
    y = gated_act(gate, up, beta, linear_beta, ACT)
    tl.store(y_ptr + (first + m)[:, None] * y_stride + n[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def w2_kernel(
    y_ptr, ys_ptr, w_ptr, s_ptr, d_ptr, sorted_ptr, work_ptr, number_ptr,
    y_stride, ys_stride, we_stride, se_stride, d_stride, tiles, latent,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    FORM: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid as ``w13_kernel``: d[pair, latent columns of the tile]; rows of w beyond latent are padding."""
    pid = place_on_xcd(tl.program_id(0), tl.load(number_ptr) * tiles)
    item = pid // tiles
    if item >= tl.load(number_ptr):
        return
    e = tl.load(work_ptr + item * 4).to(tl.int64)
    first = tl.load(work_ptr + item * 4 + 1).to(tl.int64)
    count = tl.load(work_ptr + item * 4 + 2)
    m = tl.arange(0, BM)
    inside = (m < count)[:, None]
    y_row = y_ptr + (first + m)[:, None] * y_stride
    n = (pid % tiles) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    if FORM == 0:
        w_row = w_ptr + e * we_stride + n[:, None, None] * (K // 2)
        s_row = s_ptr + e * se_stride + n[:, None, None] * (K // 32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            acc = _unpacked_product(y_row, inside, w_row, s_row, acc, k, BN, BK, WIDE, UPCAST)
    else:
        ys_row = ys_ptr + (first + m)[:, None] * ys_stride
        w_row2 = w_ptr + e * we_stride + n[:, None] * (K // 2)
        s_row2 = s_ptr + e * se_stride + n[:, None] * (K // 32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            acc = _scaled_product(y_row, ys_row, inside, w_row2, s_row2, acc, k, BK, FORM)
    pair = tl.load(sorted_ptr + first + m, mask=m < count, other=0).to(tl.int64)
    at = d_ptr + pair[:, None] * d_stride + n[None, :]
    tl.store(at, acc.to(d_ptr.dtype.element_ty), mask=inside & (n < latent)[None, :])


@triton.jit
def quantize_kernel(x_ptr, q_ptr, s_ptr, x_stride, q_stride, s_stride, width, BLOCK: tl.constexpr):
    """MXFP8 rows: one e8m0 scale (a power of two) for 32 columns so that the largest fits e4m3 (448), values rounded.

    Grid (blocks of a row, rows). Only the lossy form uses it.
    """
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)[:, None]
    column = group * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)[:, None]
    # The exponent of the largest, one more if it exceeds 1.75 * 2^8 = 448 after scaling; e4m3's largest is 2^8 * 1.75.
    bits = largest.to(tl.int32, bitcast=True)
    exponent = ((bits + 0x1FFFFF) >> 23) - 8
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(q_ptr + row * q_stride + column, scaled.to(q_ptr.dtype.element_ty), mask=column < width)
    tl.store(s_ptr + row * s_stride + group, exponent.to(tl.uint8), mask=group * 32 < width)


@triton.jit
def combine_kernel(
    d_ptr, weights_ptr, ids_ptr, map_ptr, out_ptr, latent, num_local, top_k, d_stride, out_stride,
    TK: tl.constexpr, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Grid (column blocks, tokens). Rows of experts that are elsewhere are neither read nor counted."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < latent
    acc = tl.zeros((BLOCK,), tl.float32)
    # One base for the token's rows, so that AMD's buffer loads share a descriptor.
    ids_ptr += token * top_k
    weights_ptr += token * top_k
    d_ptr += token * top_k * d_stride
    for k in tl.static_range(TK):
        used = k < top_k
        ids = tl.load(ids_ptr + k, mask=used, other=-1)
        _, here = local_ids(ids, map_ptr, num_local, HAS_MAP, used)
        weight = tl.load(weights_ptr + k, mask=here, other=0.0)
        some = column < tl.where(here, latent, 0)
        d = tl.load(d_ptr + (k * d_stride + column), mask=some, other=0.0)
        acc += weight * d.to(tl.float32)  # 0 * 0 where the expert is elsewhere
    tl.store(out_ptr + token * out_stride + column, acc.to(out_ptr.dtype.element_ty), mask=inside)
