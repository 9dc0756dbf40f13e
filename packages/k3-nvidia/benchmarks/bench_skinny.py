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
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import torch

from k3_core.config import K3Config, load_config
from k3_nvidia.kernels.skinny_gemm import MAX_VECTOR_ROWS, Config, skinny_gemm
from k3_nvidia.tuning import skinny as tuning

BATCHES = (1, 8, 16, 4, 2)
MULTIPROCESSORS = 132
POOL_BYTES = 3 << 29
DTYPE = torch.bfloat16
Point = tuple[int, int, int]


# ------------------------------------------------------------------------------------------------------------- shapes


def projections(config: K3Config, ranks: int) -> dict[str, tuple[int, int]]:
    """name -> (N, K) of every dense matrix of one rank, as the serving layers fuse, pad and cut them."""
    text = config.text
    linear, hidden = text.linear_attn, text.hidden_size
    heads, dim = linear.num_heads // ranks, linear.head_dim
    attention = text.num_attention_heads // ranks
    shared, dense = text.shared_intermediate_size // ranks, text.intermediate_size // ranks

    def pad(rows: int) -> int:
        return -(-rows // 16) * 16

    assert text.q_lora_rank is not None
    assert text.routed_expert_hidden_size is not None
    latent = text.routed_expert_hidden_size
    mla = text.q_lora_rank + text.kv_lora_rank + text.qk_rope_head_dim + attention * text.v_head_dim
    return {
        "kda.in_proj": (pad(4 * heads * dim + dim + heads), hidden),
        "kda.f_b_proj": (heads * dim, dim),
        "kda.o_proj": (hidden, heads * dim),
        "mla.in_proj": (pad(mla), hidden),
        "mla.q_b_proj": (attention * text.qk_head_dim, text.q_lora_rank),
        "mla.kv_b_proj": (attention * (text.qk_nope_head_dim + text.v_head_dim), text.kv_lora_rank),
        "mla.o_proj": (hidden, attention * text.v_head_dim),
        "latent.down": (latent, hidden),
        "latent.up": (hidden, latent),
        "latent.up sharded": (hidden // ranks, latent),
        "shared.gate_up": (2 * shared, hidden),
        "shared.down": (hidden, shared),
        "dense.gate_up": (2 * dense, hidden),
        "dense.down": (hidden, dense),
        "router": (text.num_experts, hidden),
        "lm_head": (text.vocab_size // ranks, hidden),
    }


def points() -> dict[tuple[int, int], list[str]]:
    """(N, K) -> names of the projections that have it, over both rank sizes."""
    config = load_config(json.loads((files("k3_core.cli.plan") / "kimi_k3.json").read_text()))
    found: dict[tuple[int, int], list[str]] = {}
    for ranks in (16, 8):
        for name, size in projections(config, ranks).items():
            found.setdefault(size, []).append(f"tp{ranks}.{name}")
    return found


# ----------------------------------------------------------------------------------------------------- configurations


def _cuts(total: int, wanted: float, least: int) -> int:
    """The divisor of ``total`` steps nearest to ``wanted`` cuts that leaves at least ``least`` steps to each."""
    divisors = [d for d in range(1, total + 1) if total % d == 0 and total // d >= least] or [1]
    return min(divisors, key=lambda d: abs(d - wanted))


def _vector(m: int, n: int, k: int) -> Iterator[Config]:
    if k >= 4096:
        tiles = [(8, 1024, 4), (4, 1024, 4), (8, 512, 2), (4, 512, 2)]
    elif k >= 1024:
        tiles = [(8, 512, 2), (4, 512, 2), (8, 256, 1), (4, 256, 1)]
    elif k >= 512:
        tiles = [(8, 256, 1), (4, 256, 1), (16, 256, 1), (16, 256, 2)]
    else:
        tiles = [(16, 128, 1), (8, 128, 1), (8, 64, 1)]
    for block_n, block_k, warps in tiles:
        if block_n * m > 32:  # sums and two steps of weights must fit the registers
            continue
        programs = -(-n // block_n)
        steps = -(-k // block_k)
        # twelve warps a multiprocessor, each with block_n * 512 bytes a step outstanding
        wanted = MULTIPROCESSORS * 12 / (programs * warps)
        for splits in {1, _cuts(steps, wanted, 2) if wanted >= 1.5 else 1}:
            yield Config("vector", block_n, block_k, splits, warps, 1, True)


def _dot(m: int, n: int, k: int) -> Iterator[Config]:
    tiles = [(64, 128, 5, 4), (32, 128, 6, 4), (16, 256, 5, 4), (32, 256, 4, 4)]
    if n >= 4096 and k >= 2048:
        tiles += [(64, 256, 3, 4), (128, 64, 6, 4)]
    if k <= 256:
        tiles = [(16, 128, 2, 1), (32, 128, 2, 2), (64, 128, 2, 4)]
    for block_n, block_k, stages, warps in tiles:
        programs, steps = -(-n // block_n), -(-k // block_k)
        options = {1} if programs >= 48 else set()
        if programs < 200:
            options |= {_cuts(steps, w * MULTIPROCESSORS / programs, 3) for w in (1, 2)}
        for splits in sorted(options):
            yield Config("dot", block_n, block_k, splits, warps, stages, True)


def candidates(m: int, n: int, k: int) -> list[Config]:
    """The Triton configurations that are worth a try."""
    return [*(_vector(m, n, k) if m <= MAX_VECTOR_ROWS else ()), *(_dot(m, n, k))]


def variant(config: Config, m: int, n: int, k: int) -> tuple[Any, ...]:
    """What decides the compiled binary."""
    rows = m if config.kind == "vector" else (8 if m <= 8 else 16)
    even = n % config.block_n == 0, k % (config.block_k * config.splits) == 0
    return rows, even, *asdict(config).values()


def compile_worker(index: int, count: int) -> None:
    """Run every count-th variant once, so that its binary is in the disk cache."""
    seen: set[Any] = set()
    for m in BATCHES:
        for n, k in points():
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


# -------------------------------------------------------------------------------------------------------------- table


def table_entry(name: str, us: float) -> dict[str, Any]:
    """An entry of the tuning table from the name a configuration has in the results."""
    kind, *parts = name.split("-")
    number = {part[0]: int(part[1:]) for part in parts if part != "pdl"}
    if kind == "cute":
        config: dict[str, Any] = {
            "tiles": number["r"], "unroll": number["u"], "warps": number["w"], "cluster": number["c"],
        }  # fmt: skip
        return {"kernel": "cute", "us": round(us, 2), "config": config}
    config = {
        "kind": kind, "block_n": number["n"], "block_k": number["k"], "splits": number["s"], "warps": number["w"],
        "stages": number["p"], "pdl": "pdl" in parts,
    }  # fmt: skip
    return {"kernel": "triton", "us": round(us, 2), "config": config}


def table_row(row: dict[str, Any]) -> dict[str, Any]:
    """Kernels that beat cuBLAS by the margin, best first; CuTe only where it beats Triton by as much."""
    rival = row["cublas_us"]
    ours = [(us, name) for name, us in row["marginal"].items() if name != "cublas"]
    best = [table_entry(name, us) for us, name in sorted(ours)[:1] if us <= tuning.MARGIN * rival]
    # the shards timed cuBLAS too: their figures count relative to that
    if "cute" in row and row["cute_cublas_us"]:
        us = row["cute_us"] / row["cute_cublas_us"] * rival
        if us <= tuning.MARGIN * min([rival, *(entry["us"] for entry in best)]):
            best.insert(0, table_entry(row["cute"], us))
    shape = {key: row[key] for key in ("m", "n", "k")}
    return {**shape, "cublas_us": round(rival, 2), "floor_us": round(row["floor_us"], 2), "best": best}


def write_table(results: dict[str, Any], path: Path) -> None:
    """``tuning/skinny.json`` from a results file; other devices' tables in it stay. The router has its own kernel."""
    environment = results["environment"]
    rows = [
        table_row(row)
        for row in results["rows"].values()
        if "marginal" in row and not all(name.endswith("router") for name in row["projections"])
    ]
    rows.sort(key=lambda row: (row["n"], row["k"], row["m"]))
    data = json.loads(path.read_text())
    data["devices"][environment["device"]] = {
        "date": environment["date"],
        "measured": f"{environment['dtype']}, torch {environment['torch']}, triton {environment['triton']}, marginal "
        "microseconds behind the kernel that writes x, L2 cold (benchmarks/bench_skinny.py)",
        "rows": rows,
    }
    text = json.dumps(data, indent=1)
    for row in rows:  # one row a line
        text = text.replace(json.dumps(row, indent=1).replace("\n", "\n    "), json.dumps(row))
    assert json.loads(text) == data
    path.write_text(text + "\n")


# --------------------------------------------------------------------------------------------------------------- main


def cute_jobs() -> dict[tuple[Any, int], list[Point]]:
    """(configuration, 8-row tiles) -> the (M, N, K) it is tried at; empty where the CuTe DSL cannot be used."""
    from k3_nvidia.kernels import skinny_cute

    jobs: dict[tuple[Any, int], list[Point]] = {}
    if skinny_cute.available()[0]:
        for m in BATCHES:
            for n, k in points():
                for config in skinny_cute.candidates(m, n, k):
                    jobs.setdefault((config, skinny_cute.columns(m)), []).append((m, n, k))
    return jobs


def cute_shard(path: Path, index: int, count: int, deadline: float) -> None:
    """Compile every count-th CuTe binary, then, when the GPU is free, check and time each where it is tried."""
    from k3_nvidia.kernels import skinny_cute

    mine: dict[Point, dict[str, Runner]] = {}
    for number, ((config, columns), tried) in enumerate(cute_jobs().items()):
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


def run(results: harness.Results, deadline: float) -> None:
    """Every point with the Triton kernels until the deadline; the file is rewritten after each."""
    names = points()
    bandwidth = harness.copy_bandwidth()
    results.record |= {"copy_bytes_per_s": bandwidth, "dtype": str(DTYPE), "rule": __doc__}
    pool = random_pool()
    print(f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    for m in BATCHES:
        for (n, k), who in names.items():
            if time.time() > deadline:
                results.record["unfinished"] = True
                results.save()
                return

            def one(m: int = m, n: int = n, k: int = k) -> dict[str, Any]:
                runners: dict[str, Runner] = {"cublas": cublas}
                runners |= {c.name: triton_runner(c) for c in candidates(m, n, k)}
                return measure(Case(pool, m, n, k), runners, bandwidth)

            row = results.row(f"{m}x{n}x{k}", one)
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


def main() -> None:
    """Workers, then the sweep of Triton, then that of CuTe in its own process, then one file."""
    folder = Path(os.environ.get("OUT", "."))
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=folder / "skinny.json")
    parser.add_argument("--budget", type=float, default=105.0, help="seconds in all")
    parser.add_argument("--worker", type=int, nargs=2)
    parser.add_argument("--table", type=Path, help="measure nothing: write the tuning table from the results in --out")
    parser.add_argument("--cute-only", action="store_true", help="add the CuTe kernels to the Triton rows in --out")
    parser.add_argument("--cute", type=float, nargs=3, help="(internal) shard, shards, until when")
    a = parser.parse_args()
    if a.worker:
        compile_worker(*a.worker)
        return
    if a.table:
        write_table(json.loads(a.out.read_text()), a.table)
        return
    if a.cute:
        cute_shard(a.out, int(a.cute[0]), int(a.cute[1]), a.cute[2])
        return
    start = time.time()
    end = start + a.budget
    a.out.parent.mkdir(parents=True, exist_ok=True)
    count = max(1, min(14, (os.cpu_count() or 2) - 2))
    command = [sys.executable, __file__, "--out", str(a.out)]
    jobs = 0 if a.cute_only else count
    workers = [subprocess.Popen([*command, "--worker", str(i), str(count)]) for i in range(jobs)]
    for worker in workers:
        worker.wait(timeout=a.budget)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    results = harness.Results(a.out, resume=a.cute_only)
    with gpu_lock(a.out):
        shards = [
            subprocess.Popen([*command, "--cute", str(i), str(count), str(end - 4)])
            for i in range(count)
            if importlib.util.find_spec("cutlass") is not None
        ]
        if not a.cute_only:
            print(residual_check(), flush=True)
            run(results, start + 0.65 * a.budget)
    print(f"triton swept at {time.time() - start:.0f} s", flush=True)
    for shard in shards:
        try:
            shard.wait(timeout=max(end - time.time(), 1))
        except subprocess.TimeoutExpired:
            shard.kill()
            print("a CuTe shard ran out of time", flush=True)
    merge_cute(a.out, results.rows)
    results.save()
    for key, row in results.rows.items():
        if row.get("cute_wrong"):
            print(f"cute {key}: {row['cute_wrong']}"[:300], flush=True)
        if "cute" in row and "us" in row:
            print(f"{key}: triton or cuBLAS {row['us']:.2f}, {row['cute']} {row['cute_us']:.2f}", flush=True)
    print(f"total {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
