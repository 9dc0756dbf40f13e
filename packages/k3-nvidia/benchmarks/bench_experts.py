"""Routed experts: router product, top-16, work list, expert products, SiTU, weighted sum; ours, the floors, and vLLM's.

Rows ``<shape>.<tokens>`` for the ranks TP16 (width 192), TP8 (384) and EP16 (56 whole experts), decode 1..128 and
prefill 1024, 8192; ``<shape>.repack`` for loading. The rivals (Marlin, Humming) run where vLLM is importable, on the
same weights and inputs, alternating with ours in one process. Decode is timed in CUDA graphs that rotate over weight
sets larger than the L2 (cold weights, no launch gaps), and eagerly with a flushed L2 beside it; prefill eagerly with a
flushed L2.

Every side is checked against float64 before it is timed; a red check suppresses its figure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import experts_case as case
import harness
import plots_experts
import rival_experts
import torch

from k3_nvidia.kernels import experts as ours
from k3_nvidia.kernels import moe_layout
from k3_nvidia.tuning import experts as tuning

TOKENS = (8192, 1, 1024, 8, 32, 128)  # the rows that matter most first
SHAPES = (case.EP16, case.TP16, case.TP8)


def released_weights(shape: case.Shape, seed: int) -> dict[str, torch.Tensor]:
    """Random experts in the released layout on the device."""
    gen = torch.Generator(device="cuda").manual_seed(seed)

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cuda").random_(low, high, generator=gen)

    e, w, latent = shape.local, shape.width, case.LATENT
    return {
        "w13": draw(0, 256, e, 2 * w, latent // 2),
        "w13_scale": draw(118, 122, e, 2 * w, latent // 32),
        "w2": draw(0, 256, e, latent, w // 2),
        "w2_scale": draw(119, 123, e, latent, w // 32),
    }


def swizzle(shape: case.Shape, released: dict[str, torch.Tensor]) -> moe_layout.SwizzledExperts:
    """Kernel layout of released weights, expert by expert as a loader would."""
    width = shape.width
    out = moe_layout.empty_swizzled(shape.local, width, case.LATENT, "cuda")
    moe_layout.pack_expert_(
        out,
        slice(None),
        (released["w13"][:, :width], released["w13_scale"][:, :width]),
        (released["w13"][:, width:], released["w13_scale"][:, width:]),
        (released["w2"], released["w2_scale"]),
    )
    return out


class Side:
    """One contender: a name, and for each weight set a function of no arguments."""

    def __init__(self, name: str, calls: list[Any], note: str = "") -> None:
        self.name, self.calls, self.note = name, calls, note


class ShapeBench:
    """Weight sets of a shape, built once; rivals hold one set (theirs is repacked from the same bytes)."""

    def __init__(self, shape: case.Shape, sets: int) -> None:
        self.shape = shape
        self.emap = case.expert_map(shape)
        self.released = released_weights(shape, 0)
        self.sets = [swizzle(shape, self.released)] + [case.random_experts(shape, s) for s in range(1, sets)]
        self.base = case.random_inputs(1, 0)
        self.rivals: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        for name, why in rival_experts.available().items():
            if why:
                self.refused[name] = why
                continue
            start = time.time()
            try:
                self.rivals[name] = rival_experts.Rival(name, shape, self.released, self.base)
                print(f"   rival {name} {shape.name} built in {time.time() - start:.1f} s", flush=True)
            except Exception as err:
                self.refused[name] = f"{type(err).__name__}: {str(err)[:400]}"
                print(f"   rival {name} {shape.name}: {self.refused[name]}", flush=True)

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """Fresh tokens for the router that the rivals hold too."""
        drawn = case.random_inputs(tokens, 7)
        return drawn | {"router": self.base["router"], "bias": self.base["bias"]}


def _ours(bench: ShapeBench, inputs: dict[str, torch.Tensor], index: int) -> Any:
    weights, emap = bench.sets[index], bench.emap
    return lambda: ours.moe_forward(
        inputs["hidden"],
        inputs["latent"],
        inputs["router"],
        inputs["bias"],
        weights,
        case.TOP_K,
        expert_map=emap,
        **case.ACT,
    )


def product_calls(
    bench: ShapeBench, latent: torch.Tensor, routed: torch.Tensor, ids: torch.Tensor
) -> tuple[tuning.Plan, list[Any]]:
    """The plan of a row and its two products alone, as the whole part runs them (one token's second holds the sum)."""
    shape, experts = bench.shape, bench.sets[0]
    act = (1, case.BETA, case.LINEAR_BETA)
    plan = ours._plan(len(ids), case.TOP_K, case.EXPERTS, experts)
    lst = ours.moe_worklist.build(ids, shape.local, plan.item_n, bench.emap)
    one13, one2 = ours.one_token(experts, *ids.shape, plan)
    y = ours.run_w13(latent, experts, lst, case.TOP_K, act, plan)
    out = torch.empty_like(latent)
    return plan, [
        (lambda: ours.run_w13_one(latent, experts, lst, act, plan))
        if one13
        else (lambda: ours.run_w13(latent, experts, lst, case.TOP_K, act, plan)),
        (lambda: ours.run_w2_one(y, experts, lst, routed, plan, out))
        if one2
        else (lambda: ours.run_w2(y, experts, lst, plan)),
    ]


def measure(bench: ShapeBench, tokens: int, ceilings: dict[str, float]) -> dict[str, Any]:
    """Check, then time every side of one row."""
    shape, inputs = bench.shape, bench.inputs(tokens)
    weights, ids, _ = case.reference_route(inputs)
    local = ids if bench.emap is None else bench.emap[ids].long()
    rows = case.sample_rows(tokens)
    ref = case.reference_experts(inputs["latent"], weights, local, bench.sets[0], rows)
    row: dict[str, Any] = {
        "tokens": tokens,
        "errors": {},
        "refused": dict(bench.refused),
        "kernels": {},
        "graph_us": {},
        "cold_us": {},
    }
    sides = []
    ours_call = _ours(bench, inputs, 0)
    row["errors"]["ours"] = case.check_experts(ours_call(), ref, rows, "ours")
    first = ours_call()
    harness.require(all(torch.equal(first, ours_call()) for _ in range(3)), "ours: repeated runs differ")
    sides.append(Side("ours", [ours_call]))
    for name, rival in bench.rivals.items():
        call = rival.call(inputs)
        try:
            row["errors"][name] = case.check_experts(call(), ref, rows, name)
            sides.append(Side(name, [call]))
        except harness.CheckFailedError as err:
            row["refused"][name] = str(err)
        except Exception as err:
            row["refused"][name] = f"{type(err).__name__}: {str(err)[:300]}"
    touched = int((local.unique() >= 0).sum())
    bytes_ = touched * shape.bytes_per_expert
    pairs = int((local >= 0).sum())
    flops = pairs * 6 * shape.width * case.LATENT
    row |= {
        "experts_touched": touched,
        "weight_bytes": bytes_,
        "weight_floor_us": bytes_ / ceilings["copy_bytes_per_s"] * 1e6,
        "flop_floor_us": flops / ceilings["matrix_flops"] * 1e6,
    }
    for side in sides:
        row["kernels"][side.name] = harness.kernel_names(side.calls[0])
    iters = 20 if tokens <= 1024 else 10
    cold = harness.time_pair_cold([s.calls[0] for s in sides], iters)
    row["cold_us"] = {s.name: t for s, t in zip(sides, cold, strict=True)}
    if tokens <= 1024:
        # weights out of the cache inside the graph too: a flush kernel before each call, its own time subtracted
        flush = harness.flush_l2
        flushed: list[Any] = [lambda c=s.calls[0]: (flush(), c()) for s in sides]
        try:
            times = harness.time_pair_graph([flush, *flushed], iters, repeat=2)
            row["graph_us"] = {s.name: t - times[0] for s, t in zip(sides, times[1:], strict=True)}
        except Exception as err:
            row["graph_error"] = f"{type(err).__name__}: {str(err)[:300]}"
            torch.cuda.synchronize()
    best = row["graph_us"] or row["cold_us"]
    rivals = {k: v for k, v in best.items() if k != "ours"}
    if rivals:
        row["ratio"] = best["ours"] / min(rivals.values())
    plan, products = product_calls(bench, inputs["latent"], weights.float(), ids.int())
    if tokens <= 1024:
        times = harness.time_pair_graph([flush, *[lambda p=p: (flush(), p()) for p in products]], iters, repeat=2)
        w13, w2 = times[1] - times[0], times[2] - times[0]
    else:
        w13, w2 = harness.time_pair_cold(products, iters)
    row |= {
        "w13_us": w13,
        "w2_us": w2,
        "products_over_weight_floor": (w13 + w2) / row["weight_floor_us"],
        "plan": plan.__dict__,
    }
    return row


def measure_repack(shape: case.Shape) -> dict[str, Any]:
    """Repack on the device against reading the same bytes from a file (page cache: the fastest a file can be)."""
    released = released_weights(shape, 3)
    out = swizzle(shape, released)
    back = moe_layout.unpack_expert(out, shape.local - 1)
    harness.require(torch.equal(back["down"][0], released["w2"][-1]), "repack does not invert")
    width = shape.width
    us = harness.time_cold(
        lambda: moe_layout.pack_expert_(
            out,
            slice(None),
            (released["w13"][:, :width], released["w13_scale"][:, :width]),
            (released["w13"][:, width:], released["w13_scale"][:, width:]),
            (released["w2"], released["w2_scale"]),
        ),
        5,
    )
    path = Path(os.environ.get("TMPDIR", "/tmp")) / "k3_bench_read.bin"
    data = torch.empty(1 << 28, dtype=torch.uint8).random_(0, 256)
    path.write_bytes(data.numpy().tobytes())
    start = time.perf_counter()
    read = path.read_bytes()
    seconds = time.perf_counter() - start
    path.unlink()
    per_byte = seconds / len(read)
    return {
        "repack_us": us,
        "bytes": out.nbytes,
        "read_us_same_bytes_page_cache": per_byte * out.nbytes * 1e6,
        "repack_over_read": us / (per_byte * out.nbytes * 1e6),
    }


def warm(shape: case.Shape, tokens: int) -> None:
    """Compile what one row of ours needs (a worker process; the disk cache is shared)."""
    inputs, emap = case.random_inputs(tokens, 0), case.expert_map(shape)
    weights = moe_layout.empty_swizzled(shape.local, shape.width, case.LATENT, "cuda")
    ours.moe_forward(
        inputs["hidden"],
        inputs["latent"],
        inputs["router"],
        inputs["bias"],
        weights,
        case.TOP_K,
        expert_map=emap,
        **case.ACT,
    )
    ids = (
        torch.zeros(tokens, case.TOP_K, dtype=torch.int32, device="cuda")
        + torch.arange(case.TOP_K, device="cuda").int()
    )
    ours.moe_worklist.build(ids, shape.local, ours._plan(tokens, case.TOP_K, case.EXPERTS, weights).item_n, emap)
    torch.cuda.synchronize()


def report(key: str, row: dict[str, Any], seconds: float) -> list[list[Any]]:
    """Print one row; its line of the table at the end, if it has figures."""
    if "error" in row:
        print(f"{key}: {row['error'][:400]} {row.get('where', '')[-500:]}", flush=True)
        return []
    if key.endswith("repack"):
        print(f"{key}: {row['repack_us'] / 1e3:.2f} ms, {row['repack_over_read']:.3f} of reading", flush=True)
        return []
    best = row["graph_us"] or row["cold_us"]
    line = [key, *(best.get(n, float("nan")) for n in ("ours", "marlin", "humming")), row.get("ratio", float("nan"))]
    line += [row["w13_us"], row["w2_us"], row["weight_floor_us"], row["flop_floor_us"]]
    print(" ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in line), f"[{seconds:.1f} s]", flush=True)
    for name, why in row["refused"].items():
        print(f"   {name} refused: {why[:300]}", flush=True)
    return [line]


def run(out: Path, slices: list[str]) -> None:
    """All rows whose key contains one of ``slices`` (all if empty); resumable.

    ``K3_BENCH_SECONDS``: start no further row after so many seconds.
    """
    began, budget = time.time(), float(os.environ.get("K3_BENCH_SECONDS", "1e9"))
    results = harness.Results(Path(out) / "experts.json")
    ceilings = {"copy_bytes_per_s": harness.copy_bandwidth(), "matrix_flops": harness.matrix_rate()}
    results.record |= ceilings
    lines = []
    names = [(shape, t) for shape in SHAPES for t in TOKENS]
    workers = [
        subprocess.Popen([sys.executable, __file__, "--warm", shape.name, str(t)])
        for shape, t in names
        if f"{shape.name}.{t}" not in results.rows and (not slices or any(k in f"{shape.name}.{t}" for k in slices))
    ]
    for shape, repack in [(s, False) for s in SHAPES] + [(s, True) for s in SHAPES]:
        keys = [f"{shape.name}.repack"] if repack else [f"{shape.name}.{t}" for t in TOKENS]
        wanted = [k for k in keys if k not in results.rows and (not slices or any(s in k for s in slices))]
        if not wanted or time.time() - began > budget:
            continue
        bench = None if repack else ShapeBench(shape, 1)
        for worker in workers:
            worker.wait()
        for key in wanted:
            start = time.time()
            if start - began > budget:
                print(f"{key}: not started, {budget:.0f} s are over", flush=True)
                continue
            if bench is None:
                row = results.row(key, lambda shape=shape: measure_repack(shape))
            else:
                tokens = int(key.split(".")[1])
                row = results.row(key, lambda bench=bench, tokens=tokens: measure(bench, tokens, ceilings))
            assert row is not None
            lines += report(key, row, time.time() - start)
        del bench
        torch.cuda.empty_cache()
    print(harness.table(lines, ["row", "ours", "marlin", "humming", "ratio", "w13", "w2", "byte floor", "flop floor"]))
    results.notes = plots_experts.notes(results.rows)
    results.save()
    plots_experts.publish(Path(out) / "experts.json")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--warm"]:
        warm(case.SHAPES[sys.argv[2]], int(sys.argv[3]))
