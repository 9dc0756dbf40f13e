"""Router choice: launcher of ``device/router.py``; operator route of the table."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from k3_amd.kernels import launch
from k3_amd.kernels.device.router import route_kernel
from k3_core.operators import CallSpec

MAX_EXPERTS = 4096

_launch = launch.Launcher(route_kernel)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """sizes A (experts) and X (top_k); options num_expert_group (groups) and topk_group (kept)."""
    ok, why = launch.supports_device(spec)
    if not ok:
        return ok, why
    o = spec.options
    groups = int(o.get("num_expert_group", o.get("groups", 1)))
    kept = int(o.get("topk_group", o.get("kept", 1)))
    return _supports(spec.sizes.get("A", 1), spec.sizes.get("X", 1), groups, kept)


def _supports(num_experts: int, top_k: int, groups: int, kept: int) -> tuple[bool, str]:
    if kept < groups:
        return False, f"route: {kept} of {groups} expert groups; the kernel has no grouped choice"
    if not 1 <= top_k <= num_experts:
        return False, f"route: top {top_k} of {num_experts} experts"
    if num_experts > MAX_EXPERTS:
        return False, f"route: {num_experts} experts; one program holds at most {MAX_EXPERTS}"
    return True, f"route: Triton, top {top_k} of {num_experts}"


def route(
    logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    *,
    renormalize: bool,
    routed_scaling_factor: float,
    num_expert_group: int,
    topk_group: int,
) -> tuple[Tensor, Tensor]:
    """Operator route: logits fp32 [T, A] (any row stride), bias fp32 -> (topk_weights fp32, topk_ids int32) [T, top_k].

    ValueError for shapes, dtypes (a bfloat16 bias would change the choice) or routing it has no code for.
    """
    tokens, num_experts = logits.shape
    ok, why = _supports(num_experts, top_k, num_expert_group, topk_group)
    if not ok:
        raise ValueError(why)
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(f"route: logits must be float32 with a contiguous last axis, got {logits.dtype}")
    if correction_bias is not None and (
        correction_bias.dtype != torch.float32 or tuple(correction_bias.shape) != (num_experts,)
    ):
        raise ValueError(
            f"route: correction_bias must be float32 [{num_experts}], got {correction_bias.dtype} "
            f"{tuple(correction_bias.shape)}"
        )
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, ids
    _launch(
        (tokens,),
        logits, logits if correction_bias is None else correction_bias.contiguous(), weights, ids,
        num_experts, top_k, logits.stride(0), float(routed_scaling_factor),
        EB=max(16, triton.next_power_of_2(num_experts)), TK=triton.next_power_of_2(top_k),
        HAS_BIAS=correction_bias is not None, RENORM=renormalize, **launch.options("route", logits.device),
    )  # fmt: skip
    return weights, ids


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """Token counts: tokens are a grid, so one is enough."""
    return [{"tokens": 1}]
