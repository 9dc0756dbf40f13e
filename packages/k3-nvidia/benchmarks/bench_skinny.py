"""The low-latency matrix product at every K3 projection of a TP8 and a TP16 rank: ours, cuBLAS, and the byte floor.

``python bench_skinny.py [--out FILE] [--budget SECONDS]``. Compiles in worker processes, checks every configuration
against fp64 before its clock starts, sweeps, then times the best ones and cuBLAS alternately. The CuTe DSL kernels run
in a process of their own, because a fault there must not cost the other rows. Needs torch and Triton, not vLLM.

What is timed is the marginal cost of a product in a stream: graphs of (kernel that writes x, product) pairs, one a
weight copy, less the graph of the writers alone; the L2 is flushed before each replay, so every copy is cold. ``chain``
is the product's time in a graph of products only. Floor: bytes of W, x and y at the bandwidth of a device copy.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import torch
from skinny_case import BATCHES, Point, candidates, points, summary, variant, write_table

from k3_nvidia.kernels.skinny_gemm import Config, skinny_gemm

POOL_BYTES = 3 << 29
DTYPE = torch.bfloat16


# ------------------------------------------------------------------------------------------------------------ compiling


def wanted(point: Point, slices: Sequence[str]) -> bool:
    """Whether a case is asked for: its key contains one of ``slices`` (begins with it behind ^), or there are none."""
    key = "x".join(map(str, point))
    return not slices or any(key.startswith(part[1:]) if part[:1] == "^" else part in key for part in slices)


def compile_worker(index: int, count: int, slices: Sequence[str]) -> None:
    """Run every count-th variant once, so that its binary is in the disk cache."""
    seen: set[Any] = set()
    for m in BATCHES:
        for n, k in points():
            if not wanted((m, n, k), slices):
                continue
            for config in candidates(m, n, k):
                key = variant(config, m, n, k)
                if key in seen:
                    continue
                seen.add(key)
                if len(seen) % count != index:
                    continue
                try:
                    x, w = (torch.zeros(r, k, dtype=DTYPE, device="cuda") for r in (m, n))
                    skinny_gemm(x, w, config)
                except Exception as err:
                    print(f"compile {m} {n} {k} {config.name}: {type(err).__name__} {str(err)[:200]}", flush=True)
    torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------- measuring


class Case:
    """One (M, N, K): weight copies cut from the pool, and what each product reads and writes."""

    def __init__(self, pool: torch.Tensor, m: int, n: int, k: int) -> None:
        self.point = (m, n, k)
        size = n * k
        count = max(4, min(24, (192 << 20) // (2 * size)))
        stride = min(max(size, 1 << 20), (pool.numel() - size) // max(count - 1, 1)) // 128 * 128
        self.weights = [pool[i * stride : i * stride + size].view(n, k) for i in range(count)]
        self.source = torch.randn(m, k, device="cuda").to(DTYPE)
        self.x = torch.empty_like(self.source)
        self.x.copy_(self.source)
        self.out = torch.empty(m, n, dtype=DTYPE, device="cuda")
        self.floor_bytes = 2 * (n * k + m * k + m * n)

    def write(self) -> None:
        """The kernel before the product: it writes x."""
        self.x.copy_(self.source)

    def products(self, run: Callable[..., Any]) -> list[Callable[[], Any]]:
        """One call a weight copy."""
        return [lambda w=w: run(self.x, w, self.out) for w in self.weights]

    def check(self, run: Callable[..., Any], want: tuple[torch.Tensor, torch.Tensor]) -> str | None:
        """None, or how the result on the last copy is off; the result is NaN before."""
        self.out.fill_(float("nan"))
        run(self.x, self.weights[-1], self.out)
        off = (self.out.double() - want[0]).abs() / want[1]
        first = self.out.clone()
        self.out.fill_(float("nan"))
        run(self.x, self.weights[-1], self.out)
        if not torch.equal(first, self.out):
            return "two runs differ"
        worst = off.max().item()
        return None if worst <= 1 else f"{worst:.3g} of the bound"

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64 product with the last copy, and the bound of each element (fp32 sums of K terms, one rounding)."""
        x, w = self.x.double(), self.weights[-1].double()
        want = x @ w.t()
        return want, 2.0**-8 * want.abs() + (w.shape[1] + 1) * 2.0**-24 * (x.abs() @ w.abs().t()) + 1e-30


def interleave(before: Callable[[], Any], calls: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """before, call, before, call, ..."""
    return [f for call in calls for f in (before, call)]


def time_cold_graphs(sides: list[list[Callable[[], Any]]], count: int, iters: int) -> list[float]:
    """Median microseconds of each side's graph / count, replays alternating, the L2 flushed before each."""
    graphs = [harness.capture(side) for side in sides]
    events: list[list[Any]] = [[] for _ in sides]
    for _ in range(iters + 2):
        for graph, log in zip(graphs, events, strict=True):
            harness.flush_l2()
            log.append(harness._timed(graph.replay))
    return [harness._median_us(log, 2) / count for log in events]


def cublas(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The rival."""
    return torch.mm(x, w.t(), out=out)


Runner = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def triton_runner(config: Config) -> Runner:
    """The Triton kernel under a configuration."""
    return lambda x, w, out: skinny_gemm(x, w, config, None, out)


def sweep(case: Case, runners: dict[str, Runner], iters: int = 5) -> tuple[dict[str, float], dict[str, str]]:
    """(marginal microseconds of the right ones, what is wrong with the others)."""
    want = case.reference()
    good: dict[str, Runner] = {}
    bad: dict[str, str] = {}
    for name, run in runners.items():
        try:
            wrong = case.check(run, want)
        except Exception as err:
            wrong = f"{type(err).__name__}: {err}"[:300]
        if wrong is None:
            good[name] = run
        else:
            bad[name] = wrong
    calls = [interleave(case.write, case.products(run)) for run in good.values()]
    times = time_cold_graphs([[case.write] * len(case.weights), *calls], len(case.weights), iters)
    return {name: t - times[0] for name, t in zip(good, times[1:], strict=True)}, bad


def measure(case: Case, runners: dict[str, Runner], bandwidth: float, finalists: int = 2) -> dict[str, Any]:
    """The sweep, then the best ``finalists`` and cuBLAS alternately: marginal and chain times."""
    times, bad = sweep(case, runners)
    harness.require("cublas" not in bad, f"cuBLAS: {bad.get('cublas')}")
    ours = sorted((t, name) for name, t in times.items() if name != "cublas")[:finalists]
    names = ["cublas", *(name for _, name in ours)]
    count = len(case.weights)
    products = [case.products(runners[name]) for name in names]
    sides = [[case.write] * count, *(interleave(case.write, p) for p in products), *products]
    final = time_cold_graphs(sides, count, 15)
    marginal = {name: t - final[0] for name, t in zip(names, final[1 : len(names) + 1], strict=True)}
    chain = dict(zip(names, final[len(names) + 1 :], strict=True))
    floor = case.floor_bytes / bandwidth * 1e6
    winner = min(marginal, key=lambda name: marginal[name])
    return {
        "m": case.point[0], "n": case.point[1], "k": case.point[2], "floor_us": floor, "winner": winner,
        "us": marginal[winner], "cublas_us": marginal["cublas"], "ratio_floor": marginal[winner] / floor,
        "ratio_cublas": marginal[winner] / marginal["cublas"], "marginal": marginal, "chain": chain,
        "sweep": {name: round(t, 3) for name, t in sorted(times.items(), key=lambda r: r[1])}, "wrong": bad,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- main


def cute_jobs(slices: Sequence[str]) -> dict[tuple[Any, int], list[Point]]:
    """(configuration, 8-row tiles) -> the (M, N, K) it is tried at; empty where the CuTe DSL cannot be used."""
    from k3_nvidia.kernels import skinny_cute

    jobs: dict[tuple[Any, int], list[Point]] = {}
    if skinny_cute.available()[0]:
        for m in (m for m in BATCHES if m <= skinny_cute.MAX_ROWS):
            for n, k in (point for point in points() if wanted((m, *point), slices)):
                for config in skinny_cute.candidates(m, n, k):
                    jobs.setdefault((config, skinny_cute.columns(m)), []).append((m, n, k))
    return jobs


def cute_shard(path: Path, index: int, count: int, deadline: float, slices: Sequence[str]) -> None:
    """Compile every count-th CuTe binary, then, when the GPU is free, check and time each where it is tried."""
    from k3_nvidia.kernels import skinny_cute

    mine: dict[Point, dict[str, Runner]] = {}
    for number, ((config, columns), tried) in enumerate(cute_jobs(slices).items()):
        if number % count != index:
            continue
        try:
            skinny_cute.compiled(config, columns, DTYPE, False)
        except Exception as err:
            print(f"cute {config.name} {columns}: {type(err).__name__} {str(err)[:300]}", flush=True)
            continue
        for point in tried:
            runner = lambda x, w, out, c=config: skinny_cute.skinny_cute(x, w, c, None, out)  # noqa: E731
            mine.setdefault(point, {})[f"cute-{config.name}"] = runner
    rows: dict[str, Any] = {}
    pool: torch.Tensor | None = None
    for (m, n, k), runners in sorted(mine.items(), key=lambda item: BATCHES.index(item[0][0])):
        with gpu_lock(path):
            if time.time() > deadline:
                return
            pool = random_pool() if pool is None else pool
            try:
                case = Case(pool, m, n, k)
                times, wrong = sweep(case, {"cublas": cublas, **runners})
            except Exception as err:
                times, wrong = {}, {"all": f"{type(err).__name__}: {err}"[:300]}
            rows[f"{m}x{n}x{k}"] = {"sweep": times, "wrong": wrong}
            path.with_suffix(f".cute{index}.json").write_text(json.dumps(rows))


def merge_cute(path: Path, rows: dict[str, Any]) -> None:
    """Put the shards' best times and what was wrong beside the Triton rows."""
    for part in path.parent.glob(f"{path.stem}.cute*.json"):
        for key, found in json.loads(part.read_text()).items():
            row = rows.setdefault(key, {})
            rival = found["sweep"].pop("cublas", None)
            row.setdefault("cute_wrong", {}).update(found["wrong"])
            for name, us in found["sweep"].items():
                row.setdefault("cute_sweep", {})[name] = round(us, 3)
                if us < row.get("cute_us", float("inf")):
                    row |= {"cute_us": us, "cute": name, "cute_cublas_us": rival}
        part.unlink()


@contextlib.contextmanager
def gpu_lock(path: Path) -> Iterator[None]:
    """One process of this run at a time on the GPU."""
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def random_pool() -> torch.Tensor:
    """The memory that weight copies are cut from."""
    pool = torch.empty(POOL_BYTES // 2, dtype=DTYPE, device="cuda")
    for part in pool.split(1 << 26):
        part.normal_(0, 0.02)
    return pool


def sweep_points(results: harness.Results, deadline: float, slices: Sequence[str]) -> None:
    """Every point (whose key contains one of ``slices``) with the Triton kernels until the deadline."""
    names = points()
    bandwidth = harness.copy_bandwidth()
    results.record["copy_bytes_per_s"] = bandwidth
    pool = random_pool()
    print(f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    for m in BATCHES:
        for (n, k), who in names.items():
            key = f"{m}x{n}x{k}"
            if not wanted((m, n, k), slices):
                continue
            if time.time() > deadline:
                results.record["unfinished"] = True
                results.save()
                return

            def one(m: int = m, n: int = n, k: int = k) -> dict[str, Any]:
                runners: dict[str, Runner] = {"cublas": cublas}
                runners |= {c.name: triton_runner(c) for c in candidates(m, n, k)}
                return measure(Case(pool, m, n, k), runners, bandwidth)

            row = results.row(key, one)
            assert row is not None
            row["projections"] = who
            if "error" in row:
                print(f"{m:2d} {n:6d} {k:5d} {row['error'][:300]}", flush=True)
                continue
            print(
                f"{m:2d} {n:6d} {k:5d} floor {row['floor_us']:6.2f} cublas {row['cublas_us']:6.2f} best "
                f"{row['us']:6.2f} ({row['ratio_floor']:.2f}x floor, {row['ratio_cublas']:.2f}x cublas) "
                f"chain {min(row['chain'].values()):6.2f} {row['winner']} {who[0]}"
                + (f" WRONG {row['wrong']}" if row["wrong"] else ""),
                flush=True,
            )
    results.save()


def residual_check() -> str:
    """Residual epilogue and float16 on the device, both Triton kernels."""
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        for m, n, k, config in (
            (3, 776, 1032, Config("vector", 8, 256, 2, 1, 1, True)),
            (11, 776, 1032, Config("dot", 64, 128, 3, 4, 3, True)),
            (5, 776, 1032, Config("dot", 16, 128, 1, 4, 3, False)),
        ):
            x, w, r = (torch.randn(s, device="cuda").to(dtype) for s in ((m, k), (n, k), (m, n)))
            wide = torch.full((m, k + 8), float("nan"), dtype=dtype, device="cuda")
            wide[:, :k] = x
            got = skinny_gemm(wide[:, :k], w, config, r)
            want = x.double() @ w.double().t() + r.double()
            size = x.double().abs() @ w.double().abs().t() + r.double().abs()
            off = (got.double() - want).abs() / (unit * want.abs() + (k + 1) * 2.0**-24 * size + 2.0**-25)
            harness.require(off.max().item() <= 1, f"{dtype} {config.name}: {off.max().item():.3g} of the bound")
    return "residual, float16, padded x: right"


def everything(path: Path, budget: float, slices: Sequence[str] = (), cute_only: bool = False) -> None:
    """Workers compile, then the sweep of Triton, then those of CuTe in their own processes; all rows go to ``path``."""
    start = time.time()
    end = start + budget
    path.parent.mkdir(parents=True, exist_ok=True)
    count = max(1, min(14, (os.cpu_count() or 2) - 2))
    command = [sys.executable, __file__, "--out", str(path), *(word for part in slices for word in ("--slice", part))]
    jobs = 0 if cute_only else count
    workers = [subprocess.Popen([*command, "--worker", str(i), str(count)]) for i in range(jobs)]
    for worker in workers:
        worker.wait(timeout=budget)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    results = harness.Results(path, resume=cute_only or bool(slices))
    results.record |= {"dtype": str(DTYPE), "rule": __doc__}
    with gpu_lock(path):
        shards = [
            subprocess.Popen([*command, "--cute", str(i), str(count), str(end - 4)])
            for i in range(count)
            if importlib.util.find_spec("cutlass") is not None
        ]
        if not cute_only:
            print(residual_check(), flush=True)
            sweep_points(results, start + 0.65 * budget, slices)
    print(f"triton swept at {time.time() - start:.0f} s", flush=True)
    for shard in shards:
        try:
            shard.wait(timeout=max(end - time.time(), 1))
        except subprocess.TimeoutExpired:
            shard.kill()
            print("a CuTe shard ran out of time", flush=True)
    merge_cute(path, results.rows)
    results.save()
    for key, row in results.rows.items():
        if row.get("cute_wrong"):
            print(f"cute {key}: {row['cute_wrong']}"[:300], flush=True)
        if "cute" in row and "us" in row:
            print(f"{key}: triton or cuBLAS {row['us']:.2f}, {row['cute']} {row['cute_us']:.2f}", flush=True)
    print(f"total {time.time() - start:.0f} s", flush=True)


def run(out: Path, slices: Sequence[str] = ()) -> None:
    """``bench.py --rows skinny``: the sweep to ``skinny_sweep.json``, its summary to ``skinny.json``."""
    everything(out / "skinny_sweep.json", 150.0, slices)
    publish(out / "skinny_sweep.json", out / "skinny.json")


def publish(results: Path, path: Path) -> None:
    """Write the summary of a results file."""
    path.write_text(json.dumps(summary(json.loads(results.read_text())), indent=1) + "\n")


def main() -> None:
    """The parts of :func:`everything`, and what is made from its results."""
    folder = Path(os.environ.get("OUT", "."))
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=folder / "skinny.json")
    parser.add_argument("--budget", type=float, default=105.0, help="seconds in all")
    parser.add_argument("--table", type=Path, help="measure nothing: write the tuning table from the results in --out")
    parser.add_argument("--summary", type=Path, help="measure nothing: write the page's rows from the results in --out")
    parser.add_argument("--cute-only", action="store_true", help="add the CuTe kernels to the Triton rows in --out")
    parser.add_argument(
        "--slice", action="append", default=[], help="add only cases whose MxNxK contains this (^32x: M 32)"
    )
    parser.add_argument("--worker", type=int, nargs=2, help="(internal) compile a part")
    parser.add_argument("--cute", type=float, nargs=3, help="(internal) shard, shards, until when")
    a = parser.parse_args()
    if a.worker:
        compile_worker(*a.worker, a.slice)
    elif a.cute:
        cute_shard(a.out, int(a.cute[0]), int(a.cute[1]), a.cute[2], a.slice)
    elif a.table:
        write_table(json.loads(a.out.read_text()), a.table)
    elif a.summary:
        publish(a.out, a.summary)
    else:
        everything(a.out, a.budget, a.slice, cute_only=a.cute_only)


if __name__ == "__main__":
    main()
