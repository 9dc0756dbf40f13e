"""Running every kernel variant once: the profiles' vocabulary, and the calls they stand for.

Counts (tokens, rows, chunks, blocks) are not specialised on, so a profile is only a choice of constants and types.
Profiles run on null slots: no state is touched but the scratch pools made here.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def text_of(config: Any) -> Any:
    """The text configuration of a K3Config, or the argument itself."""
    return getattr(config, "text", config)


def tensor_parallel_size(limits: Any) -> int:
    """``limits.tensor_parallel_size`` where it is given, else vLLM's in a worker, else 1."""
    size = getattr(limits, "tensor_parallel_size", None)
    if size is not None:
        return int(size)
    try:
        from vllm.distributed import get_tensor_model_parallel_world_size, model_parallel_is_initialized
    except ImportError:
        return 1
    return int(get_tensor_model_parallel_world_size()) if model_parallel_is_initialized() else 1


def heads(config: Any, limits: Any) -> dict[str, Any]:
    """Local head count and head dimension of the KDA layers."""
    linear = text_of(config).linear_attn
    return {"heads": linear.num_heads // tensor_parallel_size(limits), "dim": linear.head_dim}


def gate(config: Any, limits: Any) -> dict[str, Any]:
    """`heads`, and the form of the gate."""
    return {**heads(config, limits), "lower_bound": text_of(config).linear_attn.gate_lower_bound}


def gated_widths(config: Any, limits: Any) -> list[int]:
    """Widths of one rank's gated products: dense layer, shared experts, routed experts (whole or cut)."""
    text, size = text_of(config), tensor_parallel_size(limits)
    if text.hidden_act != "situ":
        return []
    routed, shared = text.moe_intermediate_size, text.moe_intermediate_size * (text.num_shared_experts or 0)
    found = {text.intermediate_size // size, routed, routed // size, shared // size}
    return sorted(width for width in found if width)


def run_profile(operator: str, *, device: str | torch.device | None = None, **profile: Any) -> None:
    """Make the tensors of a profile on a device (the current NPU) and call its launcher once.

    Raises KeyError for an operator without kernels here.
    """
    if device is None:
        device = torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]
    _CALLS[operator](torch.device(device), **profile)


def _module(name: str) -> Any:
    return importlib.import_module(f"k3_ascend.kernels.{name}")


def _attn_res(device: torch.device, *, hidden: int, delta: bool, write: bool, norm: bool) -> None:
    x, w = _zeros(device, 2, hidden), _zeros(device, hidden)
    _module("attn_res").attn_res(
        x, x.clone() if delta else None, _zeros(device, 2, 2, hidden), w, w, 1e-5, 1, write_block=1 if write else None,
        output_norm_weight=w if norm else None, output_norm_eps=1e-5 if norm else None,
    )  # fmt: skip


def _situ(device: torch.device, *, width: int) -> None:
    _module("situ").situ(_zeros(device, 2, 2 * width), 4.0, 25.0)


def _gated_norm(device: torch.device, *, tokens: int, heads: int, dim: int) -> None:
    o = _zeros(device, tokens, heads, dim)
    _module("gated_norm").gated_norm(o, o, _zeros(device, dim, dtype=torch.float32), 1e-5)


def _kda_gate(device: torch.device, *, tokens: int, heads: int, dim: int, lower_bound: float | None) -> None:
    _module("kda_gate").kda_gate(_zeros(device, tokens, heads, dim), *_gate_weights(device, heads, dim), lower_bound)


def _unpack(device: torch.device) -> None:
    packed = _zeros(device, 2, 32, dtype=torch.uint8)
    _module("mxfp4").unpack_mxfp4(packed, _zeros(device, 2, 2, dtype=torch.uint8))


def _short_conv(device: torch.device, *, heads: int, dim: int, num_spec: int, index: torch.dtype) -> None:
    channels = 3 * heads * dim
    slots, cu, fresh = _batch(device, index)
    _module("short_conv").short_conv(
        _zeros(device, 66, channels), _zeros(device, channels, 4, dtype=torch.float32),
        _conv_pool(device, channels, num_spec), slots, cu, fresh, plan=_plan(device),
    )  # fmt: skip


def _kda_prefill(device: torch.device, *, heads: int, dim: int, lower_bound: float | None, index: torch.dtype) -> None:
    x = _zeros(device, 66, heads, dim)
    slots, cu, fresh = _batch(device, index)
    _module("kda_prefill").kda_prefill(
        x, x, x, x, _zeros(device, 66, heads, dtype=torch.float32), *_gate_weights(device, heads, dim), lower_bound,
        _zeros(device, 2, heads, dim, dim, dtype=torch.float32), slots, cu, fresh, plan=_plan(device),
    )  # fmt: skip


def _step(
    device: torch.device, verify: bool, *, heads: int, dim: int, lower_bound: float | None, num_spec: int,
    index: torch.dtype,
) -> None:  # fmt: skip
    channels, width = 3 * heads * dim, 1 + num_spec
    tokens = 2 * width if verify else 2
    x = _zeros(device, tokens, heads, dim)
    shared = (
        _zeros(device, tokens, channels), x, _zeros(device, tokens, heads, dtype=torch.float32), x,
        _zeros(device, channels, 4, dtype=torch.float32), *_gate_weights(device, heads, dim), lower_bound,
        _zeros(device, dim, dtype=torch.float32), 1e-5, _conv_pool(device, channels, num_spec),
        _zeros(device, 2, heads, dim, dim, dtype=torch.float32),
    )  # fmt: skip
    if not verify:
        _module("kda_step").kda_decode(*shared, _zeros(device, 2, dtype=index))
        return
    ends = torch.tensor([0, width, 2 * width], dtype=torch.int32, device=device)
    accepted = torch.ones(2, dtype=torch.int32, device=device)
    _module("kda_step").kda_verify(*shared, _zeros(device, 2, width, dtype=index), accepted, ends)


def _zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _gate_weights(device: torch.device, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _zeros(device, heads, dtype=torch.float32), _zeros(device, heads, dim, dtype=torch.float32)


def _conv_pool(device: torch.device, channels: int, num_spec: int) -> torch.Tensor:
    return _zeros(device, 2, 3 + num_spec, channels).transpose(1, 2)


def _batch(device: torch.device, index: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Null slots, ends and flags of two sequences of 65 and 1 tokens."""
    ends = torch.tensor([0, 65, 66], dtype=torch.int32, device=device)
    return _zeros(device, 2, dtype=index), ends, _zeros(device, 2, dtype=torch.bool)


def _plan(device: torch.device) -> Any:
    return _module("kda_plan").plan_prefill([0, 65, 66], device)


_CALLS: dict[str, Any] = {
    "attn_res": _attn_res,
    "situ": _situ,
    "gated_norm": _gated_norm,
    "kda_gate": _kda_gate,
    "unpack_mxfp4": _unpack,
    "short_conv": _short_conv,
    "kda_prefill": _kda_prefill,
    "kda_decode": lambda device, **profile: _step(device, False, **profile),
    "kda_verify": lambda device, **profile: _step(device, True, **profile),
}
