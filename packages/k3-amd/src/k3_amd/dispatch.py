"""Which implementation of each operator runs here, and why: this wheel's registry.

How it is asked and when contracts stand in for kernels: :mod:`k3_core.vllm.serving.dispatch`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from k3_amd import platform
from k3_core.operators import CallSpec, Implementation, Registry
from k3_core.vllm.serving.dispatch import Dispatch

logger = logging.getLogger("vllm.plugins.k3")

KERNEL = "triton"
LIBRARY = "vllm"


def registry() -> Registry:
    """All implementations of this wheel. Kernels whose compiler is not installed are left out."""
    return _dispatch.registry


def device() -> tuple[str, str]:
    """(device type, architecture) of this process: ("cuda", "gfx942") or ("cpu", ""). ROCm's torch says "cuda", too."""
    return ("cuda", platform.architecture()) if platform.on_rocm() else ("cpu", "")


def choose(
    name: str,
    dtype: torch.dtype,
    sizes: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
    want: str | None = None,
) -> Implementation:
    """The implementation of ``name`` on this device; see :meth:`k3_core.vllm.serving.dispatch.Dispatch.choose`."""
    return _dispatch.choose(name, dtype, sizes, options, want)


def report() -> list[str]:
    """What was chosen in this process so far, one line an operator."""
    return _dispatch.report()


def warmup_profiles(config: Any, limits: Any) -> dict[str, list[Any]]:
    """Every kernel variant that serving can meet, by ``operator/implementation``."""
    return _dispatch.warmup_profiles(config, limits)


# ------------------------------------------------------------------------------------------------------ this wheel's


def _implementations() -> Iterable[Implementation]:
    from k3_amd import kernels

    try:
        own = kernels.implementations()
    except ImportError as error:
        logger.info("Kimi K3: no Triton kernels (%s)", error)
        own = {}
    for implementation in own.values():
        yield dataclasses.replace(implementation, supports=_on_gpu(implementation.supports))
    yield Implementation("experts", LIBRARY, _library_experts, _library_experts_supports, priority=5)


def _on_gpu(supports: Callable[[CallSpec], tuple[bool, str]]) -> Callable[[CallSpec], tuple[bool, str]]:
    """Also where Triton interprets: its interpreter is for the kernels' own tests, not for a model."""

    def asked(spec: CallSpec) -> tuple[bool, str]:
        if spec.device != "cuda":
            return False, f"{spec.operator}: Triton kernels run on a GPU's tensors, not on {spec.device}"
        return supports(spec)

    return asked


def _library_experts_supports(spec: CallSpec) -> tuple[bool, str]:
    if spec.device != "cuda":
        return False, f"experts: vLLM's fused experts run on a GPU's tensors, not on {spec.device}"
    if spec.options.get("quantised"):
        return False, "experts: vLLM's fused experts are used for plain weights only"
    if spec.options.get("hidden_act") != "silu":
        return False, f"experts: vLLM's fused experts compute silu, not {spec.options.get('hidden_act')}"
    return True, "experts: vLLM's fused Triton experts for plain weights"


def _library_experts(
    x: torch.Tensor,
    weights: Any,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    hidden_act: str,
    situ_beta: float | None,
    situ_linear_beta: float | None,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Operator ``experts`` by vLLM's fused experts (plain weights, silu): Kimi-Linear."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    if hidden_act != "silu":
        raise ValueError(f"vLLM's fused experts compute silu, not {hidden_act}")
    total = weights.w13.shape[0] if expert_map is None else expert_map.numel()
    result: torch.Tensor = fused_experts(
        x, weights.w13, weights.w2, topk_weights, topk_ids, global_num_experts=total, expert_map=expert_map
    )
    return result if out is None else out.copy_(result)


_dispatch = Dispatch(_implementations, lambda: device())
