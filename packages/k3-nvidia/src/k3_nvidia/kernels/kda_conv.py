"""Short convolution of a prefill and the gated output norm: the bandwidth-bound neighbours of the chunk kernels.

short_conv: y_t = silu(sum_j w_j u_{t-3+j}), four taps, packed sequences, left context from the conv state or zeros.
Bytes: every input and output once (4 bytes a channel and token in bf16) plus the state. A tile of tokens reads its rows
four times, three of them from the L1.
gated_norm: rms_norm(o) * weight * sigmoid(gate) over rows of one head: 6 bytes an element.
Formulas: k3_core.contracts.kda. Both keep fp32 inside and round once.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

from k3_nvidia.kernels.kda_math import sigmoid


@triton.jit
def _tap(x_ptr, state_at, at, start, x_stride, c, column_stride, BACK: tl.constexpr, mask, cmask, use_state):
    """Inputs BACK tokens before rows `at`: from x inside the sequence, from the state before its start, else zero."""
    row = at - BACK
    inside = mask & (row >= start)[:, None]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if use_state:
        column = row - start + 3
        before = mask & (row < start)[:, None] & cmask[None, :]
        old = tl.load(state_at[None, :] + column.to(tl.int64)[:, None] * column_stride, mask=before, other=0.0)
        x = tl.where(before, old.to(tl.float32), x)
    return x


@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slot_ptr", "init_ptr", "cu_ptr"])
def short_conv_kernel(
    x_ptr, weight_ptr, state_ptr, out_ptr, chunk_ptr, cu_ptr, slot_ptr, init_ptr,
    x_stride, out_stride, weight_stride, state_stride, channel_stride, column_stride, slot_stride, channels,
    part_channels, part_stride,
    BC: tl.constexpr, TR: tl.constexpr,
):  # fmt: skip
    """Grid (channel blocks, chunks); chunk_ptr as in kda_chunk. A tile is TR tokens (3 or more) of BC channels.

    Channels of a part (q, k or v) are written part_stride apart: three dense tensors instead of one, at no extra pass.
    The first chunk of a sequence also writes the new state: it is the only one that reads the old.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    cmask = c < channels
    n = tl.program_id(1)
    token = tl.load(chunk_ptr + n * 4)
    rows = tl.load(chunk_ptr + n * 4 + 1)
    seq = tl.load(chunk_ptr + n * 4 + 2)
    index = tl.load(chunk_ptr + n * 4 + 3)
    start = tl.load(cu_ptr + seq)
    end = tl.load(cu_ptr + seq + 1)
    slot = tl.load(slot_ptr + seq.to(tl.int64) * slot_stride)
    old = (slot > 0) & (tl.load(init_ptr + seq).to(tl.int32) != 0)
    state_at = state_ptr + slot.to(tl.int64) * state_stride + c.to(tl.int64) * channel_stride
    w_at = weight_ptr + c.to(tl.int64) * weight_stride
    w0 = tl.load(w_at, mask=cmask, other=0.0)[None, :]
    w1 = tl.load(w_at + 1, mask=cmask, other=0.0)[None, :]
    w2 = tl.load(w_at + 2, mask=cmask, other=0.0)[None, :]
    w3 = tl.load(w_at + 3, mask=cmask, other=0.0)[None, :]
    use_state = old & (index == 0)
    out_at = out_ptr + (c + (c // part_channels) * (part_stride - part_channels))
    for sub in tl.range(0, rows, TR):
        r = sub + tl.arange(0, TR)
        at = token + r
        mask = (r < rows)[:, None] & cmask[None, :]
        use = use_state & (sub == 0)
        y = w3 * _tap(x_ptr, state_at, at, start, x_stride, c, column_stride, 0, mask, cmask, False)
        y += w2 * _tap(x_ptr, state_at, at, start, x_stride, c, column_stride, 1, mask, cmask, use)
        y += w1 * _tap(x_ptr, state_at, at, start, x_stride, c, column_stride, 2, mask, cmask, use)
        y += w0 * _tap(x_ptr, state_at, at, start, x_stride, c, column_stride, 3, mask, cmask, use)
        y = tl.where(slot > 0, y * sigmoid(y), 0.0)
        tl.store(out_at[None, :] + at.to(tl.int64)[:, None] * out_stride, y.to(out_ptr.dtype.element_ty), mask=mask)
    if (index == 0) & (slot > 0):
        length = end - start
        # Predicates that are scalars enter masks as limits: c < 0 masks everything.
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
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS (token, head) rows)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, D)[None, :]
    mask = (row < tokens.to(tl.int64) * num_heads)[:, None]
    token = (row // num_heads)[:, None]
    col = ((row % num_heads) * D)[:, None] + c
    o = tl.load(o_ptr + token * o_stride + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, axis=1) * (1.0 / D) + eps)[:, None]
    y = o * scale * weight * sigmoid(gate)
    tl.store(out_ptr + token * out_stride + col, y.to(out_ptr.dtype.element_ty), mask=mask)
