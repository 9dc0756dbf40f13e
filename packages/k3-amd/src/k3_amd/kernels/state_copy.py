"""Copies of cache rows: launchers of ``device/state_copy.py``; operators state_gather and state_scatter."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from k3_amd.kernels import launch
from k3_amd.kernels.device.state_copy import state_gather_kernel, state_scatter_kernel
from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_gather = launch.Launcher(state_gather_kernel)
_scatter = launch.Launcher(state_scatter_kernel)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """float32, bfloat16 or float16 caches of any payload."""
    ok, why = launch.supports_device(spec)
    if ok and spec.dtype not in DTYPES:
        return False, f"{spec.operator}: {spec.dtype}; float32, bfloat16 or float16"
    return ok, why


def _payload(op: str, cache: Tensor, indices: Tensor) -> int:
    if cache.dtype not in DTYPES:
        raise UnsupportedError(f"{op}: cache must be float32, bfloat16 or float16, got {cache.dtype}")
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: indices must be int32 or int64 [R], got {indices.dtype} {tuple(indices.shape)}")
    payload = cache[0].numel() if cache.shape[0] else 0
    want = 1
    for axis in range(cache.dim() - 1, 0, -1):
        if cache.shape[axis] != 1 and cache.stride(axis) != want:
            raise UnsupportedError(f"{op}: cache with strides {cache.stride()}: rows must be contiguous inside")
        want *= cache.shape[axis]
    return payload


def state_gather(
    cache: Tensor, indices: Tensor, has_initial_state: Tensor | None, *, out: Tensor | None = None
) -> Tensor:
    """Operator state_gather: rows of cache [S, N, V, K] by index -> [R, N, V, K]; zeros for invalid and new rows."""
    op = "state_gather"
    payload, rows = _payload(op, cache, indices), indices.shape[0]
    shape = (rows, *cache.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=cache.dtype, device=cache.device)
    elif tuple(out.shape) != shape or out.dtype != cache.dtype or not out.is_contiguous():
        raise ValueError(f"{op}: out must be contiguous {cache.dtype} {shape}, got {out.dtype} {tuple(out.shape)}")
    if has_initial_state is not None and (
        has_initial_state.dtype != torch.bool or tuple(has_initial_state.shape) != (rows,)
    ):
        raise ValueError(f"{op}: has_initial_state must be bool [{rows}], got {has_initial_state.dtype}")
    if rows * payload == 0:
        return out.zero_()
    options = launch.options("copy", cache.device)
    flags = indices if has_initial_state is None else has_initial_state
    _gather(
        (triton.cdiv(payload, options["BLOCK"]), rows),
        cache, indices, flags, out, cache.shape[0], payload, cache.stride(0), indices.stride(0), flags.stride(0),
        HAS_INIT=has_initial_state is not None, **options,
    )  # fmt: skip
    return out


def state_scatter(cache: Tensor, indices: Tensor, packed: Tensor) -> None:
    """Operator state_scatter: rows of packed [R, N, V, K] into cache [S, N, V, K]; invalid indices are skipped."""
    op = "state_scatter"
    payload, rows = _payload(op, cache, indices), indices.shape[0]
    shape = (rows, *cache.shape[1:])
    if tuple(packed.shape) != shape or packed.dtype != cache.dtype or not packed.is_contiguous():
        raise ValueError(f"{op}: packed must be contiguous {cache.dtype} {shape}, got {packed.dtype} {packed.shape}")
    if rows * payload == 0:
        return
    options = launch.options("copy", cache.device)
    _scatter(
        (triton.cdiv(payload, options["BLOCK"]), rows),
        cache, indices, packed, cache.shape[0], payload, cache.stride(0), indices.stride(0), **options,
    )  # fmt: skip


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """Row counts: rows are a grid, so one is enough."""
    return [{"rows": 1}]
