"""vllm-ascend's communication paths of a mixture of experts, with our products between dispatch and combine.

One module for all that is particular to vllm-ascend 0.23 here: its configuration object, its typed stages, its choice
of a path for each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from k3_ascend.experts import Rows
from k3_core.config import TextConfig
from k3_core.errors import UnsupportedError

if TYPE_CHECKING:
    from k3_ascend.moe import MoE

#: What has been registered in this process; all layers of a model agree.
_registered: dict[str, Any] = {}


def register(text: TextConfig, vllm_config: Any, local_ids: range, width: int) -> None:
    """Make the paths for experts of these sizes, once. ``width`` is one rank's."""
    from vllm.distributed import get_dp_group, get_ep_group, get_tensor_model_parallel_world_size, get_tp_group
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm_ascend.distributed.parallel_state import get_mc2_group
    from vllm_ascend.ops.fused_moe.moe_comm_method import setup_moe_comm_method

    parallel = FusedMoEParallelConfig.make(
        tp_size_=get_tensor_model_parallel_world_size(),
        pcp_size_=1,
        dp_size_=get_dp_group().world_size,
        sp_size_=1,
        vllm_parallel_config=vllm_config.parallel_config,
    )
    key = (id(vllm_config), text.num_experts, len(local_ids), width)
    if _registered.get("key") == key:
        return
    config = FusedMoEConfig(
        num_experts=text.num_experts,
        experts_per_token=text.num_experts_per_token,
        hidden_dim=text.expert_hidden_size,
        intermediate_size_per_partition=width,
        num_local_experts=len(local_ids),
        num_logical_experts=text.num_experts,
        activation=MoEActivation.SILU,  # a field that must be set; no stage used here looks at it
        device=vllm_config.device_config.device or "npu",
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=parallel,
        in_dtype=vllm_config.model_config.dtype,
        max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )
    config.tp_group, config.dp_group = get_tp_group(), get_dp_group()
    if config.ep_size > 1:
        config.ep_group, config.mc2_group = get_ep_group(), get_mc2_group()
    setup_moe_comm_method(config)
    _registered.update(key=key)


def refuse_fused(path: str) -> None:
    """Raise UnsupportedError for a path that computes SwiGLU inside."""
    if path == "FUSED_MC2":
        raise UnsupportedError("vllm-ascend's fused MC2 path computes SwiGLU; set enable_fused_mc2 to 0")


def run(layer: MoE, latent: Tensor, logits: Tensor) -> tuple[Tensor, bool]:
    """The weighted sum of experts [T, L] of latents [T, L], and whether it is the sum over all ranks.

    logits: fp32 [T, E]; experts are chosen after the path has cut or gathered the tokens.
    """
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX
    from vllm_ascend.ops.fused_moe.moe_comm_method import AllGatherCommImpl
    from vllm_ascend.ops.fused_moe.moe_runtime_args import build_fused_experts_input, build_token_dispatch_input
    from vllm_ascend.quantization.quant_type import QuantType

    path = _EXTRA_CTX.moe_comm_method
    if path is None:
        raise RuntimeError("vllm-ascend chose no communication path: the forward context is not its own")
    refuse_fused(_EXTRA_CTX.moe_comm_type.name)
    store = layer.experts.store
    quant_type = QuantType[store.quant_type]  # type: ignore[attr-defined]
    prepared = path.prepare(hidden_states=latent, router_logits=logits, quant_type=QuantType.NONE)
    weights, ids = layer.gate.choose(prepared.router_logits)
    arguments = build_fused_experts_input(
        hidden_states=prepared.hidden_states,
        # MC2 combines with fp32 weights; the other paths end in npu_moe_token_unpermute, which documents bfloat16.
        topk_weights=weights if _EXTRA_CTX.moe_comm_type.name == "MC2" else weights.to(latent.dtype),
        topk_ids=ids,
        w1=store.w13,  # type: ignore[attr-defined]
        w2=store.w2,  # type: ignore[attr-defined]
        quant_type=quant_type,
        dynamic_eplb=False,
        expert_map=layer.expert_map,
        mc2_mask=prepared.mc2_mask,
        pertoken_scale=prepared.pertoken_scale,
        **(_mxfp() if quant_type is QuantType.W4A8MXFP else {}),
    )
    dispatched = path.token_dispatcher.token_dispatch(
        token_dispatch_input=build_token_dispatch_input(fused_experts_input=arguments)
    )
    rows = Rows(dispatched.hidden_states, dispatched.dynamic_scale, dispatched.group_list, dispatched.group_list_type)
    computed = store.mlp(rows, layer.activation)  # type: ignore[attr-defined]
    combined = path.token_dispatcher.token_combine(hidden_states=computed, combine_metadata=dispatched.combine_metadata)
    partial = isinstance(path, AllGatherCommImpl)
    routed = path.finalize(
        hidden_states=combined,
        reduce_results=partial,
        padded_hidden_states_shape=prepared.padded_hidden_states_shape,
    )
    return routed, not partial


def _mxfp() -> dict[str, Any]:
    """vllm-ascend's description of MXFP4 weights with MXFP8 activations."""
    import torch_npu

    return {
        "mxfp_act_quant_type": torch.float8_e4m3fn,
        "mxfp_weight_quant_type": torch_npu.float4_e2m1fn_x2,
        "mxfp_scale_dtype": torch_npu.float8_e8m0fnu,
        "mxfp_per_token_scale_dtype": torch_npu.float8_e8m0fnu,
        "mxfp_use_bf16": True,
    }
