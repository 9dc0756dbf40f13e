"""Short convolution of a prefill and the gated output norm: the bandwidth-bound neighbours of the chunk kernels.

short_conv: y_t = silu(sum_j w_j u_{t-3+j}), four taps, packed sequences, left context from the conv state or zeros. One
wave owns 512 channels, eight (16 bytes) a lane, and walks a chunk's tokens with the last three inputs in registers, so
every input is loaded once; GROUP tokens are in flight together. No LDS, no barrier.
gated_norm: rms_norm(o) * weight * sigmoid(gate); sixteen lanes hold a head of 128.
Formulas: k3_core.contracts.kda. Both keep fp32 inside and round once.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code="assignment, misc, attr-defined, var-annotated"

import triton
import triton.language as tl

from k3_amd.kernels.device.math import sigmoid


@triton.jit
def left_context(x_ptr, state_at, column_stride, token, x_stride, c, channels, first, old, BACK: tl.constexpr):
    """Inputs BACK tokens before a chunk's first: of the sequence, of the state (old) at its start, or zero."""
    # Predicates that are scalars enter masks as limits: c < 0 masks everything.
    before = tl.load(
        x_ptr + (token - BACK).to(tl.int64) * x_stride + c, mask=c < tl.where(first, 0, channels), other=0.0
    )
    kept = tl.load(state_at + (3 - BACK) * column_stride, mask=c < tl.where(first & old, channels, 0), other=0.0)
    return tl.where(first, kept, before)


@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slot_ptr", "init_ptr", "cu_ptr"])
def short_conv_kernel(
    x_ptr, weight_ptr, state_ptr, out_ptr, chunk_ptr, cu_ptr, slot_ptr, init_ptr,
    x_stride, out_stride, state_stride, channel_stride, column_stride, slot_stride, channels,
    BC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (channel blocks, chunks); chunk_ptr int32 [chunks, 4]: first token, rows, sequence, index in its sequence.

    The first chunk of a sequence also writes the new state: it is the only one that reads the old.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.program_id(1)
    token = tl.load(chunk_ptr + n * 4)
    rows = tl.load(chunk_ptr + n * 4 + 1)
    seq = tl.load(chunk_ptr + n * 4 + 2)
    first = tl.load(chunk_ptr + n * 4 + 3) == 0
    slot = tl.load(slot_ptr + seq.to(tl.int64) * slot_stride)
    old = (slot > 0) & (tl.load(init_ptr + seq).to(tl.int32) != 0)
    state_at = state_ptr + slot.to(tl.int64) * state_stride + c.to(tl.int64) * channel_stride
    k0 = left_context(x_ptr, state_at, column_stride, token, x_stride, c, channels, first, old, 3)
    k1 = left_context(x_ptr, state_at, column_stride, token, x_stride, c, channels, first, old, 2)
    k2 = left_context(x_ptr, state_at, column_stride, token, x_stride, c, channels, first, old, 1)
    w0 = tl.load(weight_ptr + c * 4, mask=c < channels, other=0.0)
    w1 = tl.load(weight_ptr + c * 4 + 1, mask=c < channels, other=0.0)
    w2 = tl.load(weight_ptr + c * 4 + 2, mask=c < channels, other=0.0)
    w3 = tl.load(weight_ptr + c * 4 + 3, mask=c < channels, other=0.0)
    h0 = k0.to(tl.float32)
    h1 = k1.to(tl.float32)
    h2 = k2.to(tl.float32)
    x_at = x_ptr + token.to(tl.int64) * x_stride + c
    out_at = out_ptr + token.to(tl.int64) * out_stride + c
    for sub in tl.range(0, rows, GROUP):
        loaded = ()
        for i in tl.static_range(GROUP):
            inside = c < tl.where(sub + i < rows, channels, 0)
            loaded = loaded + (tl.load(x_at + i * x_stride, mask=inside, other=0.0),)
        for i in tl.static_range(GROUP):
            x = loaded[i].to(tl.float32)
            y = w0 * h0 + w1 * h1 + w2 * h2 + w3 * x
            y = tl.where(slot > 0, y * sigmoid(y), 0.0)
            tl.store(
                out_at + i * out_stride, y.to(out_ptr.dtype.element_ty), mask=c < tl.where(sub + i < rows, channels, 0)
            )
            h0 = h1
            h1 = h2
            h2 = x
        x_at += GROUP * x_stride
        out_at += GROUP * out_stride
    if first & (slot > 0):
        end = tl.load(cu_ptr + seq + 1)
        length = end - tl.load(cu_ptr + seq)
        tail = x_ptr + (end - 3).to(tl.int64) * x_stride + c
        x0 = tl.load(tail, mask=c < tl.where(length >= 3, channels, 0), other=0.0)
        x1 = tl.load(tail + x_stride, mask=c < tl.where(length >= 2, channels, 0), other=0.0)
        x2 = tl.load(tail + 2 * x_stride, mask=c < channels, other=0.0)
        tl.debug_barrier()
        new0 = tl.where(length >= 3, x0, tl.where(length == 2, k2, k1))
        new1 = tl.where(length >= 2, x1, k2)
        tl.store(state_at, new0, mask=c < channels)
        tl.store(state_at + column_stride, new1, mask=c < channels)
        tl.store(state_at + 2 * column_stride, x2, mask=c < channels)


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
    scale = tl.rsqrt(tl.sum(o * o, axis=1) * (1.0 / D) + eps)[:, None]
    y = o * scale * tl.load(weight_ptr + c).to(tl.float32) * sigmoid(gate)
    tl.store(out_ptr + token * out_stride + col, y.to(out_ptr.dtype.element_ty), mask=mask)
