"""SiTU-GLU on [gate | up] rows: beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta), fp32 inside, one
rounding.

Used for the dense layer and the shared experts; the routed experts have it in the epilogue of their first product.
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

from k3_core.operators.triton_host import Launcher
from k3_nvidia.kernels.experts_gemm import gated_act
from k3_nvidia.kernels.glue import launch_options, pdl


@triton.jit
def situ_kernel(
    x_ptr, out_ptr, width, beta, linear_beta, stride_x, stride_out, ACT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, column block)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + width + column, mask=inside, other=0.0).to(tl.float32)
    y = gated_act(gate, up, beta, linear_beta, ACT)
    tl.store(out_ptr + row * stride_out + column, y.to(out_ptr.dtype.element_ty), mask=inside)


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
    block = min(1024, triton.next_power_of_2(width))
    _situ(
        (tokens, triton.cdiv(width, block)), x, out, width, b, lb, x.stride(0), out.stride(0), ACT=act, BLOCK=block,
        num_warps=4, **launch_options(pdl(x)),
    )  # fmt: skip
    return out


def supports(dtype: torch.dtype) -> tuple[bool, str]:
    """Whether the kernel takes that activation dtype."""
    if dtype in (torch.bfloat16, torch.float16, torch.float32):
        return True, f"situ: {dtype}"
    return False, f"situ: {dtype}; bfloat16, float16 or float32"


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """One variant for each width of a gated MLP: the kernel specialises on the column block only."""
    return [{"BLOCK": 1024}]
