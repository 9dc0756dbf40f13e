"""vLLM's own fused experts as an implementation of the operator ``experts``, for every vendor of GPUs."""

from __future__ import annotations

from typing import Any

import torch

from k3_core.operators import CallSpec, Implementation

#: How tables and logs name what vLLM brings itself.
LIBRARY = "vllm"


def _supports(spec: CallSpec) -> tuple[bool, str]:
    if spec.device != "cuda":
        return False, f"experts: vLLM's fused experts run on a GPU's tensors, not on {spec.device}"
    if spec.options.get("quantised"):
        return False, "experts: vLLM's fused experts are used for plain weights only"
    if spec.options.get("hidden_act") != "silu":
        return False, f"experts: vLLM's fused experts compute silu, not {spec.options.get('hidden_act')}"
    return True, "experts: vLLM's fused Triton experts for plain weights"


def _experts(
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


#: Below every kernel of a wheel, above the contracts.
EXPERTS = Implementation("experts", LIBRARY, _experts, _supports, priority=5)
