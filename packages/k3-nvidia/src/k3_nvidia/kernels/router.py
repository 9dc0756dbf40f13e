"""Router: logits in fp32, sigmoid scores, biased top-k, normalised weights, and the work list in the same launch.

    logits = x W_r^T                 bf16 operands, fp32 accumulation, fp32 result
    s = sigmoid(logits);  chosen = the top_k largest s + bias, ties to the lower expert id weight = s[chosen] / (sum
    s[chosen] + 1e-20) * factor

Up to 128 tokens the product is split along the hidden size over enough programs to stream W_r at full bandwidth; the
partial sums are added in a fixed order by the choosing kernel, so the same batch gives the same bits. Longer batches
use the library's product with fp32 output.
"""

# mypy: allow-untyped-defs
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators.triton_host import interpreting
from k3_nvidia.kernels.glue import pdl as dependent
from k3_nvidia.kernels.moe_worklist import (
    ONE_LAUNCH_TOKENS,
    Worklist,
    allocate,
    few,
    few_pairs,
    finish_long,
    finish_small,
    load_few_pairs,
    local_ids,
    mark,
)
from k3_nvidia.tuning import glue as tuning
from k3_nvidia.tuning import moe_step


@triton.jit(do_not_specialize=["tokens", "steps", "zero_words"])
def logits_kernel(
    x_ptr, w_ptr, out_ptr, zero_ptr, tokens, num_experts, hidden, stride_x, stride_w, steps, zero_words,
    BE: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, ZB: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (expert tile, split, token tile): partial logits [split, token, expert]; also zeroes ``zero_ptr``."""
    split = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    t = tl.program_id(2) * BT + tl.arange(0, BT)
    k = split * steps * BK + tl.arange(0, BK)
    w_ptrs = w_ptr + e.to(tl.int64)[:, None] * stride_w + k[None, :]
    x_ptrs = x_ptr + t.to(tl.int64)[None, :] * stride_x + k[:, None]
    acc = tl.zeros((BE, BT), tl.float32)
    for i in range(0, steps):
        inside = k + i * BK < hidden
        w = tl.load(w_ptrs, mask=(e < num_experts)[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=(t < tokens)[None, :] & inside[:, None], other=0.0)
        if INTERPRET:
            acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc)
        w_ptrs += BK
        x_ptrs += BK
    out = out_ptr + split * (tokens * num_experts) + t[None, :] * num_experts + e[:, None]
    tl.store(out, acc, mask=(e < num_experts)[:, None] & (t < tokens)[None, :])
    if (tl.program_id(0) == 0) & (split == 0) & (tl.program_id(2) == 0):
        for start in range(0, zero_words, ZB):
            z = start + tl.arange(0, ZB)
            tl.store(zero_ptr + z, tl.zeros((ZB,), tl.int32), mask=z < zero_words)


@triton.jit
def _sum_splits(logits_ptr, at, mask, stride_split, SPLITS: tl.constexpr):
    total = tl.load(logits_ptr + at, mask=mask, other=0.0)
    for i in tl.static_range(1, SPLITS):
        total += tl.load(logits_ptr + i * stride_split + at, mask=mask, other=0.0)
    return total


@triton.jit
def _scores(logits_ptr, bias_ptr, row, expert, there, stride_split, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Sigmoid scores of some experts, and the same with the bias that decides the choice."""
    score = 1.0 / (1.0 + tl.exp(-_sum_splits(logits_ptr, row + expert, there, stride_split, SPLITS)))
    if HAS_BIAS:
        return score, score + tl.load(bias_ptr + expert, mask=there, other=0.0)
    else:
        return score, score


@triton.jit
def _keys(choice, expert, there, EB: tl.constexpr):
    """64-bit integers, all different, in the order of (choice, lower id first): the value over the id counted from
    above.

    NaN is a value like any other, so that ids stay distinct; experts past the last come after all others.
    """
    lowest: tl.constexpr = -0x7FFFFFFF - 1
    key = (choice + 0.0).to(tl.int32, bitcast=True)
    key = key ^ ((key >> 31) & 0x7FFFFFFF)
    key = tl.where(there, tl.maximum(key, lowest + 1), lowest)
    return (key.to(tl.int64) << 32) | (EB - 1 - expert)


@triton.jit
def _expert_of(key, EB: tl.constexpr):
    return (EB - 1 - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _choose(
    logits_ptr, bias_ptr, row, num_experts, stride_split, EB: tl.constexpr, TK: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The TK best experts of one token, best first: the TK groups of eight with the best best member hold them all, so
    groups are chosen first, then experts among their members (two short sorting networks instead of TK dependent
    maxima over all)."""
    GS: tl.constexpr = 8
    GROUPS: tl.constexpr = EB // GS
    CHOSEN: tl.constexpr = min(TK, GROUPS)
    expert = tl.arange(0, GROUPS)[:, None] * GS + tl.arange(0, GS)[None, :]
    there = expert < num_experts
    _, choice = _scores(logits_ptr, bias_ptr, row, expert, there, stride_split, SPLITS, HAS_BIAS)
    best = tl.topk(tl.max(_keys(choice, expert, there, EB), 1), CHOSEN)
    member = (_expert_of(best, EB) // GS)[:, None] * GS + tl.arange(0, GS)[None, :]
    there = member < num_experts
    _, choice = _scores(logits_ptr, bias_ptr, row, member, there, stride_split, SPLITS, HAS_BIAS)
    key = tl.reshape(_keys(choice, member, there, EB), (CHOSEN * GS,))
    return _expert_of(tl.topk(key, TK), EB)


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, map_ptr, mask_ptr, ticket_ptr, work_ptr, number_ptr, offset_ptr,
    sorted_ptr,
    tokens, num_experts, num_local, top_k, stride_t, factor,
    EB: tl.constexpr, TK: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, RENORM: tl.constexpr,
    LIST: tl.constexpr, LB: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr,
    HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program of one token. LIST 0: choice only; 1: also mark the mask; 2: the last program also builds the list from
    it; 3: the last program builds the list of at most CHUNK pairs from the ids."""
    token = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = token.to(tl.int64) * stride_t
    stride_split = tokens * stride_t  # the splits lie one behind the other
    slot = tl.arange(0, TK)
    used = slot < top_k
    ids = _choose(logits_ptr, bias_ptr, row, num_experts, stride_split, EB, TK, SPLITS, HAS_BIAS)
    ids = tl.where(used, ids, 0)
    chosen = 1.0 / (1.0 + tl.exp(-_sum_splits(logits_ptr, row + ids, used, stride_split, SPLITS)))
    chosen = tl.where(used, chosen, 0.0)
    if RENORM:
        chosen = chosen / (tl.sum(chosen, 0) + 1e-20)
    out = token.to(tl.int64) * top_k + slot
    tl.store(weights_ptr + out, chosen * factor, mask=used)
    tl.store(ids_ptr + out, ids, mask=used)
    if (LIST == 1) | (LIST == 2):
        local, valid = local_ids(ids, map_ptr, num_local, HAS_MAP, used)
        mark(mask_ptr, local, tl.zeros((TK,), tl.int32) + token, valid, LB)
    if (LIST == 3) & (CHUNK == TK):
        few_pairs(ids, slot, used, map_ptr, work_ptr, number_ptr, sorted_ptr, num_local, CHUNK, HAS_MAP)
    elif LIST >= 2:
        tl.debug_barrier()
        if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tokens - 1:
            tl.debug_barrier()
            if LIST == 3:
                load_few_pairs(
                    ids_ptr, map_ptr, work_ptr, number_ptr, sorted_ptr, tokens * top_k, num_local, CHUNK, HAS_MAP
                )
            else:
                finish_small(
                    mask_ptr, ids_ptr, map_ptr, work_ptr, number_ptr, offset_ptr, sorted_ptr, tokens, top_k, num_local,
                    LB, WORDS, BN, HAS_MAP, CHUNK,
                )  # fmt: skip


def supports(
    num_experts: int, top_k: int, num_expert_group: int = 1, topk_group: int = 1, score: str = "sigmoid"
) -> tuple[bool, str]:
    """Whether the router kernels cover this routing, and why not."""
    if score != "sigmoid":
        return False, f"router: scores by {score}; only sigmoid"
    if topk_group < num_expert_group:
        return False, f"router: {topk_group} of {num_expert_group} expert groups; the kernel has no grouped choice"
    if not 1 <= top_k <= num_experts:
        return False, f"router: top {top_k} of {num_experts} experts"
    if num_experts > 4096:
        return False, f"router: {num_experts} experts; one program holds at most 4096"
    return True, f"router: top {top_k} of {num_experts}"


def split_plan(hidden: int, block_k: int, want: int = 14) -> tuple[int, int]:
    """(splits, steps a split) of the hidden size: about ``want`` splits, all of equal length where it divides."""
    blocks = triton.cdiv(hidden, block_k)
    splits = max(d for d in range(1, min(want, blocks) + 1) if blocks % d == 0)
    return splits, blocks // splits


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, zero: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """Partial fp32 logits [splits, T, E] of bf16 x [T, H] (any row stride) and weight [E, H]; their sum is x W^T.

    ``zero``: an int32 tensor set to zero on the way (the mask and ticket of the work list). One split beyond 128
    tokens.
    """
    tokens, hidden = x.shape
    num_experts = weight.shape[0]
    if x.stride(-1) != 1 or weight.stride(-1) != 1:
        raise ValueError("router_logits: x and weight need a contiguous last axis")
    if tokens > ONE_LAUNCH_TOKENS:
        if zero is not None:
            zero.zero_()
        if x.is_cuda and x.dtype == torch.bfloat16:
            return torch.mm(x, weight.t(), out_dtype=torch.float32).unsqueeze(0)
        return torch.mm(x.float(), weight.float().t()).unsqueeze(0)
    block_k = 128
    splits, steps = split_plan(hidden, block_k)
    out = torch.empty(splits, tokens, num_experts, dtype=torch.float32, device=x.device)
    block_t = max(16, triton.next_power_of_2(tokens))
    pdl = pdl and not interpreting()
    options = {"launch_pdl": True} if pdl else {}
    logits_kernel[(triton.cdiv(num_experts, 64), splits, 1)](
        x, weight, out, out if zero is None else zero, tokens, num_experts, hidden, x.stride(0), weight.stride(0),
        steps, 0 if zero is None else zero.numel(),
        BE=64, BT=block_t, BK=block_k, ZB=1024, PDL=pdl, INTERPRET=interpreting(),
        num_warps=4, num_stages=4 if block_t <= 64 else 3, **options,
    )  # fmt: skip
    return out


def _launch_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    factor: float,
    lst: Worklist | None,
    mode: int,
    num_local: int,
    expert_map: torch.Tensor | None,
    pdl: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    splits, tokens, num_experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, ids
    tk = triton.next_power_of_2(top_k)
    # One warp a token is right where tokens fill the device; alone it takes 18 us where four take 6.
    warps = tuning.choice_warps(mode >= 2, tokens <= ONE_LAUNCH_TOKENS)
    words = triton.next_power_of_2(triton.cdiv(tokens, 32)) if mode == 2 else 1
    chunk = 512 if lst is None or mode != 3 else few(tokens, tk)
    dummy = ids
    mask, ticket, work, number, offset, order = (
        (dummy,) * 6 if lst is None else (lst.mask, lst.ticket, lst.work, lst.number, lst.offset, lst.sorted)
    )
    pdl = pdl and not interpreting()
    options = {"launch_pdl": True} if pdl else {}
    route_kernel[(tokens,)](
        logits, ids if bias is None else bias, weights, ids, ids if expert_map is None else expert_map,
        mask, ticket, work, number, offset, order,
        tokens, num_experts, num_local, top_k, logits.stride(1), factor,
        EB=max(16, triton.next_power_of_2(num_experts)), TK=tk, SPLITS=splits, HAS_BIAS=bias is not None,
        RENORM=renormalize, LIST=mode, LB=16 if lst is None else lst.offset.numel(), WORDS=words,
        BN=lst.block_n if lst is not None and mode == 2 else 16,
        HAS_MAP=expert_map is not None, CHUNK=chunk, PDL=pdl, num_warps=warps, **options,
    )  # fmt: skip
    return weights, ids


def route(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    *,
    renormalize: bool,
    routed_scaling_factor: float,
    num_expert_group: int,
    topk_group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operator ``route``: logits fp32 [T, A] (any row stride) -> (topk_weights fp32, topk_ids int32) [T, top_k]."""
    ok, why = supports(logits.shape[1], top_k, num_expert_group, topk_group)
    if not ok:
        raise ValueError(why)
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError("route: logits must be float32 with a contiguous last axis")
    return _launch_route(
        logits.unsqueeze(0), correction_bias, top_k, renormalize, routed_scaling_factor, None, 0, 0, None,
        dependent(logits),
    )  # fmt: skip


def route_and_list(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    num_local: int,
    block_n: int,
    *,
    renormalize: bool = True,
    factor: float = 1.0,
    expert_map: torch.Tensor | None = None,
    pdl: bool = False,
    block_n2: int = 0,
    first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Worklist]:
    """Router product, choice and work list: two launches up to 128 tokens. Returns (topk_weights, topk_ids, list).

    x bf16 [T, H], weight bf16 [A, H], bias fp32 [A] or None. ``num_local`` experts are here; ``expert_map`` as in
    ``experts``. pdl: launched programmatically dependent; first: all but the product, which follows an event.
    """
    tokens = x.shape[0]
    lst = allocate(tokens, top_k, num_local, block_n, x.device, block_n2)
    eb = lst.offset.numel()
    if tokens <= ONE_LAUNCH_TOKENS:
        mode = 3 if few(tokens, triton.next_power_of_2(top_k)) else 2
        marks = 0 if mode == 3 else triton.next_power_of_2(triton.cdiv(max(tokens, 1), 32)) * eb
        zero = torch.empty(marks + 16, dtype=torch.int32, device=x.device)
        lst.mask, lst.ticket = zero[:marks], zero[marks:]
        logits = router_logits(x, weight, zero, pdl and not first)
        weights, ids = _launch_route(logits, bias, top_k, renormalize, factor, lst, mode, num_local, expert_map, pdl)
        return weights, ids, lst
    words = triton.cdiv(tokens, 32)
    scratch = torch.empty(2 * words * eb + eb + 16, dtype=torch.int32, device=x.device)
    zero, prefix, count = scratch.split((words * eb + 16, words * eb, eb))
    lst.mask, lst.ticket = zero[: words * eb], zero[words * eb :]
    logits = router_logits(x, weight, zero)
    weights, ids = _launch_route(logits, bias, top_k, renormalize, factor, lst, 1, num_local, expert_map, False)
    emap = ids if expert_map is None else expert_map
    finish_long(lst, ids, emap, expert_map is not None, prefix, count, num_local)
    return weights, ids, lst


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """The last token count of each variant: one token, then powers of two up to the longest of two launches, and
    where another schedule begins."""
    return [{"tokens": t} for t in sorted({1, 16, 32, 64, ONE_LAUNCH_TOKENS, *moe_step.edges()})]
