"""KDA verification in Triton: a kernel for the states, token by token, and one for norm and conv state.

The first holds a block of BV value rows in registers over 1 + n tokens, a state written after every token; the second
is launched while the first runs, fetches what it can and waits. All blocks of the first have read the conv state by
then. Formulas and safety: kda_step.
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
from k3_nvidia.kernels.kda_token import _block_step, _inner, _zero_rows

#: Arguments that change from call to call without another variant.
_FREE = ["slot_stride", "slot_column_stride", "tokens", "padded_rows"]
_ANY_ALIGNMENT = ["slot_ptr", "beta_ptr", "accepted_ptr", "cu_ptr"]


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def kda_verify_kernel(
    qkv_ptr, z_ptr, beta_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, conv_ptr, state_ptr,
    slot_ptr, accepted_ptr, cu_ptr, o_ptr, lower_bound,
    qkv_stride, z_stride, beta_stride, weight_stride,
    conv_stride, channel_stride, column_stride, state_stride, slot_stride, slot_column_stride,
    BOUNDED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (D / BV, heads, sequences): states of every token and o fp32 [T, H, D] before the norm.

    PDL: the finish kernel may be launched meanwhile. This one itself starts after all before it.
    """
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    slot_at = slot_ptr + row.to(tl.int64) * slot_stride
    slot = tl.load(slot_at).to(tl.int64)
    first = tl.load(cu_ptr + row)
    count = tl.load(cu_ptr + row + 1) - first
    if (slot > 0) & (count > 0):
        column0 = (tl.load(accepted_ptr + row) - 1).to(tl.int64)
        source = tl.load(slot_at + column0 * slot_column_stride).to(tl.int64)
        c = tl.arange(0, D)
        r = block * BV + tl.arange(0, BV)
        tile = head * (D * D) + r[:, None] * D + c[None, :]
        S = tl.load(state_ptr + source * state_stride + tile).to(tl.float32)
        e = tl.arange(0, 4 * D)
        part = e // D
        channel = (part * H + head) * D + e % D
        here = part < 3
        conv_at = conv_ptr + slot * conv_stride + channel.to(tl.int64) * channel_stride + column0 * column_stride
        w_at = weight_ptr + channel.to(tl.int64) * weight_stride
        h0 = tl.load(conv_at, mask=here, other=0.0).to(tl.float32)
        h1 = tl.load(conv_at + column_stride, mask=here, other=0.0).to(tl.float32)
        h2 = tl.load(conv_at + 2 * column_stride, mask=here, other=0.0).to(tl.float32)
        w0 = tl.load(w_at, mask=here, other=0.0)
        w1 = tl.load(w_at + 1, mask=here, other=0.0)
        w2 = tl.load(w_at + 2, mask=here, other=0.0)
        w3 = tl.load(w_at + 3, mask=here, other=0.0)
        bias = tl.load(dt_bias_ptr + head * D + e - 3 * D, mask=part == 3, other=0.0)
        rate = tl.exp(tl.load(a_log_ptr + head))
        token = first.to(tl.int64)
        x = tl.load(qkv_ptr + token * qkv_stride + channel, mask=here, other=0.0)
        z = tl.load(z_ptr + token * z_stride + head * D + e - 3 * D, mask=part == 3, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * beta_stride + head)
        for j in tl.range(0, count):
            target = tl.load(slot_at + j * slot_column_stride).to(tl.int64)
            y = w0 * h0 + w1 * h1 + w2 * h2 + w3 * x.to(tl.float32)
            y = (y * sigmoid(y)).to(x.dtype).to(tl.float32)
            y = tl.where(here, y, tl.exp2(gate_log2(z, rate, bias, lower_bound, BOUNDED)))
            h0 = h1
            h1 = h2
            h2 = x.to(tl.float32)
            now = beta
            o_at = o_ptr + (token * H + head) * D + r
            # The next token's inputs travel while this one is computed.
            token = (first + tl.minimum(j + 1, count - 1)).to(tl.int64)
            x = tl.load(qkv_ptr + token * qkv_stride + channel, mask=here, other=0.0)
            z = tl.load(z_ptr + token * z_stride + head * D + e - 3 * D, mask=part == 3, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + token * beta_stride + head)
            q = tl.gather(y, c, 0)
            k = tl.gather(y, c + D, 0)
            decay = tl.gather(y, c + 3 * D, 0)
            v = tl.gather(y, r + 2 * D, 0)
            rq = tl.rsqrt(_inner(q, q) + 1e-6) * (D**-0.5)
            rk = tl.rsqrt(_inner(k, k) + 1e-6)
            S, o = _block_step(S, q, k, v, decay, now, rq, rk, _inner(k, q))
            if target > 0:
                tl.store(state_ptr + target * state_stride + tile, S.to(state_ptr.dtype.element_ty))
            tl.store(o_at, o)


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
def kda_verify_finish_kernel(
    qkv_ptr, gate_ptr, norm_ptr, conv_ptr, slot_ptr, accepted_ptr, cu_ptr, o_ptr, out_ptr, eps,
    qkv_stride, gate_stride, out_stride, conv_stride, channel_stride, column_stride, slot_stride, tokens, padded_rows,
    H: tl.constexpr, D: tl.constexpr, QP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows): norm of o, new conv columns, zeros in padding. QP: a power of two >= 1 + num_spec.

    PDL: launched while kda_verify_kernel runs; before the wait it reads only what that does not write.
    """
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


_states = Launcher(kda_verify_kernel)
_finish = Launcher(kda_verify_finish_kernel)


def launch(
    options: dict[str, Any], qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor,
    dt_bias: Tensor, lower_bound: float | None, norm_weight: Tensor, eps: float, conv_state: Tensor, pool: Tensor,
    slots: Tensor, accepted: Tensor, cu: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Both kernels; arguments as kda_verify and checked there, options of an entry of tuning/kda.json."""
    tokens, heads, dim = z.shape
    rows, columns = slots.shape
    o = torch.empty(tokens, heads, dim, dtype=torch.float32, device=z.device)
    _states(
        (dim // options["BV"], heads, rows),
        qkv, z, beta, conv_weight, a_log, dt_bias, conv_state, pool, slots, accepted, cu, o, float(lower_bound or 0.0),
        *(checks.row_stride(x) for x in (qkv, z, beta, conv_weight)),
        *conv_state.stride(), pool.stride(0), *slots.stride(),
        BOUNDED=lower_bound is not None, H=heads, D=dim, **options,
    )  # fmt: skip
    overlap = {"launch_pdl": True} if options["PDL"] else {}
    _finish(
        (heads, rows),
        qkv, gate, norm_weight, conv_state, slots, accepted, cu, o, out, eps,
        *(checks.row_stride(x) for x in (qkv, gate, out)), *conv_state.stride(), slots.stride(0), tokens, rows,
        H=heads, D=dim, QP=triton.next_power_of_2(columns), PDL=options["PDL"], num_warps=4, **overlap,
    )  # fmt: skip
