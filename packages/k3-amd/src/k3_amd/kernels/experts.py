"""Routed experts of one rank: work list, gate/up product with activation, down product, weighted sum.

Operator ``experts`` of the table; weights as ``prepare`` (or empty_packed and pack_expert_) made them. No host read
anywhere: a captured graph of one call replays for any routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from k3_amd import tuning
from k3_amd.kernels import launch
from k3_amd.kernels.device import experts as device
from k3_amd.kernels.device import worklist
from k3_amd.kernels.experts_layout import PackedExperts, prepare, supports_shape
from k3_amd.kernels.situ import activation_code
from k3_core.operators import CallSpec

__all__ = ["experts", "prepare", "supports", "warmup_profiles"]

FORM_CODES = {"unpacked": 0, "scaled": 1, "mxfp8": 2}
XCDS = 8

_count = launch.Launcher(worklist.count_kernel)
_total = launch.Launcher(worklist.total_kernel)
_place = launch.Launcher(worklist.place_kernel)
_w13 = launch.Launcher(device.w13_kernel)
_w2 = launch.Launcher(device.w2_kernel)
_quantize = launch.Launcher(device.quantize_kernel)
_combine = launch.Launcher(device.combine_kernel)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """sizes I (width of this rank) and L (latent); option quantised (or packed): MXFP4 weights; bfloat16 only."""
    ok, why = launch.supports_device(spec)
    if not ok:
        return ok, why
    if not spec.options.get("quantised", spec.options.get("packed", True)):
        return False, "experts: weights are not MXFP4; this kernel decodes MXFP4"
    if spec.dtype != torch.bfloat16:
        return False, f"experts: activations are {spec.dtype}; the kernels multiply bfloat16"
    width, latent = spec.sizes.get("I", 64), spec.sizes.get("L", 64)
    ok, why = supports_shape(width, latent)
    return (True, f"experts: MXFP4, bfloat16 activations, width {width}, latent {latent}") if ok else (
        False, f"experts: {why}"
    )  # fmt: skip


@dataclass
class Worklist:
    """Items (expert, first, count, 0) over pairs sorted by expert, on the device; grids use the bound on items."""

    sorted: Tensor
    work: Tensor
    number: Tensor
    max_items: int


def max_items(pairs: int, num_local: int, block: int) -> int:
    """No routing of that many pairs gives more items than this."""
    return max(1, min(pairs, min(num_local, pairs) + pairs // block))


def build_worklist(topk_ids: Tensor, num_local: int, block: int, expert_map: Tensor | None = None) -> Worklist:
    """Work list of ids int32 [T, top_k], global (with expert_map int32 [A]) or local; < 0: no expert.

    Two launches while the pairs fit one chunk, three beyond. Ids of a row are distinct (route promises it).
    """
    options = launch.options("worklist", topk_ids.device)
    chunk, rows = options.pop("CHUNK"), options.pop("ROWS")
    pairs = topk_ids.numel()
    eb = max(16, triton.next_power_of_2(num_local))
    chunks = triton.cdiv(pairs, chunk)
    items = max_items(pairs, num_local, block)
    sizes = [_round16(n) for n in (chunks * eb, eb, items * 4, pairs, 1)]
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=topk_ids.device)
    count, total, work, order, number = buffer.split(sizes)
    has_map = expert_map is not None
    mapping = topk_ids if expert_map is None else expert_map
    grid = (chunks, eb // options["EC"])
    _count(grid, topk_ids, mapping, count, pairs, num_local, EB=eb, HAS_MAP=has_map, CHUNK=chunk, **options)
    if chunks > 1:
        _total((eb // options["EC"],), count, total, chunks, EB=eb, ROWS=rows, **options)
    _place(
        grid, topk_ids, mapping, count, total if chunks > 1 else count, order, work, number, pairs, num_local,
        EB=eb, HAS_MAP=has_map, CHUNK=chunk, ROWS=rows, BM=block, **options,
    )  # fmt: skip
    return Worklist(order, work, number, items)


def _round16(value: int) -> int:
    """Keeps every part of a buffer on 64 bytes."""
    return triton.cdiv(max(value, 1), 16) * 16


def _grid(lst: Worklist, tiles: int) -> tuple[int]:
    return (triton.cdiv(lst.max_items * tiles, XCDS) * XCDS,)


def _mxfp8(x: Tensor, weights: PackedExperts) -> tuple[Tensor, Tensor]:
    """(values, scales) of the rows for the lossy form; (x, x) for the exact ones."""
    if weights.form != "mxfp8":
        return x, x
    rows, width = x.shape
    q = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    s = torch.empty(rows, width // 32, dtype=torch.uint8, device=x.device)
    options = launch.options("quantize", x.device)
    grid = (triton.cdiv(width, options["BLOCK"]), rows)
    _quantize(grid, x, q, s, x.stride(0), q.stride(0), s.stride(0), width, **options)
    return q, s


def _product_options(plan: dict[str, Any], which: str, K: int, weights: PackedExperts) -> dict[str, Any]:
    return launch.prepare(tuning.product(plan, which, K)) | {
        "K": K, "FORM": FORM_CODES[weights.form], "WIDE": weights.wide_scales, "UPCAST": launch.interpreting()
    }  # fmt: skip


def run_w13(
    x: Tensor, weights: PackedExperts, lst: Worklist, top_k: int, act: tuple[int, float, float], plan: dict[str, Any]
) -> Tensor:
    """Gate/up product and activation: [pairs, padded width] in sorted order (rows past the last pair unwritten)."""
    y = torch.empty(lst.sorted.numel(), weights.padded_width, dtype=x.dtype, device=x.device)
    options = _product_options(plan, "13", weights.latent, weights)
    tiles = weights.padded_width // options["BN"]
    values, scales = _mxfp8(x, weights)
    _w13(
        _grid(lst, tiles),
        values, scales, weights.w13, weights.s13, y, lst.sorted, lst.work, lst.number, act[1], act[2],
        values.stride(0), scales.stride(0), weights.w13.stride(0), weights.s13.stride(0), weights.w13.stride(1),
        weights.s13.stride(1), y.stride(0), top_k, tiles, ACT=act[0], **options,
    )  # fmt: skip
    return y


def run_w2(y: Tensor, weights: PackedExperts, lst: Worklist, plan: dict[str, Any]) -> Tensor:
    """Down product: [pairs, L] in pair order (rows of experts that are elsewhere unwritten)."""
    d = torch.empty(y.shape[0], weights.latent, dtype=y.dtype, device=y.device)
    options = _product_options(plan, "2", weights.padded_width, weights)
    tiles = weights.w2.shape[1] // options["BN"]
    values, scales = _mxfp8(y, weights)
    _w2(
        _grid(lst, tiles),
        values, scales, weights.w2, weights.s2, d, lst.sorted, lst.work, lst.number,
        values.stride(0), scales.stride(0), weights.w2.stride(0), weights.s2.stride(0), d.stride(0), tiles,
        weights.latent, **options,
    )  # fmt: skip
    return d


def _check(x: Tensor, weights: Any, ids: Tensor) -> None:
    if not isinstance(weights, PackedExperts):
        raise ValueError(f"experts: weights must come from prepare(), got {type(weights).__name__}")
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1 or x.shape[-1] != weights.latent:
        raise ValueError(
            f"experts: x must be bfloat16 [T, {weights.latent}] with a contiguous last axis, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError("experts: topk_ids must be int32 and contiguous")


def experts(
    x: Tensor,
    weights: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    hidden_act: str,
    situ_beta: float | None,
    situ_linear_beta: float | None,
    expert_map: Tensor | None = None,
    out: Tensor | None = None,
    plan: dict[str, Any] | None = None,
) -> Tensor:
    """Operator experts: x bf16 [T, L], ids int32 [T, top_k] distinct in a row -> this rank's weighted sum [T, L].

    plan: a row of ``tuning.expert_plans`` instead of the chosen one (tests). Raises ValueError for operands the kernels
    do not take.
    """
    _check(x, weights, topk_ids)
    tokens, top_k = topk_ids.shape
    act = activation_code(hidden_act, situ_beta, situ_linear_beta)
    if out is None:
        out = torch.empty(tokens, weights.latent, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    total = weights.num_experts if expert_map is None else expert_map.numel()
    plan = plan or tuning.expert_plan(launch.architecture(x.device), tokens * top_k / max(total, 1))
    lst = build_worklist(topk_ids, weights.num_experts, plan["BM"], expert_map)
    y = run_w13(x, weights, lst, top_k, act, plan)
    d = run_w2(y, weights, lst, plan)
    options = launch.options("combine", x.device)
    _combine(
        (triton.cdiv(weights.latent, options["BLOCK"]), tokens),
        d, topk_weights, topk_ids, topk_ids if expert_map is None else expert_map, out, weights.latent,
        weights.num_experts, top_k, d.stride(0), out.stride(0), TK=triton.next_power_of_2(top_k),
        HAS_MAP=expert_map is not None, **options,
    )  # fmt: skip
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """Token counts on each side of every boundary between plans, and of the one-chunk work list."""
    most = int(getattr(limits, "max_num_batched_tokens", 8192))
    text = getattr(config, "text", config)
    top_k, total = int(text.num_experts_per_token), int(text.num_experts)
    edges = {1, most}
    for arch in tuning.ARCHITECTURES:
        edges.add(tuning.launch("worklist", arch)["CHUNK"] // top_k)
        edges |= {int(r["max_pairs"] * total / top_k) for r in tuning.expert_plans(arch) if r["max_pairs"]}
    return [{"tokens": t} for t in sorted({min(max(e + d, 1), most) for e in edges for d in (0, 1)})]
