"""Routed experts of one rank: work list, gate/up product with activation, down product, weighted sum.

Operator ``experts`` of the table in ``k3_core.operators`` (weights as ``prepare`` returns them), and ``moe_forward``,
which starts from the router's input and shares its launches. No host read anywhere: a CUDA graph of one call replays
for any routing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton

from k3_core.operators.triton_host import interpreting
from k3_nvidia.kernels import moe_worklist, router
from k3_nvidia.kernels.experts_gemm import w2_kernel, w2_wide_kernel, w13_kernel
from k3_nvidia.kernels.experts_one import PARTS, w2_one_kernel, w13_one_kernel
from k3_nvidia.kernels.moe_combine import combine
from k3_nvidia.kernels.moe_layout import SwizzledExperts, empty_swizzled, pack_expert_, supports_shape
from k3_nvidia.kernels.moe_worklist import Worklist
from k3_nvidia.kernels.situ import activation_code
from k3_nvidia.tuning import experts as tuning
from k3_nvidia.tuning import moe_step
from k3_nvidia.tuning.experts import Plan

ONE_SLOTS = 16  # experts of one token that one program of its down product holds
NARROW_BLOCKS = 12  # up to this many column blocks (width 768) the down product keeps y on chip


def supports(
    width: int, latent: int, dtype: torch.dtype = torch.bfloat16, capability: int = 90, quantised: bool = True
) -> tuple[bool, str]:
    """Whether the kernels take experts of that width and latent size, and why not. capability: 90 for sm_90."""
    if not quantised:
        return False, "experts: weights are not MXFP4; this kernel decodes MXFP4"
    if dtype != torch.bfloat16:
        return False, f"experts: activations are {dtype}; the kernels multiply bfloat16"
    if capability < 80:
        return False, f"experts: compute capability {capability / 10}; bfloat16 tensor cores start at 8.0"
    ok, why = supports_shape(width, latent)
    return (True, f"experts: MXFP4 W4A16, width {width}, latent {latent}") if ok else (False, f"experts: {why}")


def prepare(weights: Any) -> SwizzledExperts:
    """``ExpertWeights`` (released layout, gate rows before up rows) -> kernel layout, on the device of the weights."""
    if weights.w13_scale is None or weights.w2_scale is None:
        raise ValueError("experts: weights are not MXFP4 (no scales)")
    experts, rows, half = weights.w13.shape
    width, latent = rows // 2, half * 2
    out = empty_swizzled(experts, width, latent, weights.w13.device)
    pack_expert_(
        out,
        slice(None),
        (weights.w13[:, :width], weights.w13_scale[:, :width]),
        (weights.w13[:, width:], weights.w13_scale[:, width:]),
        (weights.w2, weights.w2_scale),
    )
    return out


def _plan(tokens: int, top_k: int, num_experts: int, weights: SwizzledExperts) -> Plan:
    device = weights.w13.device
    if device.type != "cuda":
        return tuning.choose(tokens, top_k, num_experts, "default", 90, weights.padded_width)
    props = torch.cuda.get_device_properties(device)
    capability = props.major * 10 + props.minor
    return tuning.choose(tokens, top_k, num_experts, props.name, capability, weights.padded_width)


def _largest_divisor(value: int, most: int) -> int:
    """Largest power of two <= most that divides value."""
    size = 1
    while size * 2 <= most and value % (size * 2) == 0:
        size *= 2
    return size


def _between(dtype: torch.dtype) -> torch.dtype:
    """Dtype between the products; the interpreter truncates bfloat16 instead of rounding it, so it keeps fp32."""
    return torch.float32 if interpreting() else dtype


@lru_cache(maxsize=16)
def _wgmma(device: torch.device) -> bool:
    """Whether products of 16 columns and more are Hopper's warpgroup instruction, which has to be waited for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _down(weights: SwizzledExperts) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Codes and scale words of the down products, and how far an expert's lie apart: what gate/up asks for ahead."""
    scales = weights.s2.view(torch.int32)
    return weights.w2, scales, weights.w2.stride(0), scales.stride(0)


def _next(plan: Plan) -> int:
    return 0 if interpreting() else plan.next_quarters


def run_w13(
    x: torch.Tensor, weights: SwizzledExperts, lst: Worklist, top_k: int, act: tuple[int, float, float], plan: Plan
) -> torch.Tensor:
    """Gate/up product and activation: [pairs, padded width] bf16 in sorted order (rows past the last pair
    unwritten)."""
    pairs = lst.sorted.numel()
    y = torch.empty(pairs, weights.padded_width, dtype=_between(x.dtype), device=x.device)
    mb, kb = weights.w13.shape[1] * 4, weights.w13.shape[2]
    mt, kt = _largest_divisor(mb, plan.mt13), _largest_divisor(kb, plan.kt13)
    scales = weights.s13.view(torch.int32)
    pdl = plan.pdl and not interpreting()
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    if plan.regs13 and not interpreting():
        options["maxnreg"] = plan.regs13
    w13_kernel[(lst.max_items * (mb // mt),)](
        x, weights.w13, scales, y, lst.sorted, lst.work, lst.number, act[1], act[2],
        x.stride(0), weights.w13.stride(0), scales.stride(0), y.stride(0), top_k, mb, kb, *_down(weights),
        MT=mt, KT=kt, BN=plan.block_n, BX=plan.extra_n, ACT=act[0], WIDE=weights.wide_scales, NEXT=_next(plan), PDL=pdl,
        WGMMA=_wgmma(x.device), INTERPRET=interpreting(), num_warps=plan.warps13, num_stages=plan.stages13, **options,
    )  # fmt: skip
    return y


def run_w13_one(
    x: torch.Tensor, weights: SwizzledExperts, lst: Worklist, act: tuple[int, float, float], plan: Plan
) -> torch.Tensor:
    """``run_w13`` of one token, where ``one_token`` allows it."""
    y = torch.empty(lst.sorted.numel(), weights.padded_width, dtype=_between(x.dtype), device=x.device)
    mb, kb = weights.w13.shape[1] * 4, weights.w13.shape[2]
    mt, kt = _largest_divisor(mb, plan.one13), _largest_divisor(kb // int(PARTS), 2)
    scales = weights.s13.view(torch.int32)
    pdl = plan.pdl and not interpreting()
    options = {"launch_pdl": True} if pdl else {}
    w13_one_kernel[(lst.max_items * (mb // mt),)](
        x, weights.w13, scales, y, lst.work, lst.number, act[1], act[2],
        weights.w13.stride(0), scales.stride(0), y.stride(0), mb, kb, *_down(weights),
        MT=mt, KT=kt, ACT=act[0], WIDE=weights.wide_scales, NEXT=_next(plan), PDL=pdl, INTERPRET=interpreting(),
        num_warps=4, num_stages=plan.one_stages, **options,
    )  # fmt: skip
    return y


def run_w2_one(
    y: torch.Tensor, weights: SwizzledExperts, lst: Worklist, topk_weights: torch.Tensor, plan: Plan, out: torch.Tensor
) -> torch.Tensor:
    """Down product and weighted sum of one token, where ``one_token`` allows it: writes ``out`` [1, L]."""
    mb, kb = weights.w2.shape[1] * 4, weights.w2.shape[2]
    mt = _largest_divisor(mb, plan.one2)
    pdl = plan.pdl and not interpreting()
    options = {"launch_pdl": True} if pdl else {}
    scales = weights.s2.view(torch.int32)
    high = 1 << (kb.bit_length() - 1)
    w2_one_kernel[(triton.cdiv(mb // mt, plan.one_rows),)](
        y, weights.w2, scales, out, topk_weights, lst.sorted, lst.work, lst.number,
        y.stride(0), weights.w2.stride(0), scales.stride(0), plan.one_rows, mb, weights.latent,
        K1=high, K2=max(kb - high, 1), HAS2=kb > high, MT=mt, SLOTS=ONE_SLOTS,
        WIDE=weights.wide_scales, PDL=pdl, STAGES=plan.one_rows + 1, INTERPRET=interpreting(), num_warps=4, **options,
    )  # fmt: skip
    return out


def one_token(weights: SwizzledExperts, tokens: int, top_k: int, plan: Plan) -> tuple[bool, bool]:
    """Whether the gate/up and the down product of this call run in the form for one token (``experts_one``)."""
    if tokens != 1:
        return False, False
    kb13, kb2 = weights.w13.shape[2], weights.w2.shape[2]
    rest = kb2 - (1 << (kb2.bit_length() - 1))
    narrow = kb2 <= NARROW_BLOCKS and rest & (rest - 1) == 0
    return plan.one13 > 0 and kb13 % int(PARTS) == 0, plan.one2 > 0 and narrow and top_k <= ONE_SLOTS


def run_w2(y: torch.Tensor, weights: SwizzledExperts, lst: Worklist, plan: Plan) -> torch.Tensor:
    """Down product: [pairs, L] bf16 in pair order (rows of experts that are elsewhere unwritten)."""
    pairs, latent = lst.sorted.numel(), weights.latent
    d = torch.empty(pairs, latent, dtype=y.dtype, device=y.device)
    mb, kb = weights.w2.shape[1] * 4, weights.w2.shape[2]
    mt = _largest_divisor(mb, plan.mt2)
    pdl = plan.pdl and not interpreting()
    options = {"launch_pdl": True} if pdl else {}
    scales = weights.s2.view(torch.int32)
    common = (y, weights.w2, scales, d, lst.sorted, lst.work2, lst.number2)
    bn, bx = plan.down_n if lst.block_n2 == sum(plan.down_n) else (plan.block_n, plan.extra_n)
    if bn + bx < lst.block_n2:
        raise ValueError(f"experts: items of {lst.block_n2} tokens, the down product's tile holds {bn + bx}")
    strides = (y.stride(0), weights.w2.stride(0), scales.stride(0), d.stride(0))
    high = 1 << (kb.bit_length() - 1)
    rest = kb - high
    if kb <= NARROW_BLOCKS and rest & (rest - 1) == 0 and plan.rows2 > 0:
        per_group = max(1, plan.rows2 * plan.mt2 // mt)
        groups = triton.cdiv(mb // mt, per_group)
        w2_kernel[(lst.max_items2 * groups,)](
            *common, *strides, groups, per_group, mb, latent,
            K1=high, K2=max(rest, 1), HAS2=rest > 0, MT=mt, BN=bn, BX=bx,
            WIDE=weights.wide_scales, PDL=pdl, STAGES=plan.stages2, INTERPRET=interpreting(),
            num_warps=plan.warps2, num_stages=plan.stages2, **options,
        )  # fmt: skip
        return d
    mt, kt = _largest_divisor(mb, plan.wide_mt), _largest_divisor(kb, plan.kt2)
    w2_wide_kernel[(lst.max_items2 * (mb // mt),)](
        *common, *strides, mb, kb, latent,
        MT=mt, KT=kt, BN=bn, BX=bx, WIDE=weights.wide_scales, PDL=pdl,
        WGMMA=_wgmma(y.device), INTERPRET=interpreting(), num_warps=plan.warps2, num_stages=plan.stages2, **options,
    )  # fmt: skip
    return d


def _check(x: torch.Tensor, weights: SwizzledExperts, ids: torch.Tensor) -> None:
    if not isinstance(weights, SwizzledExperts):
        raise ValueError(f"experts: weights must come from prepare(), got {type(weights).__name__}")
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1 or x.shape[-1] != weights.latent:
        raise ValueError(
            f"experts: x must be bfloat16 [T, {weights.latent}] with a contiguous last axis, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    if x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError("experts: rows of x must start on 16 bytes")
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError("experts: topk_ids must be int32 and contiguous")


def experts(
    x: torch.Tensor,
    weights: SwizzledExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    hidden_act: str,
    situ_beta: float | None,
    situ_linear_beta: float | None,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Operator ``experts``: x bf16 [T, L], ids int32 [T, top_k] distinct in a row -> this rank's weighted sum [T, L].

    Raises ValueError for operands the kernels do not take. ``plan`` overrides the tuned tiles (benchmarks, tests).
    """
    _check(x, weights, topk_ids)
    tokens, top_k = topk_ids.shape
    act = activation_code(hidden_act, situ_beta, situ_linear_beta)
    if out is None:
        out = torch.empty(tokens, weights.latent, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    total = weights.num_experts if expert_map is None else expert_map.numel()
    plan = plan or _plan(tokens, top_k, total, weights)
    lst = moe_worklist.build(topk_ids, weights.num_experts, plan.item_n, expert_map, plan.pdl, sum(plan.down_n))
    return _products(x, weights, Chosen(topk_weights, topk_ids, lst, plan), expert_map, act, out)


@dataclass(frozen=True)
class Chosen:
    """What the router decided for a batch: weights fp32 and ids int32 [T, top_k], the work list and the plan it fits.

    every: each id names an expert of this rank.
    """

    weights: torch.Tensor
    ids: torch.Tensor
    list: Worklist
    plan: Plan
    every: bool = False


def _products(
    x: torch.Tensor,
    weights: SwizzledExperts,
    chosen: Chosen,
    expert_map: torch.Tensor | None,
    act: tuple[int, float, float],
    out: torch.Tensor,
    first: bool = False,
) -> torch.Tensor:
    """first: the gate/up product follows an event of another stream and is not launched programmatically dependent."""
    tokens, top_k = chosen.ids.shape
    lst, plan = chosen.list, chosen.plan
    one13, one2 = one_token(weights, tokens, top_k, plan)
    begin = replace(plan, pdl=False) if first else plan
    y = run_w13_one(x, weights, lst, act, begin) if one13 else run_w13(x, weights, lst, top_k, act, begin)
    if one2:
        return run_w2_one(y, weights, lst, chosen.weights, plan, out)
    d = run_w2(y, weights, lst, plan)
    block, pdl = plan.combine_block, plan.pdl
    return combine(d, chosen.weights, chosen.ids, weights.num_experts, expert_map, out, block, pdl, chosen.every)


def choose_experts(
    hidden: torch.Tensor,
    router_weight: torch.Tensor,
    router_bias: torch.Tensor | None,
    weights: SwizzledExperts,
    top_k: int,
    *,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    expert_map: torch.Tensor | None = None,
    plan: Plan | None = None,
    first: bool = False,
) -> Chosen:
    """The first half of ``moe_forward``: hidden bf16 [T, H], T > 0, decides which experts of ``weights`` work.

    first: the router's product follows an event of another stream (see :mod:`k3_core.vllm.serving.beside`).
    """
    plan = plan or _plan(hidden.shape[0], top_k, router_weight.shape[0], weights)
    topk_weights, topk_ids, lst = router.route_and_list(
        hidden, router_weight, router_bias, top_k, weights.num_experts, plan.item_n, renormalize=renormalize,
        factor=routed_scaling_factor, expert_map=expert_map, pdl=plan.pdl, block_n2=sum(plan.down_n), first=first,
    )  # fmt: skip
    # The router chose top_k different experts of its own rows, whatever the logits: NaN has a place in its order, too.
    # Only for few tokens, where the sum's time is that of its loads one after another.
    every = plan.pdl and expert_map is None and router_weight.shape[0] == weights.num_experts
    return Chosen(topk_weights, topk_ids, lst, plan, every)


def apply_experts(
    latent: torch.Tensor,
    weights: SwizzledExperts,
    chosen: Chosen,
    *,
    hidden_act: str,
    situ_beta: float | None,
    situ_linear_beta: float | None,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    first: bool = False,
) -> torch.Tensor:
    """The second half of ``moe_forward``: latent bf16 [T, L] through the chosen experts -> weighted sum [T, L]."""
    act = activation_code(hidden_act, situ_beta, situ_linear_beta)
    if out is None:
        out = torch.empty(latent.shape[0], weights.latent, dtype=latent.dtype, device=latent.device)
    _check(latent, weights, chosen.ids)
    return _products(latent, weights, chosen, expert_map, act, out, first)


def moe_forward(
    hidden: torch.Tensor,
    latent: torch.Tensor,
    router_weight: torch.Tensor,
    router_bias: torch.Tensor | None,
    weights: SwizzledExperts,
    top_k: int,
    *,
    hidden_act: str,
    situ_beta: float | None,
    situ_linear_beta: float | None,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Router and experts together: hidden bf16 [T, H] routes, latent bf16 [T, L] is what the experts see -> [T, L].

    Five launches up to 128 tokens. Same arithmetic as ``router_logits``, ``route`` and ``experts`` in a row.
    """
    if hidden.shape[0] == 0:
        return torch.empty(0, weights.latent, dtype=latent.dtype, device=latent.device) if out is None else out
    chosen = choose_experts(
        hidden, router_weight, router_bias, weights, top_k, renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor, expert_map=expert_map, plan=plan,
    )  # fmt: skip
    return apply_experts(
        latent, weights, chosen, hidden_act=hidden_act, situ_beta=situ_beta, situ_linear_beta=situ_linear_beta,
        expert_map=expert_map, out=out,
    )  # fmt: skip


def _device() -> tuple[str, int]:
    """(name, capability) of the first GPU, or those of the rule for unmeasured ones."""
    if not torch.cuda.is_available():
        return "default", 90
    major, minor = torch.cuda.get_device_capability(0)
    return torch.cuda.get_device_name(0), 10 * major + minor


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """The last token count of each class: of the form for one token, of the masks, of the plans of every width, of
    the schedules of a layer."""
    text = getattr(config, "text", config)
    top_k, total = int(text.num_experts_per_token), int(text.num_experts)
    edges = {1, 32, 64, moe_worklist.ONE_LAUNCH_TOKENS, *moe_step.edges()}
    for row in tuning.rows(tuning.measured(*_device())):
        if row.max_pairs < tuning.ANY:
            edges.add(tuning.last_tokens(row.max_pairs, top_k, total))
    return [{"tokens": t} for t in sorted(edges) if t >= 1]
