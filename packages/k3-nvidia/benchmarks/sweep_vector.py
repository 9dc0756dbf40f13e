"""Tuning sweep of the experts' path for a handful of tokens, and of the choosing kernel's warps.

    python packages/k3-nvidia/benchmarks/sweep_vector.py [OUT]

Correctness first (float64), then each kernel's device time under every tile, then router and experts together in a
graph over several weight sets: the tensor-core path against the vector path. Writes experts_vector_sweep.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import experts_case as case
import harness
import torch

from k3_nvidia.kernels import experts as ours
from k3_nvidia.kernels import router
from k3_nvidia.kernels.experts_vector import vector_experts

#: Tiles of ``vector_experts``: blocks and warps of the gate/up product, slots and warps of the down product.
TILES: dict[str, dict[str, Any]] = {
    "k8w8.s16w8": {"column_blocks": 8, "slots": 16, "warps": (8, 8), "whole": (True, True)},
    "k8w4.s16w4": {"column_blocks": 8, "slots": 16, "warps": (4, 4), "whole": (True, True)},
    "k8w8.s16w8.shared": {"column_blocks": 8, "slots": 16, "warps": (8, 8), "whole": (False, False)},
    "k8w4.s16w4.shared": {"column_blocks": 8, "slots": 16, "warps": (4, 4), "whole": (False, False)},
    "k4w4.s8w4": {"column_blocks": 4, "slots": 8, "warps": (4, 4), "whole": (True, True)},
    "k16w8.s32w8.shared": {"column_blocks": 16, "slots": 32, "warps": (8, 8), "whole": (False, False)},
    "k16w16.s32w16": {"column_blocks": 16, "slots": 32, "warps": (16, 16), "whole": (True, True)},
    "k8w8x2.s16w8": {"row_blocks": 2, "column_blocks": 8, "slots": 16, "warps": (16, 8), "whole": (True, True)},
}
SHAPES = (case.TP16, case.TP8)
TOKENS = (1, 2, 4, 8, 16)
ACT = (1, case.BETA, case.LINEAR_BETA)


def run(i: dict[str, torch.Tensor], w: Any, routed: Any, tile: dict[str, Any]) -> torch.Tensor:
    out = torch.empty_like(i["latent"])
    return vector_experts(i["latent"], w, routed[0], routed[1], None, ACT, out, **tile)


def routed(i: dict[str, torch.Tensor], warps: int = 4) -> Any:
    return router.route_few(i["hidden"], i["router"], i["bias"], case.TOP_K, pdl=True, warps=warps)


def compile_worker(index: int, count: int) -> None:
    """Every count-th variant once, for the disk cache."""
    jobs: list[Any] = [(shape, name) for shape in SHAPES for name in TILES] + [("route", n) for n in (1, 2, 4, 8)]
    for what, name in jobs[index::count]:
        i = case.random_inputs(2, 0)
        try:
            if what == "route":
                routed(i, name)
            else:
                small = case.Shape(what.name, what.width, 896)
                run(i, case.random_experts(small, 0), routed(i), TILES[name])
        except Exception as error:
            print(f"{what} {name}: {type(error).__name__} {str(error)[:160]}", flush=True)
    torch.cuda.synchronize()


def check(i: dict[str, torch.Tensor], w: Any, tile: dict[str, Any]) -> float:
    """Error of one tile against float64."""
    weights, ids = routed(i)
    rows = case.sample_rows(i["latent"].shape[0])
    want = case.reference_experts(i["latent"], weights, ids, w, rows)
    got = run(i, w, (weights, ids), tile)
    harness.require(torch.equal(got, run(i, w, (weights, ids), tile)), "two runs differ")
    return float(case.check_experts(got, want, rows, "vector_experts"))


def main() -> None:
    if "--worker" in sys.argv:
        at = sys.argv.index("--worker")
        compile_worker(int(sys.argv[at + 1]), int(sys.argv[at + 2]))
        return
    out = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OUT", "."))
    workers = [subprocess.Popen([sys.executable, __file__, "--worker", str(n), "10"]) for n in range(10)]
    for worker in workers:
        worker.wait()
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        sets = [case.random_experts(shape, n) for n in range(4)]
        for tokens in TOKENS:
            inputs = [case.random_inputs(tokens, n) for n in range(len(sets))]
            choices = [routed(i) for i in inputs]
            row: dict[str, Any] = {"shape": shape.name, "tokens": tokens, "kernels_us": {}}
            for name, tile in TILES.items():
                try:
                    error = check(inputs[0], sets[0], tile)
                    calls = [
                        lambda i=i, w=w, c=c, tile=tile: run(i, w, c, tile)
                        for i, w, c in zip(inputs, sets, choices, strict=True)
                    ]
                    times = harness.kernel_times(lambda calls=calls: [call() for call in calls])
                    row["kernels_us"][name] = {k: round(v / len(calls), 2) for k, v in times.items()} | {"error": error}
                except Exception as failure:
                    row["kernels_us"][name] = f"{type(failure).__name__}: {str(failure)[:120]}"
            plan = ours._plan(tokens, case.TOP_K, case.EXPERTS, sets[0])
            sides = []
            for vector in (False, True):
                chosen = replace(plan, vector=vector, pdl=True)
                sides.append(
                    [
                        lambda i=i, w=w, p=chosen: ours.moe_forward(
                            i["hidden"], i["latent"], i["router"], i["bias"], w, case.TOP_K, plan=p, **case.ACT
                        )
                        for i, w in zip(inputs, sets, strict=True)
                    ]
                )
            row["tensor_cores_us"], row["vector_us"] = (round(t, 2) for t in harness.time_pair_graph(sides))
            rows.append(row)
            print(json.dumps(row), flush=True)
        del sets
    for tokens in (1, 8, 32, 128):
        i = case.random_inputs(tokens, 0)
        times = {f"few.{n}": harness.kernel_times(lambda i=i, n=n: routed(i, n)) for n in (1, 2, 4, 8)}
        times["list"] = harness.kernel_times(
            lambda i=i: router.route_and_list(
                i["hidden"], i["router"], i["bias"], case.TOP_K, case.EXPERTS, 8, pdl=True
            )
        )
        rows.append({"tokens": tokens, "route_us": times})
        print(json.dumps(rows[-1]), flush=True)
    record = {"device": harness.device_record(), "rows": rows}
    (out / "experts_vector_sweep.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
