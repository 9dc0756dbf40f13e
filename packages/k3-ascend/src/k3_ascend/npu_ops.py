"""Operators of the table through torch_npu and vllm-ascend's compiled operators.

Each function has the signature of ``k3_core.operators.table``; beside it stands what it supports. Constraints that the
vendor documents are data in :mod:`k3_ascend.constraints` and are checked against these calls by the tests.

An operator that writes to an argument is used through the tensor that it returns: where a schema declares the result
to be that argument (or leaves the alias undeclared), graph functionalisation keeps only writes that somebody reads
from the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from k3_core.contracts import kda
from k3_core.operators import CallSpec

#: vllm-ascend's numbers for the convolution's activation and modes, and its padding slot.
SILU, PREFILL_MODE, PAD_SLOT = 1, 0, -1
#: npu_moe_gating_top_k: sigmoid scores; groups scored by the sum of their two best.
SIGMOID, TOP_TWO = 1, 1
RENORMALIZE_EPS = 1e-20


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


# --------------------------------------------------------------------------------------------------------------- router


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
    """Operator ``route`` by ``npu_moe_gating_top_k``: sigmoid, bias in the choice only, weights renormalised."""
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits,
        top_k,
        bias=correction_bias,
        k_group=topk_group,
        group_count=num_expert_group,
        group_select_mode=TOP_TWO,
        renorm=0,
        norm_type=SIGMOID,
        out_flag=False,
        routed_scaling_factor=routed_scaling_factor,
        eps=RENORMALIZE_EPS,
    )
    return weights, ids


def route_supports(spec: CallSpec) -> tuple[bool, str]:
    """What ``npu_moe_gating_top_k`` documents: at most 2048 experts, groups of more than two, weights renormalised."""
    experts, groups = spec.sizes.get("A", 0), spec.options.get("num_expert_group", 1)
    if not spec.options.get("renormalize", True):
        return False, "route: npu_moe_gating_top_k always renormalises sigmoid scores"
    if experts > 2048 or -(-experts // groups // 32) * 32 * groups > 2048:
        return False, f"route: npu_moe_gating_top_k takes at most 2048 experts (groups rounded up to 32), not {experts}"
    if experts % groups or experts // groups <= 2:
        return False, f"route: npu_moe_gating_top_k needs groups of more than two experts, not {experts} in {groups}"
    return True, "route: npu_moe_gating_top_k"


# ----------------------------------------------------------------------------------------------------------------- norm


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Operator ``gated_norm``: ``npu_rms_norm`` and the gate in fp32, one rounding."""
    normed = torch.ops.npu.npu_rms_norm(o.float(), weight.float(), eps)[0]
    return _deliver((normed * torch.sigmoid(gate.float())).to(o.dtype), out)


# ------------------------------------------------------------------------------------------------------------------ kda


def kda_decode(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    o_norm_weight: Tensor,
    o_norm_eps: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Operator ``kda_decode``: the recurrence by vllm-ascend's operator, everything around it by tensor operations.

    Shapes do not depend on data, so a graph can capture it. Padding rows have length 0 and give zeros.
    """
    live = slot_mapping > 0
    slots = torch.where(live, slot_mapping, 0)
    mixed = _conv_step(qkv, conv_weight, conv_state, slots, live)
    q, k, v = (part.unflatten(-1, z.shape[1:]) for part in mixed.chunk(3, dim=-1))
    state = recurrent_state
    o = torch.ops._C_ascend.npu_recurrent_gated_delta_rule(
        _unit(q),
        _unit(k),
        v.contiguous(),
        state,
        beta=beta.to(qkv.dtype),
        scale=float(z.shape[-1]) ** -0.5,
        actual_seq_lengths=live.to(torch.int32),
        ssm_state_indices=slots.to(torch.int32),
        num_accepted_tokens=None,
        g=None,
        gk=kda.gate(z, a_log, dt_bias, lower_bound),
    )
    result = gated_norm(o, gate, o_norm_weight, o_norm_eps)
    result = torch.where(live[:, None, None], result, torch.zeros((), dtype=result.dtype, device=result.device))
    return _deliver(result, out)


def _conv_step(x: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, live: Tensor) -> Tensor:
    """One step of the convolution with SiLU in fp32: x [T, C] -> [T, C]; the window moves on in live rows.

    Rows that are not live write back the bits that slot 0 holds.
    """
    taps = weight.shape[-1]
    old = conv_state[slots]
    window = torch.cat([old[..., : taps - 1], x.unsqueeze(-1).to(old.dtype)], dim=-1)
    mixed = functional.silu((window.float() * weight.float()).sum(-1)).to(x.dtype)
    moved = torch.cat([window[..., 1:], old[..., taps - 1 :]], dim=-1)
    conv_state.index_put_((slots,), torch.where(live[:, None, None], moved, old))
    return mixed


def _unit(x: Tensor) -> Tensor:
    """Rows of length one (the contract's norm), in the dtype of x, which the operator takes."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + kda.L2_EPS)).to(x.dtype)


def kda_decode_supports(spec: CallSpec) -> tuple[bool, str]:
    """bfloat16 rows, heads and dimensions up to 256; a state in fp32 (by the operator's source) or bfloat16."""
    if spec.dtype != torch.bfloat16:
        return False, f"kda_decode: npu_recurrent_gated_delta_rule takes bfloat16 rows, not {spec.dtype}"
    large = {s: n for s in ("N", "D") if (n := spec.sizes.get(s, 0)) > 256}
    if large:
        return False, f"kda_decode: npu_recurrent_gated_delta_rule takes at most 256 heads of 256, not {large}"
    return compiled_operator(spec, "npu_recurrent_gated_delta_rule")


def short_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Operator ``short_conv`` by vllm-ascend's ``npu_causal_conv1d_custom``, taps in the activations' dtype."""
    rows = x.contiguous()
    result = torch.ops._C_ascend.npu_causal_conv1d_custom(
        torch.zeros_like(rows),  # rows of null slots are skipped by the operator and stay zero
        rows,
        weight.t().to(x.dtype).contiguous(),
        conv_state.transpose(1, 2),
        None,
        cu_seqlens.to(torch.int32),
        torch.where(slot_mapping > 0, slot_mapping, PAD_SLOT).to(torch.int32),
        has_initial_state,
        None,
        SILU,
        PAD_SLOT,
        PREFILL_MODE,
    )
    return _deliver(result, out)


def short_conv_supports(spec: CallSpec) -> tuple[bool, str]:
    """For Kimi-Linear, which alone has no bound of the gate and stores its taps in bfloat16."""
    if spec.options.get("lower_bound") is not None:
        return False, "short_conv: npu_causal_conv1d_custom would round K3's fp32 taps to the activations' dtype"
    return compiled_operator(spec, "npu_causal_conv1d_custom")


def compiled_operator(spec: CallSpec, name: str) -> tuple[bool, str]:
    """Whether vllm-ascend's compiled operators are loaded and have ``name``."""
    from vllm_ascend.utils import enable_custom_op

    if not enable_custom_op():
        return False, f"{spec.operator}: vllm-ascend's compiled operators are not loaded"
    namespace: Any = torch.ops._C_ascend
    if not hasattr(namespace, name):
        return False, f"{spec.operator}: this vllm-ascend has no _C_ascend::{name}"
    return True, f"{spec.operator}: _C_ascend::{name}"


def chunked_kda_operator() -> str:
    """What is said about the chunked KDA operator of later releases: whether it is there. It is not relied on."""
    present = hasattr(torch.ops._C_ascend, "chunk_kda_fwd")
    return "_C_ascend::chunk_kda_fwd is present and not used" if present else "_C_ascend::chunk_kda_fwd is absent"
