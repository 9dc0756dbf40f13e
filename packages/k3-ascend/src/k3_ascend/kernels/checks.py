"""What the kernels accept, asked before weights load (`supports`) and before every launch (`check_*`).

A refusal names the argument, what it is and what would be accepted. Nothing here touches device memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3_ascend.kernels.launch import has_executor
from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec
from k3_core.operators.kda_args import check_rows

#: Head dimensions with a tested variant. 128 is K3 and Kimi-Linear, the others are tiny test checkpoints.
HEAD_DIMS = (16, 32, 64, 128)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BF16 = (torch.bfloat16,)
F32 = (torch.float32,)
STATE_DTYPES = (torch.float32, torch.bfloat16)
TAPS = 4


def supports(spec: CallSpec, dtypes: Sequence[torch.dtype]) -> tuple[bool, str]:
    """Common part of every capability query: device, activation dtype, head dimension, conv layout, state dtype."""
    name = spec.operator
    if spec.device not in ("npu", "cuda") and not (spec.device == "cpu" and has_executor()):
        return False, f"{name}: Triton kernels run on npu tensors, not on {spec.device}"
    if spec.dtype not in dtypes:
        return False, f"{name}: activations must be one of {[str(d) for d in dtypes]}, not {spec.dtype}"
    if spec.sizes.get("W", TAPS) != TAPS:
        return False, f"{name}: the short convolution has {TAPS} taps here, not {spec.sizes['W']}"
    if spec.options.get("layout", "SD") != "SD":
        return False, f"{name}: the conv state must have the SD layout (channels contiguous), not DS"
    state = spec.options.get("state_dtype", torch.float32)
    if state not in STATE_DTYPES:
        return False, f"{name}: recurrent state must be float32 or bfloat16, not {state}"
    return True, f"{name}: Triton, {spec.dtype}"


def supports_heads(spec: CallSpec, dtypes: Sequence[torch.dtype]) -> tuple[bool, str]:
    """`supports`, and one head dimension for keys and values that is compiled and tested."""
    ok, reason = supports(spec, dtypes)
    if not ok:
        return ok, reason
    dims = {spec.sizes[s] for s in ("D", "K", "V") if s in spec.sizes} or {128}
    if len(dims) > 1:
        return False, f"{spec.operator}: key and value dimension must be equal, not {dict(spec.sizes)}"
    if not dims <= set(HEAD_DIMS):
        return False, f"{spec.operator}: head dimension must be one of {HEAD_DIMS}, not {dims.pop()}"
    bound = spec.options.get("lower_bound")
    if bound is not None and bound > 0:
        return False, f"{spec.operator}: lower_bound must be negative or None, not {bound}"
    return True, f"{reason}, any head count, head dimension {dims.pop()}"


def check_head_dim(op: str, dim: int) -> None:
    """Raises unless the head dimension has a tested variant."""
    if dim not in HEAD_DIMS:
        raise UnsupportedError(f"{op}: head dimension must be one of {HEAD_DIMS}, got {dim}")


def check_state(op: str, state: Tensor, heads: int, dim: int) -> None:
    """Raises unless state is a pool [S, N, D, D] whose payloads are contiguous and don't overlap."""
    if state.dim() != 4 or tuple(state.shape[1:]) != (heads, dim, dim):
        raise ValueError(f"{op}: recurrent_state must be [slots, {heads}, {dim}, {dim}], got {tuple(state.shape)}")
    if state.dtype not in STATE_DTYPES:
        raise UnsupportedError(f"{op}: recurrent_state must be float32 or bfloat16, got {state.dtype}")
    dense = state.stride(3) == 1 and state.stride(2) == dim and (heads == 1 or state.stride(1) == dim * dim)
    if not dense or (state.shape[0] > 1 and state.stride(0) < heads * dim * dim):
        raise UnsupportedError(f"{op}: recurrent_state with strides {state.stride()}: slots must be contiguous inside")


def check_conv_state(op: str, conv_state: Tensor, channels: int, columns: int, dtype: torch.dtype) -> None:
    """Raises unless conv_state is [S, C, P >= columns] in the SD layout: the channel axis contiguous."""
    if conv_state.dim() != 3 or conv_state.shape[1] != channels or conv_state.shape[2] < columns:
        raise ValueError(
            f"{op}: conv_state must be [slots, {channels}, {columns} or more], got {tuple(conv_state.shape)}"
        )
    if conv_state.dtype != dtype:
        raise UnsupportedError(f"{op}: conv_state must have the activations' dtype {dtype}, got {conv_state.dtype}")
    if conv_state.stride(1) != 1 and channels > 1:
        raise UnsupportedError(
            f"{op}: conv_state with strides {conv_state.stride()}: channels must be contiguous; leave "
            "VLLM_SSM_CONV_STATE_LAYOUT at SD"
        )


def check_vector(op: str, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Raises unless x is a contiguous parameter of that shape (and dtype, if one is required)."""
    if tuple(x.shape) != shape or not x.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous {shape}, got {tuple(x.shape)} strides {x.stride()}")
    if dtype is not None and x.dtype != dtype:
        raise UnsupportedError(f"{op}: {name} must be {dtype}, got {x.dtype}")


def check_index(op: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raises unless x is int32 or int64 of that shape."""
    if tuple(x.shape) != shape or x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: {name} must be int32 or int64 {shape}, got {x.dtype} {tuple(x.shape)}")


def result(op: str, out: Tensor | None, shape: tuple[int, ...], like: Tensor, *, dense: bool = False) -> Tensor:
    """out, checked, or a fresh contiguous tensor of like's dtype and device."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    check_rows(op, "out", out, shape, (like.dtype,))
    if dense and not out.is_contiguous():
        raise ValueError(f"{op}: out must be contiguous, got strides {out.stride()}")
    return out


def row_stride(x: Tensor) -> int:
    """Distance of two rows; of a single row, its length (whatever PyTorch reports)."""
    return x.stride(0) if x.shape[0] > 1 else max(x.stride(0), x[0].numel() if x.shape[0] else 1)
