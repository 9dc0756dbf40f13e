"""Low-latency products behind the kernel that a layer has before them: ``python bench.py --rows chain``.

bench_skinny.py times a product behind a copy, which a product may not overlap: its launch waits until the copy is
over. In a layer most products follow a kernel of this wheel that lets them start early (programmatic dependent launch)
and ask for their first weights meanwhile. Here the kernel before is a norm that writes x, launched either way; the
figure is the time of (norm, product) pairs in a CUDA graph over cold weight copies less that of the norms alone. The
product is the one that the tuning table names for a TP16 rank; cuBLAS stands behind the same norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from bench_skinny import Case, cublas, interleave, random_pool, time_cold_graphs
from skinny_case import points

from k3_nvidia.few_rows import _product
from k3_nvidia.kernels import glue
from k3_nvidia.tuning import skinny as tuning

ROWS = (1, 8, 16)
ELSEWHERE = ("router", "f_b_proj", "kv_b_proj")  # kernels of their own, or no product of a step


def norm_into(case: Case, early: bool) -> Callable[[], Any]:
    """The kernel before: x = norm of the source; early: a product behind it may start before it ends."""
    weight = torch.ones(case.source.shape[1], dtype=case.source.dtype, device="cuda")
    rows, width = case.source.shape
    block = max(16, 1 << (width - 1).bit_length())
    options = glue.launch_options(early)

    def call() -> None:
        glue._rms_norm(
            (rows,), case.x, case.source, weight, width, 1e-5, case.x.stride(0), case.source.stride(0), BLOCK=block,
            num_warps=max(1, min(8, block // 512)), **options,
        )  # fmt: skip

    return call


def measure(pool: torch.Tensor, m: int, n: int, k: int, bandwidth: float) -> dict[str, Any]:
    """Marginal microseconds of the table's product and of cuBLAS behind the norm, launched early or not."""
    case = Case(pool, m, n, k)
    choice = tuning.choices(n, k, torch.cuda.get_device_name(), frozenset({"triton"}))[m]
    sides: dict[str, Callable[..., Any]] = {"cublas": cublas}
    if choice is not None:
        product = _product(choice)
        sides["ours"] = lambda x, w, out: product(x, w)
        case.write()
        want, bound = case.reference()
        off = ((product(case.x, case.weights[-1]).double() - want).abs() / bound).max().item()
        harness.require(off <= 1, f"{off:.3g} of the bound")
    floor = case.floor_bytes / bandwidth * 1e6
    row: dict[str, Any] = {"MB": round(2e-6 * n * k, 1), "floor us": round(floor, 2)}
    graphs, names = [], []
    for early in (False, True):
        before = norm_into(case, early)
        graphs.append([before] * len(case.weights))
        names.append((early, "norm"))
        for name, run in sides.items():
            graphs.append(interleave(before, case.products(run)))
            names.append((early, name))
    times = dict(zip(names, time_cold_graphs(graphs, len(case.weights), 12), strict=True))
    for early, label in ((False, "waiting"), (True, "early")):
        for name in sides:
            row[f"{name}, {label}"] = round(times[early, name] - times[early, "norm"], 2)
    best = row.get("ours, early", row["cublas, early"])
    return row | {"/ floor": round(best / floor, 2), "/ cublas": round(best / row["cublas, early"], 2)}


def run(out: Path, slices: Sequence[str]) -> None:
    """Rows ``M=<rows> <projection> <N>x<K>`` of chain.json."""
    results = harness.Results(out / "chain.json")
    results.notes = [
        "A product behind a norm that writes its input, weights cold: marginal microseconds, with the norm letting it "
        "start early (as in the layers) or not. / floor and / cublas are of the early ones."
    ]
    pool, bandwidth = random_pool(), harness.copy_bandwidth()
    for m in ROWS:
        for (n, k), names in points().items():
            key = f"M={m} {names[0]} {n}x{k}"
            if names[0].endswith(ELSEWHERE) or (slices and not any(part in key for part in slices)):
                continue
            if not names[0].startswith("tp16"):
                continue
            print(key, results.row(key, lambda m=m, n=n, k=k: measure(pool, m, n, k, bandwidth)), flush=True)


if __name__ == "__main__":
    import os

    run(Path(os.environ.get("OUT", Path(__file__).parent / "results")), [])
