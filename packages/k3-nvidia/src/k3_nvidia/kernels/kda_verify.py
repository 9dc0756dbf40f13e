"""KDA verification as a chain: inputs of all tokens, then the states token by token, then norm and conv state.

What a token needs besides the state (convolution, gate, norms of q and k) does not depend on the token before it, so it
is computed for all 1 + n tokens at once and handed over through memory; the loop over tokens is left with two
reductions, an update and a store. 1.5 KiB a token and head go through the L2 for 64 KiB of state.

whole  one program a (row, head): all three parts in turn, a barrier between; the head's state stays in registers.
chain  three kernels: inputs (heads, rows), states (blocks of value rows, heads, rows), finish (heads, rows). The later
       two are launched while the one before runs: they fetch what it does not write, then wait for it. The states
       kernel fetches its states meanwhile; that is safe because the inputs kernel itself starts after all before it.

Arithmetic is that of kda_step's form with one kernel a token, in the same order.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators.triton_host import Launcher
from k3_nvidia.kernels import kda_checks as checks
from k3_nvidia.kernels.kda_math import gate_log2, sigmoid
from k3_nvidia.kernels.kda_token import _block_step, _zero_rows

#: Arguments that change from call to call without another variant.
_FREE = ["slot_stride", "slot_column_stride", "tokens", "padded_rows"]
_ANY_ALIGNMENT = ["slot_ptr", "beta_ptr", "accepted_ptr", "cu_ptr"]


@triton.jit
def _row(slot_ptr, accepted_ptr, cu_ptr, row, slot_stride):
    """(address of the row's slots, its first slot, first token, tokens, accepted - 1)."""
    slot_at = slot_ptr + row.to(tl.int64) * slot_stride
    slot = tl.load(slot_at).to(tl.int64)
    first = tl.load(cu_ptr + row)
    count = tl.load(cu_ptr + row + 1) - first
    column0 = (tl.load(accepted_ptr + row) - 1).to(tl.int64)
    return slot_at, slot, first, count, column0


@triton.jit
def _convolved(
    qkv_ptr, weight_ptr, conv_at, channel, first, j, mask, qkv_stride, weight_stride, channel_stride, column_stride
):
    """silu(convolution) of some channels, all tokens of a row: [tokens, channels], rounded as the activations are."""
    w_at = weight_ptr + channel.to(tl.int64) * weight_stride
    at = conv_at + channel.to(tl.int64) * channel_stride
    y = tl.zeros([j.shape[0], channel.shape[1]], dtype=tl.float32)
    for n in tl.static_range(4):
        source = j - (3 - n)
        here = mask & (source >= 0)
        x = tl.load(qkv_ptr + (first + source).to(tl.int64) * qkv_stride + channel, mask=here, other=0.0)
        if n < 3:
            old = mask & (source < 0)
            h = tl.load(at + (source + 3).to(tl.int64) * column_stride, mask=old, other=0.0)
            x = tl.where(here, x, h)
        y += tl.load(w_at + n) * x.to(tl.float32)
    return (y * sigmoid(y)).to(qkv_ptr.dtype.element_ty)


@triton.jit
def _inputs(
    qkv_ptr, z_ptr, beta_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, conv_at, mixed_ptr, decay_ptr, scalar_ptr,
    head, first, count, lower_bound, qkv_stride, z_stride, beta_stride, weight_stride, channel_stride, column_stride,
    BOUNDED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, QP: tl.constexpr,
):  # fmt: skip
    """q | k | v of a row and head [T, H, 3, D], decays fp32 [T, H, D], beta, rq, rk, k . q fp32 [T, H, 4]."""
    j = tl.arange(0, QP)[:, None]
    c = tl.arange(0, D)[None, :]
    mask = j < count
    at = (first + j).to(tl.int64) * H + head
    wide = mask & (c < D)
    q = _convolved(
        qkv_ptr, weight_ptr, conv_at, head * D + c, first, j, wide, qkv_stride, weight_stride, channel_stride,
        column_stride,
    )  # fmt: skip
    k = _convolved(
        qkv_ptr, weight_ptr, conv_at, (H + head) * D + c, first, j, wide, qkv_stride, weight_stride, channel_stride,
        column_stride,
    )  # fmt: skip
    v = _convolved(
        qkv_ptr, weight_ptr, conv_at, (2 * H + head) * D + c, first, j, wide, qkv_stride, weight_stride,
        channel_stride, column_stride,
    )  # fmt: skip
    tl.store(mixed_ptr + at * (3 * D) + c, q, mask=wide)
    tl.store(mixed_ptr + at * (3 * D) + D + c, k, mask=wide)
    tl.store(mixed_ptr + at * (3 * D) + 2 * D + c, v, mask=wide)
    rate = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head * D + c)
    z = tl.load(z_ptr + (first + j).to(tl.int64) * z_stride + head * D + c, mask=wide, other=0.0).to(tl.float32)
    tl.store(decay_ptr + at * D + c, tl.exp2(gate_log2(z, rate, bias, lower_bound, BOUNDED)), mask=wide)
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    t = tl.arange(0, QP)
    inside = t < count
    to = scalar_ptr + ((first + t).to(tl.int64) * H + head) * 4
    beta = tl.load(beta_ptr + (first + t).to(tl.int64) * beta_stride + head, mask=inside, other=0.0)
    tl.store(to, beta, mask=inside)
    tl.store(to + 1, tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6) * (D**-0.5), mask=inside)
    tl.store(to + 2, tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6), mask=inside)
    tl.store(to + 3, tl.sum(k * q, axis=1), mask=inside)


@triton.jit
def _operands(mixed_ptr, decay_ptr, scalar_ptr, at, c, r, D: tl.constexpr):
    """q, k, v, decay, beta, rq, rk, k . q of the token and head at `at`, as they are in memory."""
    m = mixed_ptr + at * (3 * D)
    s = scalar_ptr + at * 4
    return (
        tl.load(m + c), tl.load(m + D + c), tl.load(m + 2 * D + r), tl.load(decay_ptr + at * D + c),
        tl.load(s), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3),
    )  # fmt: skip


@triton.jit
def _states(
    S, mixed_ptr, decay_ptr, scalar_ptr, o_ptr, state_ptr, slot_at, head, first, count, r,
    state_stride, slot_column_stride, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Value rows r of a head over `count` >= 1 tokens: states to their slots, o fp32 [T, H, D]."""
    c = tl.arange(0, D)
    tile = head * (D * D) + r[:, None] * D + c[None, :]
    at = first.to(tl.int64) * H + head
    q, k, v, decay, beta, rq, rk, kq = _operands(mixed_ptr, decay_ptr, scalar_ptr, at, c, r, D)
    target = tl.load(slot_at).to(tl.int64)
    for n in tl.range(0, count):
        o_at = o_ptr + at * D + r
        now_target = target
        now_q = q.to(tl.float32)
        now_k = k.to(tl.float32)
        now_v = v.to(tl.float32)
        now_decay = decay
        now_beta = beta
        now_rq = rq
        now_rk = rk
        now_kq = kq
        # The next token's operands travel while this one is computed.
        later = tl.minimum(n + 1, count - 1)
        at = (first + later).to(tl.int64) * H + head
        q, k, v, decay, beta, rq, rk, kq = _operands(mixed_ptr, decay_ptr, scalar_ptr, at, c, r, D)
        target = tl.load(slot_at + later * slot_column_stride).to(tl.int64)
        S, o = _block_step(S, now_q, now_k, now_v, now_decay, now_beta, now_rq, now_rk, now_kq)
        if now_target > 0:
            tl.store(state_ptr + now_target * state_stride + tile, S.to(state_ptr.dtype.element_ty))
        tl.store(o_at, o)


@triton.jit
def _padding(out_ptr, slot, first, count, last, row, tokens, padded_rows, out_stride, head, D: tl.constexpr):
    """Zeros in this row's share of the rows past the last sequence, and in a null row's own."""
    for t in tl.range(0, tokens - last - row, padded_rows):
        _zero_rows(out_ptr, last + row + t, 1, out_stride, head, D)
    if slot <= 0:
        _zero_rows(out_ptr, first, count, out_stride, head, D)


@triton.jit
def _normed(o_ptr, out_ptr, at, to, gate, norm, mask, eps, D: tl.constexpr):
    """rms_norm(o) * weight * sigmoid(gate) of all tokens of a row and head."""
    o = tl.load(o_ptr + at, mask=mask, other=0.0)
    o = o * tl.rsqrt(tl.sum(o * o, axis=1) * (1.0 / D) + eps)[:, None] * norm * sigmoid(gate)
    tl.store(out_ptr + to, o.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _shifted(
    qkv_ptr, conv_at, head, first, count, column0, qkv_stride, channel_stride, column_stride,
    H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The row's conv state: the two columns before the first token, then the inputs of its tokens."""
    e = tl.arange(0, 4 * D)
    channel = (e // D * H + head) * D + e % D
    here = e < 3 * D
    at = conv_at + channel.to(tl.int64) * channel_stride
    h1 = tl.load(at + (column0 + 1) * column_stride, mask=here, other=0.0)
    h2 = tl.load(at + (column0 + 2) * column_stride, mask=here, other=0.0)
    # A thread moves its own channels; where the vector is shorter than the block, copies of it must have read.
    if D < 128:
        tl.debug_barrier()
    tl.store(at, h1, mask=here)
    tl.store(at + column_stride, h2, mask=here)
    for n in tl.range(0, count):
        x = tl.load(qkv_ptr + (first + n).to(tl.int64) * qkv_stride + channel, mask=here, other=0.0)
        tl.store(at + (n + 2) * column_stride, x, mask=here)


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def kda_verify_whole_kernel(
    qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_ptr, state_ptr,
    slot_ptr, accepted_ptr, cu_ptr, mixed_ptr, decay_ptr, scalar_ptr, o_ptr, out_ptr, lower_bound, eps,
    qkv_stride, z_stride, beta_stride, gate_stride, out_stride, weight_stride,
    conv_stride, channel_stride, column_stride, state_stride, slot_stride, slot_column_stride, tokens, padded_rows,
    BOUNDED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, QP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). QP: a power of two >= 1 + num_spec. Nothing is read before the wait, as in decode."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot_at, slot, first, count, column0 = _row(slot_ptr, accepted_ptr, cu_ptr, row, slot_stride)
    last = tl.load(cu_ptr + padded_rows)
    _padding(out_ptr, slot, first, count, last, row, tokens, padded_rows, out_stride, head, D)
    if (slot > 0) & (count > 0):
        source = tl.load(slot_at + column0 * slot_column_stride).to(tl.int64)
        r = tl.arange(0, D)
        c = tl.arange(0, D)
        S = tl.load(state_ptr + source * state_stride + head * (D * D) + r[:, None] * D + c[None, :])
        conv_at = conv_ptr + slot * conv_stride
        _inputs(
            qkv_ptr, z_ptr, beta_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, conv_at + column0 * column_stride,
            mixed_ptr, decay_ptr, scalar_ptr, head, first, count, lower_bound,
            qkv_stride, z_stride, beta_stride, weight_stride, channel_stride, column_stride, BOUNDED, H, D, QP,
        )  # fmt: skip
        j = tl.arange(0, QP)[:, None]
        mask = (j < count) & (c[None, :] < D)
        token = (first + j).to(tl.int64)
        gate = tl.load(gate_ptr + token * gate_stride + head * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + c).to(tl.float32)[None, :]
        tl.debug_barrier()
        _states(
            S.to(tl.float32), mixed_ptr, decay_ptr, scalar_ptr, o_ptr, state_ptr, slot_at, head, first, count, r,
            state_stride, slot_column_stride, H, D,
        )  # fmt: skip
        tl.debug_barrier()
        _normed(
            o_ptr, out_ptr, (token * H + head) * D + c[None, :], token * out_stride + head * D + c[None, :], gate, norm,
            mask, eps, D,
        )  # fmt: skip
        _shifted(qkv_ptr, conv_at, head, first, count, column0, qkv_stride, channel_stride, column_stride, H, D)


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def kda_verify_inputs_kernel(
    qkv_ptr, z_ptr, beta_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, conv_ptr, slot_ptr, accepted_ptr, cu_ptr,
    mixed_ptr, decay_ptr, scalar_ptr, lower_bound,
    qkv_stride, z_stride, beta_stride, weight_stride, conv_stride, channel_stride, column_stride, slot_stride,
    BOUNDED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, QP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). Launched without overlap: all before it is complete when the states kernel may start."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    _, slot, first, count, column0 = _row(slot_ptr, accepted_ptr, cu_ptr, row, slot_stride)
    if (slot > 0) & (count > 0):
        _inputs(
            qkv_ptr, z_ptr, beta_ptr, weight_ptr, a_log_ptr, dt_bias_ptr,
            conv_ptr + slot * conv_stride + column0 * column_stride, mixed_ptr, decay_ptr, scalar_ptr, head, first,
            count, lower_bound, qkv_stride, z_stride, beta_stride, weight_stride, channel_stride, column_stride,
            BOUNDED, H, D, QP,
        )  # fmt: skip


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def kda_verify_states_kernel(
    mixed_ptr, decay_ptr, scalar_ptr, o_ptr, state_ptr, slot_ptr, accepted_ptr, cu_ptr,
    state_stride, slot_stride, slot_column_stride,
    H: tl.constexpr, D: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (D / BV, heads, rows). Every program waits: the kernel after this one counts on the one before it too."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    slot_at, slot, first, count, column0 = _row(slot_ptr, accepted_ptr, cu_ptr, row, slot_stride)
    here = (slot > 0) & (count > 0)
    source = tl.load(slot_at + tl.where(here, column0, 0) * slot_column_stride).to(tl.int64)
    r = block * BV + tl.arange(0, BV)
    tile = head * (D * D) + r[:, None] * D + tl.arange(0, D)[None, :]
    S = tl.load(state_ptr + source * state_stride + tile, mask=r[:, None] < tl.where(here, D, 0), other=0.0)
    if PDL:
        gdc_wait()
    if here:
        _states(
            S.to(tl.float32), mixed_ptr, decay_ptr, scalar_ptr, o_ptr, state_ptr, slot_at, head, first, count, r,
            state_stride, slot_column_stride, H, D,
        )  # fmt: skip


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def kda_verify_finish_kernel(
    qkv_ptr, gate_ptr, norm_ptr, conv_ptr, slot_ptr, accepted_ptr, cu_ptr, o_ptr, out_ptr, eps,
    qkv_stride, gate_stride, out_stride, conv_stride, channel_stride, column_stride, slot_stride, tokens, padded_rows,
    H: tl.constexpr, D: tl.constexpr, QP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows): norm of o, new conv columns, zeros in padding. Before the wait it reads only arguments."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    _, slot, first, count, column0 = _row(slot_ptr, accepted_ptr, cu_ptr, row, slot_stride)
    last = tl.load(cu_ptr + padded_rows)
    c = tl.arange(0, D)
    j = tl.arange(0, QP)[:, None]
    mask = (j < tl.where(slot > 0, count, 0)) & (c[None, :] < D)
    token = (first + j).to(tl.int64)
    gate = tl.load(gate_ptr + token * gate_stride + head * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + c).to(tl.float32)[None, :]
    if PDL:
        gdc_wait()
    _padding(out_ptr, slot, first, count, last, row, tokens, padded_rows, out_stride, head, D)
    if (slot > 0) & (count > 0):
        _normed(
            o_ptr, out_ptr, (token * H + head) * D + c[None, :], token * out_stride + head * D + c[None, :], gate, norm,
            mask, eps, D,
        )  # fmt: skip
        _shifted(
            qkv_ptr, conv_ptr + slot * conv_stride, head, first, count, column0, qkv_stride, channel_stride,
            column_stride, H, D,
        )  # fmt: skip


whole = Launcher(kda_verify_whole_kernel)
inputs = Launcher(kda_verify_inputs_kernel)
states = Launcher(kda_verify_states_kernel)
finish = Launcher(kda_verify_finish_kernel)


def launch(
    form: str, options: dict[str, Any], qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, conv_weight: Tensor,
    a_log: Tensor, dt_bias: Tensor, lower_bound: float | None, norm_weight: Tensor, eps: float, conv_state: Tensor,
    pool: Tensor, slots: Tensor, accepted: Tensor, cu: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Arguments as kda_verify and checked there; form: "whole" or "chain"; options of an entry of tuning/kda.json."""
    tokens, heads, dim = z.shape
    rows, columns = slots.shape
    floats = torch.empty(2 * dim + 4, tokens * heads, dtype=torch.float32, device=z.device)
    decay, o, scalar = floats[:dim], floats[dim : 2 * dim], floats[2 * dim :]
    mixed = torch.empty(tokens * heads, 3 * dim, dtype=qkv.dtype, device=z.device)
    overlap = options["PDL"]
    bound = float(lower_bound or 0.0)
    same = {"BOUNDED": lower_bound is not None, "H": heads, "D": dim, "QP": triton.next_power_of_2(columns)}
    strides = [checks.row_stride(x) for x in (qkv, z, beta, gate, out, conv_weight)]
    if form == "whole":
        whole(
            (heads, rows),
            qkv, z, beta, gate, conv_weight, a_log, dt_bias, norm_weight, conv_state, pool,
            slots, accepted, cu, mixed, decay, scalar, o, out, bound, eps,
            *strides, *conv_state.stride(), pool.stride(0), *slots.stride(), tokens, rows,
            **same, PDL=overlap, **({"launch_pdl": True} if overlap else {}), num_warps=options["num_warps"],
        )  # fmt: skip
        return
    inputs(
        (heads, rows),
        qkv, z, beta, conv_weight, a_log, dt_bias, conv_state, slots, accepted, cu, mixed, decay, scalar, bound,
        *strides[:3], strides[5], *conv_state.stride(), slots.stride(0),
        **same, PDL=overlap, num_warps=4,
    )  # fmt: skip
    later = {"launch_pdl": True} if overlap else {}
    rest = {k: v for k, v in options.items() if k != "PDL"}
    states(
        (dim // rest["BV"], heads, rows),
        mixed, decay, scalar, o, pool, slots, accepted, cu, pool.stride(0), *slots.stride(),
        H=heads, D=dim, PDL=overlap, **later, **rest,
    )  # fmt: skip
    finish(
        (heads, rows),
        qkv, gate, norm_weight, conv_state, slots, accepted, cu, o, out, eps,
        strides[0], strides[3], strides[4], *conv_state.stride(), slots.stride(0), tokens, rows,
        H=heads, D=dim, QP=same["QP"], PDL=overlap, **later, num_warps=4,
    )  # fmt: skip
