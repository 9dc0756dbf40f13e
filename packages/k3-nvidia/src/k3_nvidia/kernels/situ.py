"""SiTU-GLU on [gate | up] rows: beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta), fp32 inside, one
rounding.

Used for the dense layer and the shared experts; the routed experts have it in the epilogue of their first product.

Bytes: 3 I elements a token. Beside them count the special functions (16 lanes a clock and multiprocessor): three
exponentials and one division an element, 19 us of the 26 that the bytes of 8192 x 2112 take on an H200.
Contract: ``k3_core.contracts.situ.situ_and_mul``.
"""

# mypy: allow-untyped-defs
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators.triton_host import Launcher, interpreting
from k3_nvidia.kernels.glue import launch_options, pdl
from k3_nvidia.tuning import glue as tuning
from k3_nvidia.tuning import moe_step


@triton.jit
def _exp2(x, INTERPRET: tl.constexpr):
    """2^x by one instruction: 2 ulp, results below 2^-126 are zero."""
    if INTERPRET:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _over(x, y, INTERPRET: tl.constexpr):
    """x / y for y from 1 to infinity, where it is zero; 2 ulp."""
    if INTERPRET:
        return x / y
    else:
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _tanh_parts(x, INTERPRET: tl.constexpr):
    """(numerator, denominator) of tanh |x|: one exponential, no division; the series near 0, where 1 - e cancels."""
    x = tl.abs(x)
    e = _exp2(x * -2.8853900817779268, INTERPRET)
    x2 = x * x
    series = x * (1.0 + x2 * (-0.3333333333 + x2 * 0.1333333333))
    return tl.where(x < 0.05, series * (1.0 + e), 1.0 - e), 1.0 + e


@triton.jit
def _sign(x):
    """The sign bit."""
    return x.to(tl.int32, bitcast=True) & -2147483648


@triton.jit
def _activated(gate, up, beta, linear_beta, per_beta, per_linear, ACT: tl.constexpr, INTERPRET: tl.constexpr):
    """``experts_gemm.gated_act`` over one denominator: a division an element where that has five.

    The sigmoid's 1 + exp(-gate) may be infinite: the quotient is then the zero that it should be.
    """
    below = 1.0 + _exp2(gate * -1.4426950408889634, INTERPRET)
    if ACT == 0:
        return _over(gate * up, below, INTERPRET)
    left, under = _tanh_parts(gate * per_beta, INTERPRET)
    if ACT == 2:
        size = _over(beta * left * up, under * below, INTERPRET)
        sign = _sign(gate)
    else:
        right, over = _tanh_parts(up * per_linear, INTERPRET)
        size = _over((beta * linear_beta) * (left * right), under * over * below, INTERPRET)
        sign = _sign(gate) ^ _sign(up)
    return (size.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def situ_kernel(
    x_ptr, out_ptr, rows, width, beta, linear_beta, per_beta, per_linear, stride_x, stride_out,
    ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, block of columns)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = x_ptr + row[:, None] * stride_x + column[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    y = _activated(gate, up, beta, linear_beta, per_beta, per_linear, ACT, INTERPRET)
    tl.store(out_ptr + row[:, None] * stride_out + column[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def blocks(rows: int, width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program: few tokens want many small programs, and a width that is no multiple of the
    columns leaves lanes idle (2112 is none of 512)."""
    tile = tuning.situ(rows)
    return tile["rows"], min(tile["columns"], triton.next_power_of_2(width)), tile["warps"]


_situ = Launcher(situ_kernel)


def activation_code(hidden_act: str, beta: float | None, linear_beta: float | None) -> tuple[int, float, float]:
    """(ACT, beta, linear_beta) of ``gated_act``; raises ValueError for an activation that K3 and Kimi-Linear don't
    have."""
    if hidden_act == "silu":
        return 0, 1.0, 1.0
    if hidden_act != "situ":
        raise ValueError(f'hidden_act must be "situ" or "silu", got {hidden_act!r}')
    return (1 if linear_beta is not None else 2), 1.0 if beta is None else float(beta), float(linear_beta or 1.0)


def situ_and_mul(
    x: torch.Tensor, beta: float, linear_beta: float | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Operator ``situ``: x [T, 2 I] (any row stride) -> [T, I] in x's dtype."""
    tokens, width = x.shape[0], x.shape[1] // 2
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"situ: x must be [T, 2 I] with a contiguous last axis, got {tuple(x.shape)} {x.stride()}")
    if out is None:
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != (tokens, width) or out.stride(1) != 1:
        raise ValueError(f"situ: out {tuple(out.shape)} for {tuple(x.shape)}; its last axis must be contiguous")
    if tokens == 0:
        return out
    act, b, lb = activation_code("situ", beta, linear_beta)
    tall, wide, warps = blocks(tokens, width)
    _situ(
        (triton.cdiv(tokens, tall), triton.cdiv(width, wide)), x, out, tokens, width, b, lb, 1.0 / b, 1.0 / lb,
        x.stride(0), out.stride(0), ACT=act, BR=tall, BC=wide,
        INTERPRET=interpreting(), num_warps=warps, **launch_options(pdl(x)),
    )  # fmt: skip
    return out


def supports(dtype: torch.dtype) -> tuple[bool, str]:
    """Whether the kernel takes that activation dtype."""
    if dtype in (torch.bfloat16, torch.float16, torch.float32):
        return True, f"situ: {dtype}"
    return False, f"situ: {dtype}; bfloat16, float16 or float32"


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """Token counts at which the block of a program changes, or what the shared experts' launch follows."""
    return [{"tokens": rows} for rows in sorted({*tuning.situ_edges(), *moe_step.edges()})]
