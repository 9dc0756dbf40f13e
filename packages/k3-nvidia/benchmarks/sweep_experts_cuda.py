"""The experts' CUDA C++ products (``kernels.experts_cuda``) beside the tuning table's Triton plan.

``python sweep_experts_cuda.py OUT [--only tp8.8192,...] [--apply]``. Every tile is compiled first (threads), compared
with float64 thrice, then timed alone in graphs over three weight sets (weights cold); the best of each product makes
plans that are checked and timed as whole calls: the table's, gate/up or down in CUDA C++, both. Writes
``OUT/experts_cuda_sweep.json``; ``--apply`` puts a row's best whole call into ``tuning/experts.json``.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import experts_case as case
import harness
import sweep_experts as sweep
import torch

from k3_nvidia.kernels import experts as ours
from k3_nvidia.kernels import experts_cuda
from k3_nvidia.tuning import experts as tuning
from k3_nvidia.tuning.experts import CudaTile, Plan

ROWS = [("tp8", 8192), ("tp8", 1024), ("tp16", 8192), ("ep16", 8192), ("tp16", 1024), ("tp8", 128)]
LONG = [CudaTile(2, 2, 176, 7), CudaTile(2, 2, 160, 7), CudaTile(2, 2, 128, 9)]
MIDDLE = [CudaTile(2, 2, 32, 8, 2), CudaTile(2, 2, 48, 7, 2), CudaTile(2, 2, 32, 17)]
FEW = [CudaTile(2, 2, 16, 10, 2), CudaTile(2, 2, 16, 20)]
W13 = {8192: LONG, 1024: MIDDLE, 128: FEW}


def tiles13(shape: case.Shape, tokens: int) -> list[CudaTile]:
    """Tiles to try for gate/up; 384 rows also as two parts of 192."""
    narrow = [CudaTile(3, 1, 160, 8)] if shape.width == 192 and tokens == 8192 else []
    return narrow + W13[tokens]


def tiles2(shape: case.Shape, tokens: int) -> list[CudaTile]:
    """Tiles to try for the down product: tokens resident (narrow experts), or streamed like gate/up's."""
    if shape.width > 768:
        return W13[tokens]
    widest, blocks = {8192: (176, 1), 1024: (32, 2), 128: (16, 2)}[tokens]
    slots = shape.width // 64
    room = (228 * 1024 // blocks - 4096 - slots * widest * 128) // (2 * experts_cuda.TILE + 16)
    stages = max(4, min(room, 24))
    tiles = [CudaTile(2, 2, widest, stages, blocks, parts) for parts in (1, 2, 4)]
    return tiles + ([CudaTile(2, 2, 160, stages, 1, 2)] if tokens == 8192 else []) + W13[tokens][:1]


def compile_all(jobs: list[tuple[str, int, CudaTile]]) -> None:
    """Binaries of (product, column blocks, tile), side by side."""
    device = torch.cuda.current_device()

    def one(job: tuple[str, int, CudaTile]) -> None:
        product, columns, tile = job
        down = product == "w2"
        try:
            kernel = experts_cuda.kernel(down, columns if tile.parts else 0, tile, 0 if down else 1)
            kernel.function(device)
        except Exception as err:
            print(f"compile {job}: {str(err)[:300]}", flush=True)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, dict.fromkeys(jobs)))


def products(bench: sweep.Bench, product: str, plan: Plan, tile: CudaTile | None) -> list[Any]:
    """One call a weight set: under the tile, or (None) under the plan's Triton tiles."""
    act = (1, case.BETA, case.LINEAR_BETA)
    plan = replace(plan, cuda13=tile if product == "w13" else None, cuda2=tile if product == "w2" else None)
    bn = tile.widest if tile else plan.item_n if product == "w13" else sum(plan.down_n)
    lists = bench.worklists(bn)
    if product == "w13":
        return [
            lambda w=w, i=i, lst=lst: ours.run_w13(i["latent"], w, lst, case.TOP_K, act, plan)
            for w, i, lst in zip(bench.sets, bench.inputs, lists, strict=True)
        ]
    return [
        lambda w=w, y=y, lst=lst: ours.run_w2(y, w, lst, plan)
        for w, y, lst in zip(bench.sets, bench.ys, lists, strict=True)
    ]


def alone(bench: sweep.Bench, product: str, plan: Plan, tiles: list[CudaTile], row: dict[str, Any]) -> CudaTile | None:
    """Check and time a product under every tile and under the plan; the quickest right tile."""
    want = bench.reference(product)
    best: tuple[float, CudaTile | None] = (1e9, None)
    columns = (bench.sets[0].w13 if product == "w13" else bench.sets[0].w2).shape[2]
    for tile in [None, *tiles]:
        name = "table" if tile is None else "-".join(map(str, asdict(tile).values()))
        try:
            why = experts_cuda.tile_refusal(tile, columns, product == "w2") if tile else ""
            harness.require(not why, why)
            calls = products(bench, product, plan, tile)
            error = bench.error(product, calls[0], want)
            harness.require(error <= case.PRODUCT_TOLERANCE, f"{error:.2e} from float64")
            us = harness.time_graph(calls, 10, 1)
        except Exception as err:
            row["wrong"][f"{product} {name}"] = f"{type(err).__name__}: {str(err)[:160]}"
            continue
        row[product][name] = us
        if tile and us < best[0]:
            best = us, tile
    return best[1]


def measure(shape: case.Shape, tokens: int, sets: list[Any], bandwidth: float) -> dict[str, Any]:
    """Times of a row's tiles, and of whole calls with the best of them."""
    device = torch.cuda.get_device_name(0)
    plan = tuning.without_cuda(tuning.choose(tokens, case.TOP_K, case.EXPERTS, device, 90, sets[0].padded_width))
    bench = sweep.Bench(sets, shape, tokens)
    row: dict[str, Any] = {"w13": {}, "w2": {}, "wrong": {}, "whole": {}}
    touched = sum(int(r[1].flatten()[h].unique().numel()) for r, h in zip(bench.routing, bench.local, strict=True))
    weights = touched / len(sets) * shape.bytes_per_expert / bandwidth * 1e6
    row["floor_w13"], row["floor_w2"] = weights * 2 / 3, weights / 3
    best13 = alone(bench, "w13", plan, tiles13(shape, tokens), row)
    best2 = alone(bench, "w2", plan, tiles2(shape, tokens), row)
    plans = {"table": plan, "both": replace(plan, cuda13=best13, cuda2=best2)}
    if tokens > 128:  # up to there both products share one list
        plans |= {"gate/up": replace(plan, cuda13=best13, block_n2=plan.block_n, extra_n2=plan.extra_n)}
        plans |= {"down": replace(plan, cuda2=best2)}
    inputs = bench.inputs[0]
    weights_, ids, _ = case.reference_route(inputs)
    local = ids if bench.emap is None else bench.emap[ids].long()
    at = case.sample_rows(tokens)
    ref = case.reference_experts(inputs["latent"], weights_, local, sets[0], at)
    for name, candidate in plans.items():
        try:
            calls = sweep.forward(bench, candidate)
            case.check_experts(calls[0](), ref, at, name)
            row["whole"][name] = harness.time_graph(calls, 10, 1)
        except Exception as err:
            row["wrong"][f"whole {name}"] = f"{type(err).__name__}: {str(err)[:160]}"
    chosen = plans[min(row["whole"], key=lambda k: row["whole"][k])]
    row["plan"] = {k: v for k, v in asdict(chosen).items() if v is not None}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=420.0)
    parser.add_argument("--apply", action="store_true")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    rows = [(case.SHAPES[s], t) for s, t in ROWS if not a.only or f"{s}.{t}" in a.only.split(",")]
    jobs = [("w13", case.LATENT // 64, tile) for s, t in rows for tile in tiles13(s, t)]
    jobs += [("w2", s.width // 64, tile) for s, t in rows for tile in tiles2(s, t)]
    compile_all(jobs)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    results = harness.Results(a.out / "experts_cuda_sweep.json", resume=False)
    bandwidth = harness.copy_bandwidth()
    results.record |= {"copy_bytes_per_s": bandwidth, "matrix_flops": harness.matrix_rate()}
    sets: dict[str, list[Any]] = {}
    for shape, tokens in rows:
        if time.time() - start > a.budget:
            print("budget spent", flush=True)
            break
        if shape.name not in sets:
            sets = {shape.name: [case.random_experts(shape, s) for s in range(3)]}

        def one(shape: case.Shape = shape, tokens: int = tokens) -> dict[str, Any]:
            return measure(shape, tokens, sets[shape.name], bandwidth)

        row = results.row(f"{shape.name}.{tokens}", one)
        print(f"== {shape.name}.{tokens} [{time.time() - start:.0f} s]", flush=True)
        for key, value in (row or {}).items():
            print(f"   {key} {value}", flush=True)
        if a.apply and row and "plan" in row:
            sweep.adopt(shape, tokens, row["plan"], results.record, a.out)


if __name__ == "__main__":
    main()
