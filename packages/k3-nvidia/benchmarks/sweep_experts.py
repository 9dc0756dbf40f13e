"""Tuning sweep of the expert products: each product alone under many tiles, then the best of both as a plan.

``python sweep_experts.py OUT [--only tp8.32,...] [--budget SECONDS] [--apply]``. Worker processes compile first (the
disk cache is shared); then every variant is compared with float64 (all pairs of some experts, thrice), and all of its
output with that of the first good one, before it is timed in graphs over several weight sets (weights cold). A variant
that is wrong stands in the row's ``wrong`` and can become no plan. Writes ``OUT/experts_sweep.json`` row by row;
``--apply`` puts the best plans of each swept row into ``k3_nvidia/tuning/experts.json`` under this device's name at
once (a copy lies in ``OUT/experts_tuning.json``).
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import experts_case as case
import harness
import torch

from k3_nvidia.kernels import experts as ours
from k3_nvidia.kernels import moe_layout, moe_worklist, router
from k3_nvidia.kernels.moe_combine import combine
from k3_nvidia.tuning import experts as tuning
from k3_nvidia.tuning.experts import Plan

Tile = tuple[int, ...]
WORKERS = 28
SECOND_LIST = 10.0  # us that a gain must exceed before the two products get lists of their own
TOKENS = (1, 8, 32, 128, 1024, 8192)
# Table rows that a measured token count fills, as the upper end of its expected pairs an expert.
UPPER = {1: 0.05, 8: 0.3, 32: 1.1, 128: 4.0, 1024: 28.0, 8192: 1e9}

# (BN, BX) -> gate/up tiles (row blocks, column blocks, warps, stages, and if bounded: registers a thread)
W13: dict[str, dict[tuple[int, int], list[Tile]]] = {
    "decode": {
        (8, 0): [(4, 8, 4, 3), (4, 4, 4, 4), (8, 4, 4, 3), (8, 4, 4, 2), (8, 2, 4, 4), (2, 8, 2, 3), (4, 4, 4, 3)]
    },
    "middle": {
        (32, 0): [(8, 2, 4, 3), (8, 2, 4, 4), (8, 2, 4, 3, 128), (8, 2, 4, 4, 128), (8, 1, 4, 4), (4, 2, 4, 4)],
        (64, 0): [(8, 1, 4, 4), (8, 2, 4, 3)],
    },
    "long": {
        (128, 0): [(8, 1, 8, 4), (8, 1, 8, 5), (16, 1, 16, 4), (16, 1, 16, 3), (4, 1, 4, 4)],
        (64, 32): [(8, 1, 4, 4)],
        (64, 0): [(8, 1, 4, 4)],
    },
}
# (BN, BX) -> narrow down tiles (row blocks, warps, stages, row tiles a program)
NARROW: dict[str, dict[tuple[int, int], list[Tile]]] = {
    "decode": {
        (8, 0): [(4, 4, 3, 2), (4, 4, 3, 4), (4, 4, 3, 7), (4, 4, 3, 14), (8, 4, 3, 7), (8, 4, 2, 7), (8, 4, 3, 4)]
    },
    "middle": {(32, 0): [(4, 4, 3, 28), (4, 4, 3, 56), (4, 4, 3, 14)], (64, 0): [(4, 4, 3, 28)]},
    "long": {
        (128, 0): [(4, 4, 2, 56), (4, 4, 2, 28)],
        (64, 32): [(4, 4, 3, 56)],
        (64, 0): [(4, 4, 3, 56)],
    },
}
# (BN, BX) -> wide down tiles (row blocks, column blocks, warps, stages)
WIDE: dict[str, dict[tuple[int, int], list[Tile]]] = {
    "decode": {(8, 0): [(4, 4, 4, 4), (4, 8, 4, 3), (8, 4, 4, 3), (2, 8, 2, 3), (4, 4, 4, 3)]},
    "middle": {(32, 0): [(8, 2, 4, 3), (8, 1, 4, 4), (4, 2, 4, 4), (8, 2, 4, 4)], (64, 0): [(8, 1, 4, 4)]},
    "long": {
        (128, 0): [(8, 1, 8, 4), (8, 1, 8, 5), (16, 1, 16, 4)],
        (64, 32): [(8, 1, 4, 4)],
    },
}
# For narrow shapes with many pairs an expert the wide kernel competes too.
ALSO_WIDE: dict[str, dict[tuple[int, int], list[Tile]]] = {"long": {(128, 0): [(8, 1, 8, 4), (16, 1, 16, 4)]}}


def phase(tokens: int) -> str:
    return "decode" if tokens <= 128 else "middle" if tokens <= 1024 else "long"


def is_narrow(shape: case.Shape) -> bool:
    return shape.width <= 768


def plan_of(n: tuple[int, int], w13: Tile, w2: Tile, narrow: bool, tokens: int) -> Plan:
    """The plan of a pair of tiles. The narrow plan keeps legal wide tiles beside it for widths the narrow kernel does
    not take."""
    mt, kt, warps, stages, *most = w13
    block, pdl = (512 if tokens <= 8 else 1024), tokens <= 128
    if narrow:
        mt2, warps2, stages2, rows2 = w2
        kt2 = 4 if n[0] <= 8 else 2 if n[0] < 64 else 1
        plan = Plan(n[0], mt, kt, warps, stages, mt2, kt2, warps2, stages2, rows2, block, pdl, n[1], 8)
    else:
        mt2, kt2, warps2, stages2 = w2
        plan = Plan(n[0], mt, kt, warps, stages, 4, kt2, warps2, stages2, 0, block, pdl, n[1], mt2)
    return replace(plan, regs13=sum(most))


def whole_plans(plan: Plan, shape: case.Shape, tokens: int) -> dict[str, Plan]:
    """Plans that differ in what only a whole call shows: one token's own kernels, the down weights asked for ahead,
    dependent launches."""
    out = {"plan": plan}
    if tokens == 1:
        for mt, stages in ((1, 5), (2, 5), (2, 7), (4, 4)):
            out[f"one13-{mt}-{stages}"] = replace(plan, one13=mt, one_stages=stages)
        if is_narrow(shape):
            for mt, rows in ((1, 1), (1, 2), (2, 1)):
                out[f"one2-{mt}-{rows}"] = replace(plan, one2=mt, one_rows=rows)
    if tokens <= 8:
        for quarters in (2, 4):
            out[f"next-{quarters}"] = replace(plan, next_quarters=quarters)
    if tokens > 128:
        out["pdl"] = replace(plan, pdl=True)
    return out


def combined(plan: Plan, plans: dict[str, Plan], us: dict[str, float]) -> Plan:
    """The best of each kind together: of the names up to their first dash, the quickest that beats ``plan``."""
    best: dict[str, str] = {}
    for name in us:
        kind = name.split("-")[0]
        if us[name] < us.get(best.get(kind, "plan"), us["plan"]):
            best[kind] = name
    for name in best.values():
        changed = {k: v for k, v in plans[name].__dict__.items() if v != plans["plan"].__dict__[k]}
        plan = replace(plan, **changed)
    return plan


def variants(shape: case.Shape, tokens: int) -> list[tuple[str, tuple[int, int], Tile, bool]]:
    """(product, (BN, BX), tile, narrow kernel) to try for a row."""
    kind = phase(tokens)
    out = [("w13", n, tile, True) for n, tiles in W13[kind].items() for tile in tiles]
    down = [(NARROW[kind], True), (ALSO_WIDE.get(kind, {}), False)] if is_narrow(shape) else [(WIDE[kind], False)]
    return out + [("w2", n, t, narrow) for table, narrow in down for n, tiles in table.items() for t in tiles]


class Bench:
    """Weight sets and inputs of one shape and token count."""

    def __init__(self, sets: list[Any], shape: case.Shape, tokens: int) -> None:
        self.sets, self.shape, self.tokens = sets, shape, tokens
        self.emap = case.expert_map(shape)
        self.inputs = [case.random_inputs(tokens, i) for i in range(len(sets))]
        self.routing = [
            router.route_and_list(
                i["hidden"], i["router"], i["bias"], case.TOP_K, shape.local, 16, expert_map=self.emap
            )[:2]
            for i in self.inputs
        ]
        ids = [r[1].flatten().long() for r in self.routing]
        self.local = [(i < shape.local) & (i >= 0) if self.emap is None else self.emap[i] >= 0 for i in ids]
        self.lists: dict[int, list[Any]] = {}
        pairs = tokens * case.TOP_K
        gen = torch.Generator(device="cuda").manual_seed(1)
        self.ys = [torch.randn(pairs, w.padded_width, device="cuda", generator=gen).bfloat16() for w in sets]

    def worklists(self, bn: int) -> list[Any]:
        if bn not in self.lists:
            self.lists[bn] = [moe_worklist.build(ids, self.shape.local, bn, self.emap) for _, ids in self.routing]
        return self.lists[bn]

    def calls(self, product: str, n: tuple[int, int], tile: Tile, narrow: bool) -> list[Any]:
        """One call a weight set of one product under one tile."""
        w13, w2 = (tile, (4, 4, 3, 7)) if product == "w13" else ((8, 1, 4, 3), tile)
        plan = plan_of(n, w13, w2, narrow, tokens=9999)
        act, lists = (1, case.BETA, case.LINEAR_BETA), self.worklists(plan.item_n)
        if product == "w13":
            return [
                lambda w=w, i=i, lst=lst: ours.run_w13(i["latent"], w, lst, case.TOP_K, act, plan)
                for w, i, lst in zip(self.sets, self.inputs, lists, strict=True)
            ]
        return [
            lambda w=w, y=y, lst=lst: ours.run_w2(y, w, lst, plan)
            for w, y, lst in zip(self.sets, self.ys, lists, strict=True)
        ]

    def reference(self, product: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``experts_case.reference_products`` of the first weight set."""
        ids = self.routing[0][1].flatten().long()
        local = ids if self.emap is None else self.emap[ids].long()
        local = torch.where(self.local[0], local, -1)
        rows = self.inputs[0]["latent"] if product == "w13" else self.ys[0]
        return case.reference_products(product, rows, self.sets[0], local)

    def result(self, product: str, call: Any) -> torch.Tensor:
        """What a call of the first weight set wrote, rows of experts that are elsewhere left out."""
        here = self.local[0]
        out: torch.Tensor = call()
        return out[: int(here.sum())] if product == "w13" else out[here]

    def error(self, product: str, call: Any, want: tuple[torch.Tensor, torch.Tensor], rounds: int = 3) -> float:
        """Largest relative error against float64 of several runs (what is wrong may be so only now and then)."""
        at, ref = want
        outs = [call()[at, : ref.shape[1]] for _ in range(rounds)]
        return max(harness.relative_error(out, ref) for out in outs)


def cases(only: list[str]) -> list[tuple[case.Shape, int]]:
    """Rows to sweep, those that missed their target first."""
    first = ["tp8.8192", "ep16.8192", "tp8.1024", "tp16.1", "tp16.8", "ep16.8", "tp16.8192", "tp16.1024", "ep16.1024"]
    rows = [(s, t) for s in (case.TP8, case.TP16, case.EP16) for t in TOKENS]
    rows = [(s, t) for s, t in rows if not only or f"{s.name}.{t}" in only]
    names = {f"{s.name}.{t}": (s, t) for s, t in rows}
    return [names.pop(k) for k in first if k in names] + list(names.values())


def wholes(only: list[str]) -> list[tuple[case.Shape, int, Plan]]:
    """Whole calls whose kernels no tile of ``variants`` holds."""
    out = []
    device = torch.cuda.get_device_name(0)
    for shape, tokens in cases(only):
        plan = tuning.choose(tokens, case.TOP_K, case.EXPERTS, device, 90, shape.width)
        found = whole_plans(replace(plan, one13=0, one2=0, next_quarters=0), shape, tokens)
        out += [(shape, tokens, p) for name, p in found.items() if name != "pdl"]
    return out


def compile_worker(index: int, count: int, only: list[str]) -> None:
    """Run every count-th variant once on a small bench so that its binary is in the disk cache."""
    jobs: dict[Any, None] = {}
    for shape, tokens in cases(only):
        for job in variants(shape, tokens):
            # what the gate/up kernel specialises on is the same for the two wide shapes
            jobs[(case.TP8 if job[0] == "w13" and shape == case.EP16 else shape, *job)] = None
    benches: dict[str, Bench] = {}
    # tiles with the most code first, so that no worker ends with the longest job
    order = sorted(jobs, key=lambda j: -(j[2][0] + j[2][1]) * (1 + (j[2][1] > 0)))
    for shape, *job in order[index::count]:
        if shape.name not in benches:
            small = case.Shape(shape.name, shape.width, 16 if shape.local == case.EXPERTS else 8)
            benches[shape.name] = Bench([case.random_experts(small, 0)], small, 16)
        try:
            benches[shape.name].calls(*job)[0]()
        except Exception as err:
            print(f"compile {shape.name} {job}: {type(err).__name__} {str(err)[:120]}", flush=True)
    for shape, tokens, plan in wholes(only)[index::count]:  # router, list and weighted sum, and what only they show
        small = Bench([moe_layout.empty_swizzled(shape.local, shape.width, case.LATENT, "cuda")], shape, tokens)
        try:
            forward(small, plan)[0]()
            parts(small, 1, 1)
        except Exception as err:
            print(f"compile {shape.name} {tokens}: {type(err).__name__} {str(err)[:120]}", flush=True)
    torch.cuda.synchronize()


def measure(shape: case.Shape, tokens: int, sets: list[Any], bandwidth: float) -> dict[str, Any]:
    """Times of all variants of a row, and the best plan."""
    bench = Bench(sets, shape, tokens)
    touched = [int(r[1].flatten()[here].unique().numel()) for r, here in zip(bench.routing, bench.local, strict=True)]
    row: dict[str, Any] = {"touched": touched, "w13": {}, "w2": {}, "wrong": {}}
    best: dict[tuple[str, tuple[int, int]], tuple[float, Tile, bool]] = {}
    reference: dict[str, torch.Tensor] = {}
    exact = {product: bench.reference(product) for product in ("w13", "w2")}
    repeat = 4 if tokens <= 8 else 1
    for product, n, tile, narrow in variants(shape, tokens):
        name = "-".join(map(str, (*n, *tile))) + ("" if product == "w13" else "n" if narrow else "w")
        try:
            calls = bench.calls(product, n, tile, narrow)
            error = bench.error(product, calls[0], exact[product])
            if not error <= case.PRODUCT_TOLERANCE:
                row["wrong"][f"{product} {name}"] = f"{error:.2e} from float64"
                continue
            got = bench.result(product, calls[0])
            error = harness.relative_error(got, reference.setdefault(product, got))
            if not error <= 2 * case.PRODUCT_TOLERANCE:
                row["wrong"][f"{product} {name}"] = f"{error:.2e} from the first good variant"
                continue
            us = harness.time_graph(calls, 10, repeat)
        except Exception as err:
            row["wrong"][f"{product} {name}"] = f"{type(err).__name__}: {str(err)[:160]}"
            continue
        row[product][name] = us
        if us < best.get((product, n), (1e9,))[0]:
            best[product, n] = (us, tile, narrow)
    sums = {n: best["w13", n][0] + best["w2", n][0] for p, n in best if p == "w13" and ("w2", n) in best}
    n = min(sums, key=lambda k: sums[k])
    n13, n2 = (
        min((k for p, k in best if p == product), key=lambda k: best[product, k][0]) for product in ("w13", "w2")
    )
    if tokens <= 128 or best["w13", n13][0] + best["w2", n2][0] + SECOND_LIST > sums[n]:
        n13 = n2 = n
    (_, w13, _), (_, w2, narrow) = best["w13", n13], best["w2", n2]
    plan = plan_of(n13, w13, w2, narrow, tokens)
    if n2 != n13:
        plan = replace(plan, block_n2=n2[0], extra_n2=n2[1])
    row["plan"] = whole(bench, plan, row, repeat).__dict__
    row["best_us"] = {"-".join(map(str, k)): v for k, v in sums.items()}
    weight_us = sum(touched) / len(touched) * shape.bytes_per_expert / bandwidth * 1e6
    row["floor_w13"], row["floor_w2"] = weight_us * 2 / 3, weight_us / 3
    row["parts"] = parts(bench, 10, repeat)
    return row


def forward(bench: Bench, plan: Plan) -> list[Any]:
    """The whole part, one call a weight set."""
    return [
        lambda w=w, i=i: ours.moe_forward(
            i["hidden"],
            i["latent"],
            i["router"],
            i["bias"],
            w,
            case.TOP_K,
            expert_map=bench.emap,
            plan=plan,
            **case.ACT,
        )
        for w, i in zip(bench.sets, bench.inputs, strict=True)
    ]


def whole(bench: Bench, plan: Plan, row: dict[str, Any], repeat: int) -> Plan:
    """Time ``whole_plans`` of a row's best tiles, each checked against float64 first, and choose."""
    inputs, tokens = bench.inputs[0], bench.tokens
    weights, ids, _ = case.reference_route(inputs)
    local = ids if bench.emap is None else bench.emap[ids].long()
    rows = case.sample_rows(tokens)
    ref = case.reference_experts(inputs["latent"], weights, local, bench.sets[0], rows)
    us: dict[str, float] = {}

    def time_plan(name: str, candidate: Plan) -> None:
        try:
            calls = forward(bench, candidate)
            case.check_experts(calls[0](), ref, rows, name)
            us[name] = harness.time_graph(calls, 10, repeat)
        except Exception as err:
            row["wrong"][f"whole {name}"] = f"{type(err).__name__}: {str(err)[:160]}"

    plans = whole_plans(plan, bench.shape, tokens)
    for name, candidate in plans.items():
        time_plan(name, candidate)
    if "plan" not in us:
        raise harness.CheckFailedError(row["wrong"]["whole plan"])
    chosen = combined(plan, plans, us)
    if chosen != plan:
        time_plan("together", chosen)
        if us.get("together", 1e9) > us["plan"]:
            chosen = plan
    row["whole"] = us
    return chosen


def parts(bench: Bench, iters: int, repeat: int) -> dict[str, float]:
    """Router product, router with list, list from ids, weighted sum."""
    shape, d_rows = bench.shape, bench.tokens * case.TOP_K
    d = torch.randn(d_rows, case.LATENT, device="cuda").bfloat16()
    out = torch.empty(bench.tokens, case.LATENT, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, list[Any]] = {
        "logits": [lambda i=i: router.router_logits(i["hidden"], i["router"]) for i in bench.inputs],
        "route_all": [
            lambda i=i: router.route_and_list(
                i["hidden"], i["router"], i["bias"], case.TOP_K, shape.local, 16, expert_map=bench.emap
            )
            for i in bench.inputs
        ],
        "list": [lambda r=r: moe_worklist.build(r[1], shape.local, 16, bench.emap) for r in bench.routing],
    }
    for block in (512, 1024):
        calls[f"combine{block}"] = [
            lambda r=r, k=block: combine(d, r[0], r[1], shape.local, bench.emap, out, k) for r in bench.routing
        ]
    return {name: harness.time_graph(c, iters, repeat) for name, c in calls.items()}


def apply(found: dict[tuple[str, int], dict[str, Any]], path: Path, device: str, when: str) -> None:
    """Put measured plans into the tuning table: rows of a swept (width, tokens) are replaced, others kept (from the
    default table where the device has none)."""
    table = json.loads(path.read_text())
    entry = table["devices"].setdefault(device, json.loads(json.dumps(table["devices"]["default"])))
    entry["measured"] = when
    for (shape, tokens), plan in found.items():
        width = case.SHAPES[shape].width
        rows = next(t["rows"] for t in entry["tables"] if width <= t["max_width"])
        row = next(r for r in rows if r["max_pairs"] == UPPER[tokens])
        row["plan"] = plan
    text = json.dumps(table, indent=1)
    flat = re.sub(
        r'\{\s*"max_pairs": ([^,]+),\s*"plan": \{([^}]*)\}\s*\}',
        lambda m: f'{{"max_pairs": {m[1]}, "plan": {{{re.sub(chr(92) + "s+", " ", m[2]).strip()}}}}}',
        text,
    )
    path.write_text(flat + "\n")


def adopt(shape: case.Shape, tokens: int, plan: dict[str, Any], env: dict[str, Any], out: Path) -> None:
    """``apply`` for one row, to the table of the imported package, and a copy of the table to ``out``."""
    when = (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, torch {env['torch']}, triton {env['triton']}, "
        "benchmarks/sweep_experts.py"
    )
    path = Path(tuning.__file__).with_name("experts.json")
    apply({(shape.name, tokens): plan}, path, torch.cuda.get_device_name(0), when)
    (out / "experts_tuning.json").write_text(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--budget", type=float, default=400.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--apply", action="store_true")
    a = parser.parse_args()
    only = [k for k in a.only.split(",") if k]
    if a.worker is not None:
        compile_worker(a.worker, WORKERS, only)
        return
    start = time.time()
    command = [sys.executable, __file__, str(a.out), "--only", a.only]
    workers = [subprocess.Popen([*command, "--worker", str(i)]) for i in range(WORKERS)]
    for worker in workers:
        try:
            worker.wait(timeout=max(1.0, start + 0.6 * a.budget - time.time()))
        except subprocess.TimeoutExpired:
            worker.kill()  # what it has not compiled is compiled below
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    results = harness.Results(a.out / "experts_sweep.json", resume=False)
    bandwidth = harness.copy_bandwidth()
    results.record |= {"copy_bytes_per_s": bandwidth, "matrix_flops": harness.matrix_rate()}
    sets_of: dict[str, list[Any]] = {}
    for shape, tokens in cases(only):
        if time.time() - start > a.budget:
            print("budget spent", flush=True)
            break
        if shape.name not in sets_of:
            sets_of[shape.name] = [case.random_experts(shape, s) for s in range(3)]
        sets = sets_of[shape.name]
        began = time.time()

        def one(shape: case.Shape = shape, tokens: int = tokens, sets: list[Any] = sets) -> dict[str, Any]:
            return measure(shape, tokens, sets, bandwidth)

        row = results.row(f"{shape.name}.{tokens}", one)
        assert row is not None
        report(f"{shape.name}.{tokens}", row, time.time() - began)
        if a.apply and "plan" in row:
            adopt(shape, tokens, row["plan"], results.record, a.out)
    print(f"total {time.time() - start:.0f} s", flush=True)


def report(key: str, row: dict[str, Any], seconds: float) -> None:
    """One row for the eye."""
    if "error" in row:
        print(f"== {key}: {row['error'][:300]} {row.get('where', '')[-300:]}", flush=True)
        return

    def best(times: dict[str, float]) -> str:
        return "  ".join(f"{k}={v:.1f}" for k, v in sorted(times.items(), key=lambda r: r[1])[:5])

    floors = f"floors {row['floor_w13']:.1f} {row['floor_w2']:.1f}"
    print(f"== {key} [{seconds:.1f} s]; touched {row['touched'][0]}; {floors}", flush=True)
    print(f"   w13 {best(row['w13'])}\n   w2  {best(row['w2'])}", flush=True)
    print("   " + "  ".join(f"{k}={v:.1f}" for k, v in row["parts"].items()), flush=True)
    print("   whole " + "  ".join(f"{k}={v:.1f}" for k, v in row["whole"].items()), flush=True)
    for name, why in row["wrong"].items():
        print(f"   WRONG {name}: {why}", flush=True)


if __name__ == "__main__":
    main()
