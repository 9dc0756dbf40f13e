"""KDA decode and verification: convolution, then gate and recurrence over a block of the state, then the gated norm.

Three launches. The convolution and the norm run over all channels of a row, as wide as the unified buffer likes; the
recurrence takes one (sequence, head, block of BV value rows), reads the block of the state once, walks over the tokens
and writes the block after every token. Per token, with S [BV, K]:

    S' = S diag(exp g)      u = beta (v - S' k)      S = S' + u k^T      o = S q

Null and padding rows (slot <= 0) touch no state; their output is zero because the scratch between recurrence and norm
starts from zeros. No wait for the device: safe under graph capture.

Formulas: `k3_core.contracts.kda`; slots and columns of verification: the operator table.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_ascend.kernels import checks, warmup
from k3_ascend.kernels.device import gate as log_decay
from k3_ascend.kernels.gated_norm import gated_norm
from k3_ascend.kernels.launch import launch, programs_for
from k3_ascend.kernels.short_conv import check_taps, step_conv
from k3_core.operators import CallSpec

#: Value rows a program: a quarter of the state of a head at D = 128.
BLOCK = 32
FLOATS = (torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["slot_stride", "slot_column_stride", "sequences"])
def kda_recurrent_kernel(
    qkv_ptr, z_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, state_ptr, slot_ptr, accepted_ptr, cu_ptr, o_ptr,
    lower_bound, qkv_stride, z_stride, beta_stride, state_stride, slot_stride, slot_column_stride, sequences,
    BOUNDED: tl.constexpr, VERIFY: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Items (sequence, head, value block); qkv after the convolution, o_ptr fp32 [T, N, D] that holds zeros."""
    PARTS: tl.constexpr = D // BV
    d = tl.arange(0, D)
    r = tl.arange(0, BV)
    for item in range(tl.program_id(0), sequences * N * PARTS, tl.num_programs(0)):
        part = item % PARTS
        head = (item // PARTS) % N
        seq = item // (PARTS * N)
        slot_at = slot_ptr + seq.to(tl.int64) * slot_stride
        slot = tl.load(slot_at).to(tl.int64)
        if slot > 0:
            if VERIFY:
                first = tl.load(cu_ptr + seq)
                count = tl.load(cu_ptr + seq + 1) - first
                # Where nothing is to do the start slot may be anything: read the row's own.
                start = tl.load(slot_at + (tl.load(accepted_ptr + seq) - 1) * slot_column_stride).to(tl.int64)
            else:
                first = seq
                count = 1
                start = slot
            block = head * (D * D) + part * (BV * D)
            tile = r[:, None] * D + d[None, :]
            S = tl.load(state_ptr + start * state_stride + block + tile).to(tl.float32)
            rate = tl.exp(tl.load(a_log_ptr + head))
            bias = tl.load(dt_bias_ptr + head * D + d)
            for j in range(count):
                t = (first + j).to(tl.int64)
                x_at = qkv_ptr + t * qkv_stride + head * D
                q = tl.load(x_at + d).to(tl.float32)
                k = tl.load(x_at + N * D + d).to(tl.float32)
                v = tl.load(x_at + 2 * N * D + part * BV + r).to(tl.float32)
                z = tl.load(z_ptr + t * z_stride + head * D + d).to(tl.float32)
                beta = tl.load(beta_ptr + t * beta_stride + head)
                q = q * (D**-0.5 / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6))
                k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
                decay = tl.exp(log_decay(z + bias, rate, lower_bound, BOUNDED))
                S = S * decay[None, :]
                u = beta * (v - tl.sum(S * k[None, :], axis=1))
                S = S + u[:, None] * k[None, :]
                o = tl.sum(S * q[None, :], axis=1)
                tl.store(o_ptr + t * (N * D) + head * D + part * BV + r, o)
                target = tl.load(slot_at + j * slot_column_stride).to(tl.int64) if VERIFY else slot
                if target > 0:
                    tl.store(state_ptr + target * state_stride + block + tile, S.to(state_ptr.dtype.element_ty))


def supports(spec: CallSpec) -> tuple[bool, str]:
    """kda_decode and kda_verify: any head count, SD convolution states, fp32 or bf16 recurrent states."""
    return checks.supports_heads(spec, FLOATS)


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
    taps: Tensor | None = None,
) -> Tensor:
    """Operator ``kda_decode`` of the table; taps: `short_conv.tap_major` of the weight, made here if absent.

    Raises ValueError for shapes and UnsupportedError for dtypes or layouts it has no code for.
    """
    op = "kda_decode"
    taps = _check(op, qkv, z, beta, gate, conv_weight, taps, a_log, dt_bias, conv_state, recurrent_state, 3)
    checks.check_index(op, "slot_mapping", slot_mapping, (qkv.shape[0],))
    o = _recur(qkv, z, beta, taps, a_log, dt_bias, lower_bound, conv_state, recurrent_state, slot_mapping)
    return gated_norm(o, gate, o_norm_weight, o_norm_eps, out=out)


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
    taps: Tensor | None = None,
) -> Tensor:
    """Operator ``kda_verify`` of the table; taps as in `kda_decode`.

    Counts are read on the device only: a row of more than Q tokens or an accepted count outside 1..Q is the caller's
    fault and not found here. Raises ValueError for shapes and UnsupportedError for dtypes or layouts.
    """
    op = "kda_verify"
    rows, width = slot_mapping.shape
    taps = _check(op, qkv, z, beta, gate, conv_weight, taps, a_log, dt_bias, conv_state, recurrent_state, 2 + width)
    checks.check_index(op, "slot_mapping", slot_mapping, (rows, width))
    checks.check_vector(op, "num_accepted", num_accepted, (rows,), torch.int32)
    checks.check_vector(op, "cu_seqlens", cu_seqlens, (rows + 1,), torch.int32)
    o = _recur(
        qkv, z, beta, taps, a_log, dt_bias, lower_bound, conv_state, recurrent_state, slot_mapping, num_accepted,
        cu_seqlens,
    )  # fmt: skip
    return gated_norm(o, gate, o_norm_weight, o_norm_eps, out=out)


def _recur(
    qkv: Tensor, z: Tensor, beta: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
    conv_state: Tensor, recurrent_state: Tensor, slots: Tensor, accepted: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Convolution and recurrence: o [T, N, D] fp32, zeros in rows without a slot."""
    tokens, heads, dim = z.shape
    o = torch.zeros(tokens, heads, dim, dtype=torch.float32, device=z.device)
    rows = slots.shape[0]
    if not (tokens and heads and rows):
        return o
    activated = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    step_conv(qkv, taps, conv_state, slots if accepted is None else slots[:, 0], activated, accepted, cu_seqlens)
    block = min(BLOCK, dim)
    verify = accepted is not None
    launch(
        kda_recurrent_kernel, programs_for(rows * heads * (dim // block), z.device),
        activated, z, beta, a_log, dt_bias, recurrent_state, slots, accepted if verify else slots,
        cu_seqlens if verify else slots, o, float(lower_bound or 0.0),
        checks.row_stride(activated), checks.row_stride(z), checks.row_stride(beta), recurrent_state.stride(0),
        slots.stride(0), slots.stride(1) if verify else 0, rows,
        BOUNDED=lower_bound is not None, VERIFY=verify, N=heads, D=dim, BV=block,
    )  # fmt: skip
    return o


def _check(
    op: str, qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, weight: Tensor, taps: Tensor | None, a_log: Tensor,
    dt_bias: Tensor, conv_state: Tensor, recurrent_state: Tensor, columns: int,
) -> Tensor:  # fmt: skip
    """Raises for what the kernels have no code for; returns the tap-major weight."""
    if z.dim() != 3:
        raise ValueError(f"{op}: z must be [T, N, D], got {tuple(z.shape)}")
    tokens, heads, dim = z.shape
    checks.check_head_dim(op, dim)
    channels = 3 * heads * dim
    checks.check_rows(op, "qkv", qkv, (tokens, channels), FLOATS)
    checks.check_rows(op, "z", z, (tokens, heads, dim), FLOATS)
    checks.check_rows(op, "gate", gate, (tokens, heads, dim), (qkv.dtype,))
    checks.check_rows(op, "beta", beta, (tokens, heads), checks.F32)
    checks.check_vector(op, "a_log", a_log, (heads,), torch.float32)
    checks.check_vector(op, "dt_bias", dt_bias, (heads, dim), torch.float32)
    checks.check_conv_state(op, conv_state, channels, columns, qkv.dtype)
    checks.check_state(op, recurrent_state, heads, dim)
    return check_taps(op, weight, taps, channels)


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """Decode and, with drafts, verification, for both types of indices. Row counts are no variant."""
    shape = {"num_spec": limits.num_spec, **warmup.gate(config, limits)}
    operators = ("kda_decode", "kda_verify") if limits.num_spec else ("kda_decode",)
    return [{"operator": op, "index": i, **shape} for op in operators for i in (torch.int32, torch.int64)]
