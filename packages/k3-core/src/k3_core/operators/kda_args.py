"""What KDA kernels accept, on any device: argument checks shared by the vendors, asked before weights load and launch.

A refusal names the argument, what it is and what would be accepted. Nothing here touches device memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3_core.errors import UnsupportedError
from k3_core.operators.registry import CallSpec

#: Head dimensions with a compiled variant. 128 is K3 and Kimi-Linear, the others are tiny test checkpoints.
HEAD_DIMS = (16, 32, 64, 128)
#: Local head counts that are compiled and tested; others work, but no test names them.
TESTED_HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
STATE_DTYPES = (torch.float32, torch.bfloat16)
TAPS = 4
BF16 = (torch.bfloat16,)
FLOATS = (torch.bfloat16, torch.float32)


def supports_sizes(spec: CallSpec, dtypes: Sequence[torch.dtype]) -> tuple[bool, str]:
    """The part of a capability query that no device changes: activation dtype, head dimension, taps, state dtype."""
    name = spec.operator
    if spec.dtype not in dtypes:
        return False, f"{name}: activations must be one of {[str(d) for d in dtypes]}, not {spec.dtype}"
    dims = {spec.sizes[s] for s in ("D", "K", "V") if s in spec.sizes} or {128}
    if len(dims) > 1:
        return False, f"{name}: key and value dimension must be equal, not {dict(spec.sizes)}"
    dim = dims.pop()
    if dim not in HEAD_DIMS:
        return False, f"{name}: head dimension must be one of {HEAD_DIMS}, not {dim}"
    if spec.sizes.get("W", TAPS) != TAPS:
        return False, f"{name}: the short convolution has {TAPS} taps here, not {spec.sizes['W']}"
    state = spec.options.get("state_dtype", torch.float32)
    if state not in STATE_DTYPES:
        return False, f"{name}: recurrent state must be float32 or bfloat16, not {state}"
    return True, f"{name}: Triton, any head count, head dimension {dim}, any row stride"


def check_rows(op: str, name: str, x: Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> None:
    """Raises unless x is [T, ...] of that shape whose axes after the first are contiguous."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{op}: {name} must be {shape}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise UnsupportedError(f"{op}: {name} must be one of {[str(d) for d in dtypes]}, got {x.dtype}")
    want = 1
    for axis in range(x.dim() - 1, 0, -1):
        if x.shape[axis] != 1 and x.stride(axis) != want:
            raise UnsupportedError(
                f"{op}: {name} with strides {x.stride()}: only the first axis may be strided; call .contiguous() first"
            )
        want *= x.shape[axis]
    if x.shape[0] > 1 and x.stride(0) < want:
        raise UnsupportedError(f"{op}: {name} has overlapping rows (strides {x.stride()})")


def check_state(op: str, state: Tensor, heads: int, dim: int) -> None:
    """Raises unless state is a pool [S, N, D, D] whose payloads are contiguous and don't overlap."""
    if state.dim() != 4 or tuple(state.shape[1:]) != (heads, dim, dim):
        raise ValueError(f"{op}: recurrent_state must be [slots, {heads}, {dim}, {dim}], got {tuple(state.shape)}")
    if state.dtype not in STATE_DTYPES:
        raise UnsupportedError(f"{op}: recurrent_state must be float32 or bfloat16, got {state.dtype}")
    payload = heads * dim * dim
    dense = state.stride(3) == 1 and state.stride(2) == dim and (heads == 1 or state.stride(1) == dim * dim)
    if not dense or (state.shape[0] > 1 and state.stride(0) < payload):
        raise UnsupportedError(f"{op}: recurrent_state with strides {state.stride()}: slots must be contiguous inside")


def check_conv_state(op: str, conv_state: Tensor, channels: int, columns: int, dtype: torch.dtype) -> None:
    """Raises unless conv_state is [S, C, P >= columns] with the channel or the column axis contiguous inside a slot."""
    if conv_state.dim() != 3 or conv_state.shape[1] != channels or conv_state.shape[2] < columns:
        raise ValueError(
            f"{op}: conv_state must be [slots, {channels}, {columns} or more], got {tuple(conv_state.shape)}"
        )
    if conv_state.dtype != dtype:
        raise UnsupportedError(f"{op}: conv_state must have the activations' dtype {dtype}, got {conv_state.dtype}")
    _, by_channel, by_column = conv_state.stride()
    if by_channel != 1 and by_column != 1:
        raise UnsupportedError(
            f"{op}: conv_state with strides {conv_state.stride()}: channel or column axis must be contiguous (SD or DS)"
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


def row_stride(x: Tensor) -> int:
    """Distance of two rows; of a single row, its length (whatever PyTorch reports)."""
    return x.stride(0) if x.shape[0] > 1 else max(x.stride(0), x[0].numel() if x.shape[0] else 1)


def check_step(
    op: str, qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    o_norm_weight: Tensor, conv_state: Tensor, recurrent_state: Tensor, columns: int, out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Raises unless these are arguments of kda_decode or kda_verify; returns `out`, allocated where it is None.

    columns: columns that the conv state must have.
    """
    if z.dim() != 3 or z.shape[2] not in HEAD_DIMS:
        raise UnsupportedError(f"{op}: z must be [T, N, D] with D in {HEAD_DIMS}, got {tuple(z.shape)}")
    tokens, heads, dim = z.shape
    channels = 3 * heads * dim
    check_rows(op, "qkv", qkv, (tokens, channels), FLOATS)
    check_rows(op, "z", z, (tokens, heads, dim), FLOATS)
    check_rows(op, "gate", gate, (tokens, heads, dim), FLOATS)
    check_rows(op, "beta", beta, (tokens, heads), (torch.float32,))
    check_vector(op, "conv_weight", conv_weight, (channels, TAPS), torch.float32)
    check_vector(op, "a_log", a_log, (heads,), torch.float32)
    check_vector(op, "dt_bias", dt_bias, (heads, dim), torch.float32)
    check_vector(op, "o_norm_weight", o_norm_weight, (dim,), None)
    check_conv_state(op, conv_state, channels, columns, qkv.dtype)
    check_state(op, recurrent_state, heads, dim)
    if out is None:
        return torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    check_rows(op, "out", out, (tokens, heads, dim), FLOATS)
    return out


def check_prefill(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    slots: Tensor, init: Tensor, out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Raises unless these are arguments of kda_prefill; returns `out`, allocated where it is None."""
    op = "kda_prefill"
    if q.dim() != 3 or q.shape[2] not in HEAD_DIMS:
        raise UnsupportedError(f"{op}: q must be [T, N, D] with D in {HEAD_DIMS}, got {tuple(q.shape)}")
    tokens, heads, dim = q.shape
    for name, x in (("q", q), ("k", k), ("v", v), ("z", z)):
        check_rows(op, name, x, (tokens, heads, dim), BF16)
    check_rows(op, "beta", beta, (tokens, heads), (torch.float32,))
    check_vector(op, "a_log", a_log, (heads,), torch.float32)
    check_vector(op, "dt_bias", dt_bias, (heads, dim), torch.float32)
    check_state(op, state, heads, dim)
    check_index(op, "slot_mapping", slots, (slots.shape[0],))
    check_vector(op, "has_initial_state", init, tuple(slots.shape), torch.bool)
    if out is None:
        return torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    check_rows(op, "out", out, (tokens, heads, dim), BF16)
    return out
