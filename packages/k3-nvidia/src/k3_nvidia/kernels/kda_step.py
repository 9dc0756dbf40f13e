"""KDA decode and verification in one kernel: convolution, SiLU, gate, recurrence, gated norm, both states.

A program owns one head of one row and keeps its whole state [V, K] in registers: one read and, per token, one write of
64 KiB, which is all the traffic that matters (the other operands are under 3 % of it). The state loads are issued
first; the convolution and the gate run while they are in flight. Both reductions over K are taken before the update,

    e = v - S' k,  u = beta e,  S = S' + u k^T,  o = S' q + u (k . q)        with S' = S diag(exp g),

so they don't wait for each other. Rows of V never meet except in the norm, where all of a head is in the program.

Verification runs the same step over 1 + n tokens: start slot and conv column from the accepted count, a state written
after every token. Null and padding rows (slot <= 0) write zeros and touch no state. Offsets are 64 bit.

Formulas: k3_core.contracts.kda; slots and columns of verification: the operator table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec
from k3_nvidia.kernels import kda_checks as checks
from k3_nvidia.kernels.kda_math import gate_log2, sigmoid
from k3_nvidia.tuning import kda as tuning


@triton.jit(do_not_specialize=["slot_stride", "slot_column_stride", "tokens", "padded_rows"])
def kda_step_kernel(
    qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_ptr, state_ptr,
    slot_ptr, accepted_ptr, cu_ptr, out_ptr, lower_bound, eps,
    qkv_stride, z_stride, beta_stride, gate_stride, out_stride, weight_stride,
    conv_stride, channel_stride, column_stride, state_stride, slot_stride, slot_column_stride, tokens, padded_rows,
    BOUNDED: tl.constexpr, VERIFY: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). Decode: row = token. Verify: row = sequence, tokens cu[row]..cu[row + 1]."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    c = tl.arange(0, D)
    slot_at = slot_ptr + row.to(tl.int64) * slot_stride
    slot = tl.load(slot_at).to(tl.int64)
    source = slot
    column0 = 0
    first = row
    count = 1
    if VERIFY:
        first = tl.load(cu_ptr + row)
        count = tl.load(cu_ptr + row + 1) - first
        last = tl.load(cu_ptr + padded_rows)
        for t in tl.range(0, tokens - last - row, padded_rows):
            at = (last + row + t).to(tl.int64) * out_stride + head * D + c
            tl.store(out_ptr + at, tl.zeros([D], dtype=out_ptr.dtype.element_ty))
    if slot <= 0:
        for t in tl.range(0, count):
            at = (first + t).to(tl.int64) * out_stride + head * D + c
            tl.store(out_ptr + at, tl.zeros([D], dtype=out_ptr.dtype.element_ty))
    elif count > 0:
        if VERIFY:
            column0 = tl.load(accepted_ptr + row) - 1
            source = tl.load(slot_at + column0.to(tl.int64) * slot_column_stride).to(tl.int64)
        tile = c[:, None] * D + c[None, :]
        S = tl.load(state_ptr + (source * state_stride + head * (D * D)) + tile).to(tl.float32)
        # q | k | v | z of this head as one flat vector: each element is loaded by one thread, and `gather` hands the
        # parts to the layouts of the state. Loads written per part would be repeated by every thread that uses them.
        e = tl.arange(0, 4 * D)
        part = e // D
        channel = (part * H + head) * D + e % D
        here = part < 3
        w_at = weight_ptr + channel.to(tl.int64) * weight_stride
        w0 = tl.load(w_at, mask=here, other=0.0)
        w1 = tl.load(w_at + 1, mask=here, other=0.0)
        w2 = tl.load(w_at + 2, mask=here, other=0.0)
        w3 = tl.load(w_at + 3, mask=here, other=0.0)
        conv_at = conv_ptr + slot * conv_stride + channel.to(tl.int64) * channel_stride
        old_at = conv_at
        if VERIFY:
            old_at = conv_at + column0.to(tl.int64) * column_stride
        h0 = tl.load(old_at, mask=here, other=0.0)
        h1 = tl.load(old_at + column_stride, mask=here, other=0.0)
        h2 = tl.load(old_at + 2 * column_stride, mask=here, other=0.0)
        rate = tl.exp(tl.load(a_log_ptr + head))
        fixed = tl.load(dt_bias_ptr + head * D + e, mask=part == 0, other=0.0)
        fixed += tl.load(norm_ptr + e - D, mask=part == 1, other=0.0).to(tl.float32)
        bias = tl.gather(fixed, c, 0)
        norm = tl.gather(fixed, c + D, 0)
        if VERIFY:
            # Threads may share these columns: nobody overwrites one that another has still to read.
            tl.debug_barrier()
        tl.store(conv_at, h1, mask=here)
        tl.store(conv_at + column_stride, h2, mask=here)
        new_at = conv_at + 2 * column_stride
        for j in tl.range(0, count):
            token = (first + j).to(tl.int64)
            x = tl.load(qkv_ptr + token * qkv_stride + channel, mask=here, other=0.0)
            z = tl.load(z_ptr + token * z_stride + head * D + e - 3 * D, mask=part == 3, other=0.0)
            gate = tl.load(gate_ptr + token * gate_stride + head * D + e, mask=part == 0, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + token * beta_stride + head)
            y = w0 * h0.to(tl.float32) + w1 * h1.to(tl.float32) + w2 * h2.to(tl.float32) + w3 * x.to(tl.float32)
            # Rounded like the tensor that the separate convolution writes.
            y = (y * sigmoid(y)).to(x.dtype).to(tl.float32) + z.to(tl.float32)
            tl.store(new_at, x, mask=here)
            if VERIFY:
                new_at += column_stride
                h0 = h1
                h1 = h2
                h2 = x
            q = tl.gather(y, c, 0)
            k = tl.gather(y, c + D, 0)
            v = tl.gather(y, c + 2 * D, 0)
            z = tl.gather(y, c + 3 * D, 0)
            q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (D**-0.5))
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
            kq = tl.sum(k * q, axis=0)
            S = S * tl.exp2(gate_log2(z, rate, bias, lower_bound, BOUNDED))[None, :]
            u = beta * (v - tl.sum(S * k[None, :], axis=1))
            o = tl.sum(S * q[None, :], axis=1) + u * kq
            S = S + u[:, None] * k[None, :]
            target = slot
            if VERIFY:
                target = tl.load(slot_at + j * slot_column_stride).to(tl.int64)
            if target > 0:
                tl.store(state_ptr + (target * state_stride + head * (D * D)) + tile, S.to(state_ptr.dtype.element_ty))
            o = o * tl.rsqrt(tl.sum(o * o, axis=0) * (1.0 / D) + eps) * norm * sigmoid(tl.gather(gate, c, 0))
            tl.store(out_ptr + token * out_stride + head * D + c, o.to(out_ptr.dtype.element_ty))


_FLOATS = (torch.bfloat16, torch.float32)


def supports_step(spec: CallSpec) -> tuple[bool, str]:
    """kda_decode and kda_verify: any head count, both conv layouts, fp32 or bf16 state."""
    return checks.supports(spec, _FLOATS)


def kda_decode(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    o_norm_weight: Tensor,
    o_norm_eps: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Operator kda_decode of the table. One launch, no host wait: safe inside a CUDA graph.

    Raises ValueError for shapes and UnsupportedError for dtypes or strides it has no code for.
    """
    out = _check_step("kda_decode", qkv, z, beta, gate, conv_weight, a_log, dt_bias, o_norm_weight, conv_state,
                      recurrent_state, 3, out)  # fmt: skip
    checks.check_index("kda_decode", "slot_mapping", slot_mapping, (qkv.shape[0],))
    if qkv.shape[0]:
        _launch(qkv, z, beta, gate, conv_weight, a_log, dt_bias, lower_bound, o_norm_weight, o_norm_eps, conv_state,
                recurrent_state, slot_mapping, None, None, out)  # fmt: skip
    return out


def kda_verify(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    o_norm_weight: Tensor,
    o_norm_eps: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    num_accepted: Tensor,
    cu_seqlens: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Operator kda_verify of the table. One launch, no host wait: safe inside a CUDA graph.

    Raises as kda_decode. Token and accepted counts are device data: that they fit the slots is the caller's promise.
    """
    op = "kda_verify"
    rows, columns = slot_mapping.shape
    out = _check_step(op, qkv, z, beta, gate, conv_weight, a_log, dt_bias, o_norm_weight, conv_state, recurrent_state,
                      columns + 2, out)  # fmt: skip
    checks.check_index(op, "slot_mapping", slot_mapping, (rows, columns))
    checks.check_vector(op, "num_accepted", num_accepted, (rows,), torch.int32)
    checks.check_vector(op, "cu_seqlens", cu_seqlens, (rows + 1,), torch.int32)
    if rows == 0:
        return out.zero_()
    _launch(qkv, z, beta, gate, conv_weight, a_log, dt_bias, lower_bound, o_norm_weight, o_norm_eps, conv_state,
            recurrent_state, slot_mapping, num_accepted, cu_seqlens, out)  # fmt: skip
    return out


def _check_step(
    op: str, qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    o_norm_weight: Tensor, conv_state: Tensor, recurrent_state: Tensor, columns: int, out: Tensor | None,
) -> Tensor:  # fmt: skip
    if z.dim() != 3 or z.shape[2] not in checks.HEAD_DIMS:
        raise UnsupportedError(f"{op}: z must be [T, N, D] with D in {checks.HEAD_DIMS}, got {tuple(z.shape)}")
    tokens, heads, dim = z.shape
    channels = 3 * heads * dim
    checks.check_rows(op, "qkv", qkv, (tokens, channels), _FLOATS)
    checks.check_rows(op, "z", z, (tokens, heads, dim), _FLOATS)
    checks.check_rows(op, "gate", gate, (tokens, heads, dim), _FLOATS)
    checks.check_rows(op, "beta", beta, (tokens, heads), (torch.float32,))
    checks.check_vector(op, "conv_weight", conv_weight, (channels, checks.TAPS), torch.float32)
    checks.check_vector(op, "a_log", a_log, (heads,), torch.float32)
    checks.check_vector(op, "dt_bias", dt_bias, (heads, dim), torch.float32)
    checks.check_vector(op, "o_norm_weight", o_norm_weight, (dim,), None)
    checks.check_conv_state(op, conv_state, channels, columns, qkv.dtype)
    checks.check_state(op, recurrent_state, heads, dim)
    if out is None:
        return torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    checks.check_rows(op, "out", out, (tokens, heads, dim), _FLOATS)
    return out


def _launch(
    qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, o_norm_weight: Tensor, o_norm_eps: float, conv_state: Tensor, recurrent_state: Tensor,
    slots: Tensor, num_accepted: Tensor | None, cu_seqlens: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    tokens, heads, dim = z.shape
    rows = slots.shape[0]
    verify = num_accepted is not None
    kda_step_kernel[(heads, rows)](
        qkv, z, beta, gate, conv_weight, a_log, dt_bias, o_norm_weight, conv_state, recurrent_state,
        slots, num_accepted if verify else slots, cu_seqlens if verify else slots, out,
        float(lower_bound or 0.0), o_norm_eps,
        *(checks.row_stride(x) for x in (qkv, z, beta, gate, out, conv_weight)),
        *conv_state.stride(), recurrent_state.stride(0), slots.stride(0), slots.stride(1) if verify else 0,
        tokens, rows,
        BOUNDED=lower_bound is not None, VERIFY=verify, H=heads, D=dim, **tuning.launch("verify" if verify else "step"),
    )  # fmt: skip
