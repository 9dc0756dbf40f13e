"""KDA decode and verification for CDNA: one program a (row, head), the 64 KiB state in registers, one launch each.

State traffic is all that matters (everything else is under 3 % of it). Eight waves hold a 128 x 128 fp32 state as 32
registers a lane, read and written as 16 bytes a lane; its loads are issued first and travel while the convolution and
the gate are computed. q | k | v | z of a head are 512 channels: one a lane of the eight waves, so that every element of
the convolution is loaded once; `gather` hands the parts to the layouts of the state through LDS.

Because one program owns a row's head, verification keeps the state in registers over its 1 + n tokens and also owns the
row's convolution columns: no second kernel for the norm and the columns.

Per token, with raw q and k and their reciprocal norms rq (D^-0.5 included) and rk as late scalars:

    S' = S diag(exp g)      a = S' k      b = S' q          two reductions that don't wait for each other
    u  = beta (v - rk a) rk                S = S' + u k^T    o = rq (b + u (k . q))

Null and padding rows (slot <= 0) write zeros and touch no state. Offsets are 64 bit. Formulas: k3_core.contracts.kda;
slots and columns of verification: the operator table.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

from k3_amd.kernels.device.math import gate_log2, sigmoid


@triton.jit
def _inner(a, b):
    """a . b as a [1] tensor, reduced inside each wave: every wave that uses a row vector holds all of it."""
    return tl.sum((a * b)[None, :], axis=1)


@triton.jit
def _zero_rows(out_ptr, first, count, out_stride, head, D: tl.constexpr):
    """Zeros for one head of rows first .. first + count."""
    c = tl.arange(0, D)
    for t in tl.range(0, count):
        at = (first + t).to(tl.int64) * out_stride + head * D + c
        tl.store(out_ptr + at, tl.zeros([D], dtype=out_ptr.dtype.element_ty))


@triton.jit
def state_step(S, q, k, v, decay, beta, rq, rk, kq):
    """One token: (new S, o)."""
    S = S * decay[None, :]
    a = tl.sum(S * k[None, :], axis=1)
    b = tl.sum(S * q[None, :], axis=1)
    u = beta * (v - rk * a) * rk
    return S + u[:, None] * k[None, :], rq * (b + u * kq)


@triton.jit
def _token(S, y, beta, D: tl.constexpr):
    """Splits y = q | k | v | decay [4 D] over the layouts of S and takes one step: (new S, o [D])."""
    c = tl.arange(0, D)
    q = tl.gather(y, c, 0)
    k = tl.gather(y, c + D, 0)
    decay = tl.gather(y, c + 3 * D, 0)
    v = tl.gather(y, c + 2 * D, 0)
    rq = tl.rsqrt(_inner(q, q) + 1e-6) * (D**-0.5)
    rk = tl.rsqrt(_inner(k, k) + 1e-6)
    return state_step(S, q, k, v, decay, beta, rq, rk, _inner(k, q))


@triton.jit
def _norm(o, weight, gate, eps, D: tl.constexpr):
    """rms_norm(o) * weight * sigmoid(gate) of one head."""
    return o * tl.rsqrt(tl.sum(o * o, axis=0) * (1.0 / D) + eps) * weight * sigmoid(gate)


@triton.jit
def _activate(y, z, rate, bias, lower_bound, here, kind, BOUNDED: tl.constexpr):
    """SiLU of the convolved parts, rounded like what a separate convolution writes; elsewhere the decay."""
    y = (y * sigmoid(y)).to(kind).to(tl.float32)
    return tl.where(here, y, tl.exp2(gate_log2(z, rate, bias, lower_bound, BOUNDED)))


@triton.jit(do_not_specialize=["slot_stride", "num_heads"], do_not_specialize_on_alignment=["slot_ptr", "beta_ptr"])
def kda_decode_kernel(
    qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_ptr, state_ptr,
    slot_ptr, out_ptr, lower_bound, eps,
    qkv_stride, z_stride, beta_stride, gate_stride, out_stride,
    conv_stride, channel_stride, column_stride, state_stride, slot_stride, num_heads,
    BOUNDED: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row.to(tl.int64) * slot_stride).to(tl.int64)
    if slot <= 0:
        _zero_rows(out_ptr, row, 1, out_stride, head, D)
    else:
        c = tl.arange(0, D)
        state_at = state_ptr + (slot * state_stride + head * (D * D)) + c[:, None] * D + c[None, :]
        S = tl.load(state_at).to(tl.float32)
        token = row.to(tl.int64)
        e = tl.arange(0, 4 * D)
        part = e // D
        here = part < 3
        channel = (part * num_heads + head) * D + e % D
        conv_at = conv_ptr + slot * conv_stride + channel.to(tl.int64) * channel_stride
        h0 = tl.load(conv_at, mask=here, other=0.0)
        h1 = tl.load(conv_at + column_stride, mask=here, other=0.0)
        h2 = tl.load(conv_at + 2 * column_stride, mask=here, other=0.0)
        x = tl.load(qkv_ptr + token * qkv_stride + channel, mask=here, other=0.0)
        w_at = weight_ptr + channel * 4
        y = tl.load(w_at, mask=here, other=0.0) * h0.to(tl.float32)
        y += tl.load(w_at + 1, mask=here, other=0.0) * h1.to(tl.float32)
        y += tl.load(w_at + 2, mask=here, other=0.0) * h2.to(tl.float32)
        y += tl.load(w_at + 3, mask=here, other=0.0) * x.to(tl.float32)
        z = tl.load(z_ptr + token * z_stride + head * D + e - 3 * D, mask=part == 3, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias_ptr + head * D + e - 3 * D, mask=part == 3, other=0.0)
        rate = tl.exp(tl.load(a_log_ptr + head))
        beta = tl.load(beta_ptr + token * beta_stride + head)
        # Each lane moves its own channels; where there are fewer channels than lanes, copies must have read them.
        if D < 128:
            tl.debug_barrier()
        tl.store(conv_at, h1, mask=here)
        tl.store(conv_at + column_stride, h2, mask=here)
        tl.store(conv_at + 2 * column_stride, x, mask=here)
        S, o = _token(S, _activate(y, z, rate, bias, lower_bound, here, x.dtype, BOUNDED), beta, D)
        tl.store(state_at, S.to(state_ptr.dtype.element_ty))
        gate = tl.load(gate_ptr + token * gate_stride + head * D + c).to(tl.float32)
        o = _norm(o, tl.load(norm_ptr + c).to(tl.float32), gate, eps, D)
        tl.store(out_ptr + token * out_stride + head * D + c, o.to(out_ptr.dtype.element_ty))


@triton.jit(
    do_not_specialize=["slot_stride", "slot_column_stride", "tokens", "padded_rows", "num_heads"],
    do_not_specialize_on_alignment=["slot_ptr", "beta_ptr", "accepted_ptr", "cu_ptr"],
)
def kda_verify_kernel(
    qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_ptr, state_ptr,
    slot_ptr, accepted_ptr, cu_ptr, out_ptr, lower_bound, eps,
    qkv_stride, z_stride, beta_stride, gate_stride, out_stride,
    conv_stride, channel_stride, column_stride, state_stride, slot_stride, slot_column_stride,
    tokens, padded_rows, num_heads,
    BOUNDED: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (heads, sequences): outputs and a state after every token, new convolution columns, zeros in padding."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    slot_at = slot_ptr + row.to(tl.int64) * slot_stride
    slot = tl.load(slot_at).to(tl.int64)
    first = tl.load(cu_ptr + row)
    count = tl.load(cu_ptr + row + 1) - first
    last = tl.load(cu_ptr + padded_rows)
    for t in tl.range(0, tokens - last - row, padded_rows):
        _zero_rows(out_ptr, last + row + t, 1, out_stride, head, D)
    if slot <= 0:
        _zero_rows(out_ptr, first, count, out_stride, head, D)
    elif count > 0:
        column0 = (tl.load(accepted_ptr + row) - 1).to(tl.int64)
        source = tl.load(slot_at + column0 * slot_column_stride).to(tl.int64)
        c = tl.arange(0, D)
        tile = head * (D * D) + c[:, None] * D + c[None, :]
        S = tl.load(state_ptr + source * state_stride + tile).to(tl.float32)
        e = tl.arange(0, 4 * D)
        part = e // D
        here = part < 3
        channel = (part * num_heads + head) * D + e % D
        conv_at = conv_ptr + slot * conv_stride + channel.to(tl.int64) * channel_stride
        old_at = conv_at + column0 * column_stride
        h0 = tl.load(old_at, mask=here, other=0.0).to(tl.float32)
        k1 = tl.load(old_at + column_stride, mask=here, other=0.0)
        k2 = tl.load(old_at + 2 * column_stride, mask=here, other=0.0)
        w_at = weight_ptr + channel * 4
        w0 = tl.load(w_at, mask=here, other=0.0)
        w1 = tl.load(w_at + 1, mask=here, other=0.0)
        w2 = tl.load(w_at + 2, mask=here, other=0.0)
        w3 = tl.load(w_at + 3, mask=here, other=0.0)
        bias = tl.load(dt_bias_ptr + head * D + e - 3 * D, mask=part == 3, other=0.0)
        rate = tl.exp(tl.load(a_log_ptr + head))
        norm = tl.load(norm_ptr + c).to(tl.float32)
        h1 = k1.to(tl.float32)
        h2 = k2.to(tl.float32)
        # The accepted columns overlap the new ones: every copy of a lane has read before any of them writes.
        tl.debug_barrier()
        tl.store(conv_at, k1, mask=here)
        tl.store(conv_at + column_stride, k2, mask=here)
        new_at = conv_at + 2 * column_stride
        token = first.to(tl.int64)
        x = tl.load(qkv_ptr + token * qkv_stride + channel, mask=here, other=0.0)
        z = tl.load(z_ptr + token * z_stride + head * D + e - 3 * D, mask=part == 3, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * beta_stride + head)
        for j in tl.range(0, count):
            target = tl.load(slot_at + j * slot_column_stride).to(tl.int64)
            gate = tl.load(gate_ptr + token * gate_stride + head * D + c).to(tl.float32)
            y = w0 * h0 + w1 * h1 + w2 * h2 + w3 * x.to(tl.float32)
            y = _activate(y, z, rate, bias, lower_bound, here, x.dtype, BOUNDED)
            tl.store(new_at, x, mask=here)
            new_at += column_stride
            h0 = h1
            h1 = h2
            h2 = x.to(tl.float32)
            now = beta
            out_at = out_ptr + token * out_stride + head * D + c
            # The next token's inputs travel while this one is computed.
            token = (first + tl.minimum(j + 1, count - 1)).to(tl.int64)
            x = tl.load(qkv_ptr + token * qkv_stride + channel, mask=here, other=0.0)
            z = tl.load(z_ptr + token * z_stride + head * D + e - 3 * D, mask=part == 3, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + token * beta_stride + head)
            S, o = _token(S, y, now, D)
            if target > 0:
                tl.store(state_ptr + target * state_stride + tile, S.to(state_ptr.dtype.element_ty))
            tl.store(out_at, _norm(o, norm, gate, eps, D).to(out_ptr.dtype.element_ty))
