"""Gated output norm of KDA: rms_norm over each head, times weight, times sigmoid of the gate.

fp32 inside, one rounding. Contract: `k3_core.contracts.kda.output_norm`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from k3_ascend.kernels import checks, warmup
from k3_ascend.kernels.device import sigmoid
from k3_ascend.kernels.launch import launch, programs_for
from k3_core.operators import CallSpec

#: Heads a tile.
HEADS = 16


# Strides are not specialised on: a row has the same bits however far apart rows lie.
@triton.jit(do_not_specialize=["tokens", "heads", "o_stride", "gate_stride", "out_stride"])
def gated_norm_kernel(
    o_ptr, gate_ptr, weight_ptr, out_ptr, tokens, heads, o_stride, gate_stride, out_stride, eps,
    HB: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Items (token, block of HB heads)."""
    h = tl.arange(0, HB)
    d = tl.arange(0, D)
    weight = tl.load(weight_ptr + d).to(tl.float32)
    blocks = tl.cdiv(heads, HB)
    for item in range(tl.program_id(0), tokens * blocks, tl.num_programs(0)):
        token = (item // blocks).to(tl.int64)
        first = (item % blocks) * HB
        at = first * D + h[:, None] * D + d[None, :]
        mask = (first + h < heads)[:, None]
        o = tl.load(o_ptr + token * o_stride + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + token * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(o * o, axis=1) / D + eps)
        y = o * scale[:, None] * weight[None, :] * sigmoid(gate)
        # Rows of no request are zeros whatever their gate holds.
        y = tl.where(o == 0.0, 0.0, y)
        tl.store(out_ptr + token * out_stride + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """Any head count."""
    return checks.supports_heads(spec, checks.FLOATS)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Operator ``gated_norm`` of the table: o, gate [T, N, D] -> [T, N, D] in gate's dtype.

    o may also be the fp32 result of the step kernels beside bfloat16 gates.
    """
    op = "gated_norm"
    if o.dim() != 3:
        raise ValueError(f"{op}: o must be [T, N, D], got {tuple(o.shape)}")
    tokens, heads, dim = o.shape
    checks.check_head_dim(op, dim)
    checks.check_rows(op, "o", o, (tokens, heads, dim), checks.FLOATS)
    checks.check_rows(op, "gate", gate, (tokens, heads, dim), checks.FLOATS)
    checks.check_vector(op, "weight", weight, (dim,), None)
    out = checks.result(op, out, (tokens, heads, dim), gate)
    if out.numel() == 0:
        return out
    block = min(HEADS, triton.next_power_of_2(heads))
    launch(
        gated_norm_kernel, programs_for(tokens * triton.cdiv(heads, block), o.device),
        o, gate, weight, out, tokens, heads, checks.row_stride(o), checks.row_stride(gate), checks.row_stride(out),
        float(eps), HB=block, D=dim,
    )  # fmt: skip
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """After prefill (bfloat16 in); with fp32 in it runs inside the step launchers, whose profiles cover it."""
    return [{"operator": "gated_norm", "tokens": 2, **warmup.heads(config, limits)}]
