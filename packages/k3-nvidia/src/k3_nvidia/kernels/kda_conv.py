"""Short convolution of a prefill and the gated output norm: the bandwidth-bound neighbours of the chunk kernels.

short_conv: y_t = silu(sum_j w_j u_{t-3+j}), four taps, packed sequences, left context from the conv state or zeros.
Bytes: every input and output once (4 bytes a channel and token in bf16) plus the state. A thread walks down its
channels and keeps the last three inputs: about 14 instructions an output (tiles that read four shifted copies of their
rows took 30 and were bound by them: 33 us for 18 us of bytes at 8192 tokens of 6 heads on an H200).
gated_norm: rms_norm(o) * weight * sigmoid(gate) over rows of one head: 6 bytes an element.
Formulas: k3_core.contracts.kda. Both keep fp32 inside and round once.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_nvidia.kernels.kda_math import sigmoid


@triton.jit
def _eight(x_at, stride, first, rows, channels, c):
    """Rows first .. first + 7 of x, zeros from row `rows` on; eight loads that do not wait for each other.

    Predicates that are scalars enter masks as limits: c < 0 masks everything.
    """
    at = x_at + first.to(tl.int64) * stride
    return (
        tl.load(at, mask=c < tl.where(first < rows, channels, 0), other=0.0),
        tl.load(at + stride, mask=c < tl.where(first + 1 < rows, channels, 0), other=0.0),
        tl.load(at + 2 * stride, mask=c < tl.where(first + 2 < rows, channels, 0), other=0.0),
        tl.load(at + 3 * stride, mask=c < tl.where(first + 3 < rows, channels, 0), other=0.0),
        tl.load(at + 4 * stride, mask=c < tl.where(first + 4 < rows, channels, 0), other=0.0),
        tl.load(at + 5 * stride, mask=c < tl.where(first + 5 < rows, channels, 0), other=0.0),
        tl.load(at + 6 * stride, mask=c < tl.where(first + 6 < rows, channels, 0), other=0.0),
        tl.load(at + 7 * stride, mask=c < tl.where(first + 7 < rows, channels, 0), other=0.0),
    )


@triton.jit
def _put(out_at, stride, row, rows, channels, c, a0, a1, a2, a3, w0, w1, w2, w3, live):
    """silu of the convolution at one row, whose own and three earlier inputs are a3 .. a0; zero unless live."""
    y = w3 * a3
    y += w2 * a2
    y += w1 * a1
    y += w0 * a0
    y = tl.where(live, y * sigmoid(y), 0.0)
    at = out_at + row.to(tl.int64) * stride
    tl.store(at, y.to(out_at.dtype.element_ty), mask=c < tl.where(row < rows, channels, 0))


@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slot_ptr", "init_ptr", "cu_ptr"])
def short_conv_kernel(
    x_ptr, weight_ptr, state_ptr, out_ptr, chunk_ptr, cu_ptr, slot_ptr, init_ptr,
    x_stride, out_stride, weight_stride, state_stride, channel_stride, column_stride, slot_stride, channels,
    part_channels, part_stride,
    BC: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (channel blocks, chunks, PARTS of a chunk of 64); chunk_ptr as in kda_chunk.

    A row is read once (three more a part); eight are on their way while eight are worked on.

    Channels of a part (q, k or v) are written part_stride apart: three dense tensors instead of one, at no extra pass.
    The first chunk of a sequence also writes the new state: it is the only one that reads the old.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    cmask = c < channels
    n = tl.program_id(1)
    ahead = tl.program_id(2) * (64 // PARTS)
    token = tl.load(chunk_ptr + n * 4) + ahead
    rows = tl.minimum(tl.load(chunk_ptr + n * 4 + 1) - ahead, 64 // PARTS)
    seq = tl.load(chunk_ptr + n * 4 + 2)
    index = tl.load(chunk_ptr + n * 4 + 3) * PARTS + tl.program_id(2)
    start = tl.load(cu_ptr + seq)
    end = tl.load(cu_ptr + seq + 1)
    slot = tl.load(slot_ptr + seq.to(tl.int64) * slot_stride)
    old = (slot > 0) & (tl.load(init_ptr + seq).to(tl.int32) != 0)
    state_at = state_ptr + slot.to(tl.int64) * state_stride + c.to(tl.int64) * channel_stride
    w_at = weight_ptr + c.to(tl.int64) * weight_stride
    w0 = tl.load(w_at, mask=cmask, other=0.0)
    w1 = tl.load(w_at + 1, mask=cmask, other=0.0)
    w2 = tl.load(w_at + 2, mask=cmask, other=0.0)
    w3 = tl.load(w_at + 3, mask=cmask, other=0.0)
    part = (c // part_channels).to(tl.int64)  # two parts may be beyond 2^31 elements where one is not
    out_at = out_ptr + token.to(tl.int64) * out_stride + c + part * (part_stride - part_channels)
    x_at = x_ptr + token.to(tl.int64) * x_stride + c
    live = slot > 0
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(x_at, x_stride, token * 0, rows, channels, c)
    # Inputs before the chunk: from x inside a sequence, from the state before its start, else zeros.
    # A part behind the chunk's last row reads nothing: the rows before it need not be there.
    left = tl.where((index > 0) & (rows > 0), channels, 0)
    kept = tl.where(old & (index == 0), channels, 0)
    a0 = tl.load(x_at - 3 * x_stride, mask=c < left, other=0.0).to(tl.float32)
    a1 = tl.load(x_at - 2 * x_stride, mask=c < left, other=0.0).to(tl.float32)
    a2 = tl.load(x_at - x_stride, mask=c < left, other=0.0).to(tl.float32)
    a0 += tl.load(state_at, mask=c < kept, other=0.0).to(tl.float32)
    a1 += tl.load(state_at + column_stride, mask=c < kept, other=0.0).to(tl.float32)
    a2 += tl.load(state_at + 2 * column_stride, mask=c < kept, other=0.0).to(tl.float32)
    none = token * 0  # a scalar block: the interpreter's loop variables are plain numbers
    for n in tl.range(0, rows, 8):
        sub = none + n
        n0, n1, n2, n3, n4, n5, n6, n7 = _eight(x_at, x_stride, sub + 8, rows, channels, c)
        f0 = x0.to(tl.float32)
        f1 = x1.to(tl.float32)
        f2 = x2.to(tl.float32)
        f3 = x3.to(tl.float32)
        f4 = x4.to(tl.float32)
        f5 = x5.to(tl.float32)
        f6 = x6.to(tl.float32)
        f7 = x7.to(tl.float32)
        _put(out_at, out_stride, sub, rows, channels, c, a0, a1, a2, f0, w0, w1, w2, w3, live)
        _put(out_at, out_stride, sub + 1, rows, channels, c, a1, a2, f0, f1, w0, w1, w2, w3, live)
        _put(out_at, out_stride, sub + 2, rows, channels, c, a2, f0, f1, f2, w0, w1, w2, w3, live)
        _put(out_at, out_stride, sub + 3, rows, channels, c, f0, f1, f2, f3, w0, w1, w2, w3, live)
        _put(out_at, out_stride, sub + 4, rows, channels, c, f1, f2, f3, f4, w0, w1, w2, w3, live)
        _put(out_at, out_stride, sub + 5, rows, channels, c, f2, f3, f4, f5, w0, w1, w2, w3, live)
        _put(out_at, out_stride, sub + 6, rows, channels, c, f3, f4, f5, f6, w0, w1, w2, w3, live)
        _put(out_at, out_stride, sub + 7, rows, channels, c, f4, f5, f6, f7, w0, w1, w2, w3, live)
        a0 = f5
        a1 = f6
        a2 = f7
        x0 = n0
        x1 = n1
        x2 = n2
        x3 = n3
        x4 = n4
        x5 = n5
        x6 = n6
        x7 = n7
    if (index == 0) & (slot > 0):
        length = end - start
        most = tl.where(old, channels, 0)
        o0 = tl.load(state_at, mask=c < tl.where(length < 1, most, 0), other=0.0)
        o1 = tl.load(state_at + column_stride, mask=c < tl.where(length < 2, most, 0), other=0.0)
        o2 = tl.load(state_at + 2 * column_stride, mask=c < tl.where(length < 3, most, 0), other=0.0)
        tail = x_ptr + (end - 3).to(tl.int64) * x_stride + c
        x0 = tl.load(tail, mask=c < tl.where(length >= 3, channels, 0), other=0.0)
        x1 = tl.load(tail + x_stride, mask=c < tl.where(length >= 2, channels, 0), other=0.0)
        x2 = tl.load(tail + 2 * x_stride, mask=c < tl.where(length >= 1, channels, 0), other=0.0)
        n0 = tl.where(length >= 3, x0, tl.where(length == 2, o2, tl.where(length == 1, o1, o0)))
        n1 = tl.where(length >= 2, x1, tl.where(length == 1, o2, o1))
        n2 = tl.where(length >= 1, x2, o2)
        tl.debug_barrier()
        tl.store(state_at, n0, mask=cmask)
        tl.store(state_at + column_stride, n1, mask=cmask)
        tl.store(state_at + 2 * column_stride, n2, mask=cmask)


@triton.jit(do_not_specialize=["tokens", "num_heads"])
def gated_norm_kernel(
    o_ptr, gate_ptr, weight_ptr, out_ptr, o_stride, gate_stride, out_stride, eps, tokens, num_heads,
    ROWS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS (token, head) rows). PDL: only the weight is read while the kernel before still runs."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, D)[None, :]
    mask = (row < tokens.to(tl.int64) * num_heads)[:, None]
    token = (row // num_heads)[:, None]
    col = ((row % num_heads) * D)[:, None] + c
    weight = tl.load(weight_ptr + c).to(tl.float32)
    if PDL:
        gdc_wait()
    o = tl.load(o_ptr + token * o_stride + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, axis=1) * (1.0 / D) + eps)[:, None]
    y = o * scale * weight * sigmoid(gate)
    tl.store(out_ptr + token * out_stride + col, y.to(out_ptr.dtype.element_ty), mask=mask)
