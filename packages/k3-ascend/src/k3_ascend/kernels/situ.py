"""SiTU-GLU of [gate | up] rows: beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta).

fp32 inside, one rounding. Between the grouped products of the routed experts, and in dense and shared MLPs.
Contract: `k3_core.contracts.situ.situ_and_mul`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from k3_ascend.kernels import checks, warmup
from k3_ascend.kernels.device import sigmoid, tanh
from k3_ascend.kernels.launch import launch, programs_for
from k3_core.operators import CallSpec

BLOCK = 1024


@triton.jit(do_not_specialize=["tokens"])
def situ_kernel(
    x_ptr, out_ptr, tokens, width, beta, linear_beta, x_stride, out_stride, LINEAR: tl.constexpr, BLOCK: tl.constexpr
):
    """Items (row, column block). LINEAR: the up half enters unchanged."""
    blocks = tl.cdiv(width, BLOCK)
    for item in range(tl.program_id(0), tokens * blocks, tl.num_programs(0)):
        row = (item // blocks).to(tl.int64)
        column = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
        y = beta * tanh(gate / beta) * sigmoid(gate)
        y = y * (up if LINEAR else linear_beta * tanh(up / linear_beta))
        tl.store(out_ptr + row * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """Any width, bfloat16, float16 or float32."""
    return checks.supports(spec, checks.FLOATS)


def situ(x: Tensor, beta: float, linear_beta: float | None, *, out: Tensor | None = None) -> Tensor:
    """Operator ``situ`` of the table: x [T, 2 I] -> [T, I]. Raises ValueError for shapes or strides it cannot take."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"situ: x must be [T, 2 I], got {tuple(x.shape)}")
    checks.check_rows("situ", "x", x, tuple(x.shape), checks.FLOATS)
    tokens, width = x.shape[0], x.shape[1] // 2
    out = checks.result("situ", out, (tokens, width), x)
    if out.numel() == 0:
        return out
    launch(
        situ_kernel, programs_for(tokens * triton.cdiv(width, BLOCK), x.device),
        x, out, tokens, width, float(beta), float(linear_beta or 1.0), checks.row_stride(x), checks.row_stride(out),
        LINEAR=linear_beta is None, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """One for each width of a gated product. Row counts are no variant."""
    return [{"operator": "situ", "width": width} for width in warmup.gated_widths(config, limits)]
