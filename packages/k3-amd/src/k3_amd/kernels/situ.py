"""SiTU: launcher of ``device/situ.py``; operator situ of the table."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from k3_amd.kernels import launch
from k3_amd.kernels.device.situ import situ_kernel
from k3_core.operators import CallSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_launch = launch.Launcher(situ_kernel)


def activation_code(hidden_act: str, beta: float | None, linear_beta: float | None) -> tuple[int, float, float]:
    """(ACT, beta, linear_beta) of ``gated_act``; ValueError for an activation that neither model family has."""
    if hidden_act == "silu":
        return 0, 1.0, 1.0
    if hidden_act != "situ" or beta is None:
        raise ValueError(f'hidden_act must be "silu", or "situ" with a beta, got {hidden_act!r} with beta {beta}')
    return (2 if linear_beta is None else 1), float(beta), 1.0 if linear_beta is None else float(linear_beta)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """bfloat16, float16 or float32, any width."""
    ok, why = launch.supports_device(spec)
    if ok and spec.dtype not in DTYPES:
        return False, f"situ: {spec.dtype}; bfloat16, float16 or float32"
    return ok, why


def situ(x: Tensor, beta: float, linear_beta: float | None, *, out: Tensor | None = None) -> Tensor:
    """Operator situ: x [T, 2 I] (any row stride) -> [T, I] in x's dtype. ValueError for shapes or strides."""
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"situ: x must be [T, 2 I] with a contiguous last axis, got {tuple(x.shape)} {x.stride()}")
    tokens, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != (tokens, width) or out.stride(1) != 1:
        raise ValueError(f"situ: out {tuple(out.shape)} for {tuple(x.shape)}; its last axis must be contiguous")
    if tokens * width == 0:
        return out
    act, b, lb = activation_code("situ", beta, linear_beta)
    options = launch.options("situ", x.device)
    options["BLOCK"] = min(options["BLOCK"], triton.next_power_of_2(width))
    _launch(
        (tokens, triton.cdiv(width, options["BLOCK"])),
        x, out, width, b, lb, x.stride(0), out.stride(0), ACT=act, **options,
    )  # fmt: skip
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """Token counts: rows are a grid, so one is enough."""
    return [{"tokens": 1}]
