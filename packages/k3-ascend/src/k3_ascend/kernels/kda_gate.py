"""KDA's log decay, per token or summed inside each chunk of 64 tokens.

    g = L sigmoid(A (z + dt_bias))   or   g = -A softplus(z + dt_bias),   A = exp(a_log)

A program takes a block of heads and walks over the rows of a chunk with the sum in the unified buffer: rows are
contiguous over heads and channels, and no scan over rows is needed. Contract: `k3_core.contracts.kda.gate`.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_ascend.kernels import checks, warmup
from k3_ascend.kernels.device import gate
from k3_ascend.kernels.kda_plan import CHUNK, PrefillPlan
from k3_ascend.kernels.launch import launch, programs_for
from k3_core.operators import CallSpec

#: Heads a program.
HEADS = 16


@triton.jit(do_not_specialize=["chunks", "tokens", "heads"])
def kda_gate_kernel(
    z_ptr, a_log_ptr, dt_bias_ptr, out_ptr, chunk_ptr, lower_bound, z_stride, chunks, tokens, heads,
    BOUNDED: tl.constexpr, SUM: tl.constexpr, CHUNK: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Items (chunk, block of HB heads). SUM: chunks of chunk_ptr, inclusive sums; else CHUNK rows each, no sum."""
    h = tl.arange(0, HB)
    d = tl.arange(0, D)
    blocks = tl.cdiv(heads, HB)
    for item in range(tl.program_id(0), chunks * blocks, tl.num_programs(0)):
        chunk = item // blocks
        head = (item % blocks) * HB
        if SUM:
            first = tl.load(chunk_ptr + chunk * 4)
            rows = tl.load(chunk_ptr + chunk * 4 + 1)
        else:
            first = chunk * CHUNK
            rows = tl.minimum(tokens - first, CHUNK)
        inside = head + h < heads
        mask = inside[:, None]
        at = head * D + h[:, None] * D + d[None, :]
        rate = tl.exp(tl.load(a_log_ptr + head + h, mask=inside, other=0.0))[:, None]
        bias = tl.load(dt_bias_ptr + at, mask=mask, other=0.0)
        total = tl.zeros([HB, D], dtype=tl.float32)
        for row in range(rows):
            t = (first + row).to(tl.int64)
            z = tl.load(z_ptr + t * z_stride + at, mask=mask, other=0.0).to(tl.float32)
            g = gate(z + bias, rate, lower_bound, BOUNDED)
            if SUM:
                total += g
                g = total
            tl.store(out_ptr + t * heads * D + at, g, mask=mask)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """Both gate forms, any head count."""
    return checks.supports_heads(spec, checks.FLOATS)


def kda_gate(
    z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None, *, out: Tensor | None = None
) -> Tensor:
    """Natural-log decay: z [T, N, D] before dt_bias, a_log [N], dt_bias [N, D], both fp32 -> [T, N, D] fp32."""
    out = _check("kda_gate", z, a_log, dt_bias, out)
    if out.numel():
        _launch(z, a_log, dt_bias, lower_bound, out, None)
    return out


def kda_cumulative_gate(
    z: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    plan: PrefillPlan,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Sum of the decay from the first token of its chunk to each token, both included: [T, N, D] fp32.

    Chunks start at each sequence's first token. Rows behind the last sequence are zeros.
    """
    out = _check("kda_cumulative_gate", z, a_log, dt_bias, out)
    if plan.end > z.shape[0]:
        raise ValueError(f"kda_cumulative_gate: the plan ends at row {plan.end}, z has {z.shape[0]}")
    out[plan.end :].zero_()
    if plan.num_chunks and out.numel():
        _launch(z, a_log, dt_bias, lower_bound, out, plan)
    return out


def _launch(
    z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None, out: Tensor, plan: PrefillPlan | None
) -> None:
    tokens, heads, dim = z.shape
    block = min(HEADS, triton.next_power_of_2(heads))
    chunks = triton.cdiv(tokens, CHUNK) if plan is None else plan.num_chunks
    table = a_log.view(torch.int32) if plan is None else plan.chunks  # not read without a plan
    launch(
        kda_gate_kernel, programs_for(chunks * triton.cdiv(heads, block), z.device),
        z, a_log, dt_bias, out, table, float(lower_bound or 0.0), checks.row_stride(z), chunks, tokens, heads,
        BOUNDED=lower_bound is not None, SUM=plan is not None, CHUNK=CHUNK, HB=block, D=dim,
    )  # fmt: skip


def _check(op: str, z: Tensor, a_log: Tensor, dt_bias: Tensor, out: Tensor | None) -> Tensor:
    if z.dim() != 3:
        raise ValueError(f"{op}: z must be [T, N, D], got {tuple(z.shape)}")
    checks.check_head_dim(op, z.shape[2])
    checks.check_rows(op, "z", z, tuple(z.shape), checks.FLOATS)
    checks.check_vector(op, "a_log", a_log, (z.shape[1],), torch.float32)
    checks.check_vector(op, "dt_bias", dt_bias, (z.shape[1], z.shape[2]), torch.float32)
    if out is None:
        return torch.empty(z.shape, dtype=torch.float32, device=z.device)
    if out.shape != z.shape or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"{op}: out must be contiguous float32 {tuple(z.shape)}, got {out.dtype} {tuple(out.shape)}")
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """The gate alone; the cumulative gate is warmed up by kda_prefill."""
    return [{"operator": "kda_gate", "tokens": 2, **warmup.gate(config, limits)}]
