"""Tuning sweep of the expert products: correctness once, then each product alone under many tiles.

``python sweep_experts.py OUT [--phase decode,prefill] [--budget SECONDS]``. Compiles in worker processes first (the
disk cache is shared), then times in graphs over several weight sets. Prints one line a (shape, tokens): the best tiles
of each product.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import experts_case as case
import harness
import torch

from k3_nvidia.kernels import experts as ours
from k3_nvidia.kernels import moe_worklist, router
from k3_nvidia.kernels.moe_combine import combine
from k3_nvidia.tuning.experts import Plan

# gate/up: (BN, BX, row blocks, column blocks, warps, stages)
W13_DECODE = [
    (8, 0, 4, 8, 4, 3), (8, 0, 4, 4, 4, 4), (8, 0, 8, 4, 4, 3), (8, 0, 8, 4, 4, 2), (8, 0, 8, 2, 4, 4),
    (8, 0, 2, 8, 2, 3), (16, 0, 8, 4, 4, 3), (16, 0, 8, 2, 4, 4),
]  # fmt: skip
W13_PREFILL = [
    (32, 0, 8, 2, 4, 3), (32, 0, 8, 2, 4, 4), (32, 0, 8, 4, 4, 3), (32, 32, 8, 2, 4, 3), (64, 32, 8, 1, 4, 4),
    (64, 32, 8, 2, 4, 3), (64, 32, 8, 1, 8, 4), (64, 32, 8, 2, 8, 3), (64, 32, 8, 4, 4, 2), (128, 64, 8, 1, 8, 4),
    (128, 0, 8, 1, 8, 4), (128, 0, 8, 2, 8, 3), (128, 64, 8, 4, 8, 2),
]  # fmt: skip
# narrow down product: (BN, BX, row blocks, warps, stages, row tiles a program)
W2_DECODE = [
    (8, 0, 4, 4, 3, 2), (8, 0, 4, 4, 3, 7), (8, 0, 4, 4, 3, 14), (8, 0, 4, 4, 4, 7), (8, 0, 8, 4, 3, 7),
    (8, 0, 8, 4, 2, 7), (16, 0, 4, 4, 3, 7), (16, 0, 8, 4, 3, 7),
]  # fmt: skip
W2_PREFILL_NARROW = [
    (32, 0, 4, 4, 4, 28), (32, 0, 4, 4, 3, 28), (32, 0, 8, 4, 3, 14),
    (64, 0, 4, 4, 3, 56), (64, 32, 4, 4, 3, 56),
    (64, 0, 8, 4, 2, 28),
    (64, 32, 8, 8, 3, 28), (64, 32, 4, 4, 2, 56),
]  # fmt: skip
# wide down product, as gate/up
W2_WIDE_DECODE = [(8, 0, 4, 4, 4, 4), (8, 0, 8, 4, 4, 3), (16, 0, 8, 2, 4, 4)]
W2_PREFILL_WIDE = [
    (32, 0, 8, 2, 4, 3), (64, 32, 8, 1, 4, 3), (64, 32, 8, 2, 4, 3), (64, 32, 8, 2, 8, 3), (128, 0, 8, 1, 8, 4),
    (128, 64, 8, 1, 8, 4),
]  # fmt: skip


def plan13(v: tuple[int, ...]) -> Plan:
    bn, bx, mt, kt, warps, stages = v
    return Plan(bn, mt, kt, warps, stages, 4, 4, 4, 3, 14, 1024, False, bx)


def plan2(v: tuple[int, ...], narrow: bool) -> Plan:
    if narrow:
        bn, bx, mt, warps, stages, rows = v
        return Plan(bn, 4, 4, 4, 4, mt, 4, warps, stages, rows, 1024, False, bx)
    bn, bx, mt, kt, warps, stages = v
    return Plan(bn, 4, 4, 4, 4, mt, kt, warps, stages, 0, 1024, False, bx, mt)


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
        self.lists: dict[int, list[Any]] = {}

    def list(self, bn: int) -> list[Any]:
        if bn not in self.lists:
            self.lists[bn] = [moe_worklist.build(ids, self.shape.local, bn, self.emap) for _, ids in self.routing]
        return self.lists[bn]

    def w13(self, v: tuple[int, ...]) -> list[Any]:
        plan, act = plan13(v), (1, case.BETA, case.LINEAR_BETA)
        return [
            lambda w=w, i=i, lst=lst: ours.run_w13(i["latent"], w, lst, case.TOP_K, act, plan)
            for w, i, lst in zip(self.sets, self.inputs, self.list(plan.item_n), strict=True)
        ]

    def w2(self, v: tuple[int, ...], narrow: bool) -> list[Any]:
        plan = plan2(v, narrow)
        lists = self.list(plan.item_n)
        ys = [
            torch.randn(lst.sorted.numel(), w.padded_width, device="cuda").bfloat16()
            for w, lst in zip(self.sets, lists, strict=True)
        ]
        return [
            lambda w=w, y=y, lst=lst: ours.run_w2(y, w, lst, plan)
            for w, y, lst in zip(self.sets, ys, lists, strict=True)
        ]


def variants(shape: case.Shape, tokens: int) -> tuple[list[Any], list[tuple[Any, bool]]]:
    """(gate/up tiles, (down tiles, narrow kernel)) to try for a row."""
    narrow = shape.width <= 768
    if tokens <= 128:
        return W13_DECODE, [(v, True) for v in W2_DECODE] if narrow else [(v, False) for v in W2_WIDE_DECODE]
    if tokens <= 1024:
        return W13_PREFILL[:5], ([(v, True) for v in W2_PREFILL_NARROW[:4]] if narrow else []) + [
            (v, False) for v in W2_PREFILL_WIDE[:2]
        ]
    return W13_PREFILL[4:], ([(v, True) for v in W2_PREFILL_NARROW[3:]] if narrow else []) + [
        (v, False) for v in W2_PREFILL_WIDE[1:]
    ]


ONLY: list[str] = []


def cases(phases: list[str]) -> list[tuple[case.Shape, int]]:
    """Rows of the phases; ``--only tp8.32,...`` narrows them."""
    out = []
    for shape in (case.TP8, case.TP16, case.EP16):
        for phase, tokens in (("decode", (1, 8, 32, 128)), ("prefill", (1024, 8192))):
            if phase in phases:
                out += [(shape, t) for t in tokens if not ONLY or f"{shape.name}.{t}" in ONLY]
    return out


def compile_worker(index: int, count: int, phases: list[str]) -> None:
    """Run every count-th variant once so that its binary is in the disk cache."""
    jobs = []
    for shape in (case.TP8, case.TP16, case.EP16):
        seen = set()
        for sh, tokens in cases(phases):
            if sh != shape:
                continue
            a, b = variants(shape, tokens)
            for job in [("13", v, True) for v in a] + [("2", v, n) for v, n in b]:
                if job not in seen:
                    seen.add(job)
                    jobs.append((shape, *job))
    benches: dict[str, Bench] = {}
    for i, (shape, which, v, narrow) in enumerate(jobs):
        if i % count != index:
            continue
        if shape.name not in benches:
            small = case.Shape(shape.name, shape.width, 16)
            benches[shape.name] = Bench([case.random_experts(small, 0)], small, 4)
        b = benches[shape.name]
        try:
            (b.w13(v) if which == "13" else b.w2(v, narrow))[0]()
        except Exception as err:
            print(f"compile {shape.name} {which} {v}: {type(err).__name__} {str(err)[:120]}", flush=True)
    torch.cuda.synchronize()


def check(shape: case.Shape, tokens: int, sets: list[Any]) -> str:
    b = Bench(sets[:1], shape, tokens)
    i = b.inputs[0]
    _, rids, biased = case.reference_route(i)
    w, ids = b.routing[0]
    got = biased.gather(1, ids.long()).min(-1).values
    want = biased.gather(1, rids).min(-1).values
    harness.require(bool((got >= want - 1e-5).all()), "router: a chosen expert is below the cut")
    harness.require(all(len(set(r)) == case.TOP_K for r in ids.tolist()), "router: ids repeat")
    ref_w = torch.sigmoid(i["hidden"].double() @ i["router"].double().t()).gather(1, ids.long())
    err_w = harness.relative_error(w, ref_w / ref_w.sum(-1, keepdim=True))
    harness.require(err_w < 2e-6, f"router weights off by {err_w:.1e}")
    rows = case.sample_rows(tokens)
    ref = case.reference_experts(i["latent"], w, ids if b.emap is None else b.emap[ids.long()], sets[0], rows)
    out = ours.moe_forward(
        i["hidden"], i["latent"], i["router"], i["bias"], sets[0], case.TOP_K, expert_map=b.emap, **case.ACT
    )
    err = case.check_experts(out, ref, rows, "moe_forward")
    again = ours.experts(i["latent"], sets[0], w, ids, expert_map=b.emap, **case.ACT)
    harness.require(torch.equal(out, again), "moe_forward and experts differ")
    return f"{shape.name} {tokens}: router {err_w:.1e}, experts {err:.2e}"


def best(results: dict[str, float], count: int = 4) -> str:
    rows = sorted(results.items(), key=lambda r: r[1])
    return "  ".join(f"{k}={v:.1f}" for k, v in rows[:count])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--phase", default="decode,prefill")
    parser.add_argument("--worker", type=int, nargs=2)
    parser.add_argument("--budget", type=float, default=400.0)
    parser.add_argument("--only", default="")
    a = parser.parse_args()
    ONLY.extend(k for k in a.only.split(",") if k)
    phases = a.phase.split(",")
    if a.worker:
        compile_worker(*a.worker, phases)
        return
    start = time.time()
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(a.out), "--phase", a.phase, "--only", a.only, "--worker", str(i), "14"]
        )
        for i in range(14)
    ]
    bw, rate = harness.copy_bandwidth(), harness.matrix_rate()
    print(f"copy {bw / 1e12:.2f} TB/s, matrix {rate / 1e12:.0f} TFLOP/s (workers compiling beside)", flush=True)
    for p in workers:
        p.wait()
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    results = harness.Results(a.out / "experts_sweep.json", resume=False)
    results.record |= {"copy_bytes_per_s": harness.copy_bandwidth(), "matrix_flops": harness.matrix_rate()}
    order = sorted(cases(phases), key=lambda c: (c[1] > 128, c[0].name != "tp8", c[0].name, c[1]))
    sets_of: dict[str, list[Any]] = {}
    for shape, tokens in order:
        if time.time() - start > a.budget:
            print("budget spent", flush=True)
            break
        if shape.name not in sets_of:
            sets_of[shape.name] = [case.random_experts(shape, s) for s in range(3)]
        sets = sets_of[shape.name]

        def measure(shape: case.Shape = shape, tokens: int = tokens, sets: list[Any] = sets) -> dict[str, Any]:
            line = check(shape, tokens, sets)
            b = Bench(sets, shape, tokens)
            touched = [len(set(ids.flatten().tolist()) & set(range(shape.local))) for _, ids in b.routing]
            row: dict[str, Any] = {"check": line, "touched": touched, "w13": {}, "w2": {}}
            repeat = 4 if tokens <= 8 else 1
            v13, v2 = variants(shape, tokens)
            for v in v13:
                try:
                    row["w13"]["-".join(map(str, v))] = harness.time_graph(b.w13(v), 12, repeat)
                except Exception as err:
                    row["w13"]["-".join(map(str, v))] = 1e9
                    print(v, type(err).__name__, str(err)[:80], flush=True)
            for v, narrow in v2:
                name = "-".join(map(str, v)) + ("n" if narrow else "w")
                try:
                    row["w2"][name] = harness.time_graph(b.w2(v, narrow), 12, repeat)
                except Exception as err:
                    row["w2"][name] = 1e9
                    print(v, type(err).__name__, str(err)[:80], flush=True)
            bytes_ = sum(touched) / len(touched) * shape.bytes_per_expert
            row["floor_w13"], row["floor_w2"] = (bytes_ * f / bw * 1e6 for f in (2 / 3, 1 / 3))
            row["flop_us"] = (
                tokens * case.TOP_K * shape.local / case.EXPERTS * 6 * shape.width * case.LATENT / rate * 1e6
            )
            i = b.inputs
            parts = {
                "logits": [lambda i=i: router.router_logits(i["hidden"], i["router"]) for i in i],
                "route_all": [
                    lambda i=i: router.route_and_list(
                        i["hidden"], i["router"], i["bias"], case.TOP_K, shape.local, 16, expert_map=b.emap
                    )
                    for i in i
                ],
                "list": [lambda r=r: moe_worklist.build(r[1], shape.local, 16, b.emap) for r in b.routing],
            }
            d = torch.randn(tokens * case.TOP_K, case.LATENT, device="cuda").bfloat16()
            out = torch.empty(tokens, case.LATENT, device="cuda", dtype=torch.bfloat16)
            for block in (512, 1024):
                parts[f"combine{block}"] = [
                    lambda r=r, k=block: combine(d, *r, shape.local, b.emap, out, k) for r in b.routing
                ]
            for pdl in ():
                base = ours._plan(tokens, case.TOP_K, case.EXPERTS, sets[0])
                plan = Plan(**{**base.__dict__, "pdl": pdl})
                parts[f"all_pdl{int(pdl)}"] = [
                    lambda w=w, i=i, plan=plan: ours.moe_forward(
                        i["hidden"],
                        i["latent"],
                        i["router"],
                        i["bias"],
                        w,
                        case.TOP_K,
                        expert_map=b.emap,
                        plan=plan,
                        **case.ACT,
                    )
                    for w, i in zip(sets, i, strict=True)
                ]
            row["parts"] = {k: harness.time_graph(f, 12, repeat) for k, f in parts.items()}
            return row

        row = results.row(f"{shape.name}.{tokens}", measure)
        assert row is not None
        if "error" in row:
            print(f"== {shape.name} {tokens}: {row['error'][:300]} {row.get('where', '')[-300:]}", flush=True)
            continue
        print(
            f"== {row['check']}; touched {row['touched'][0]}; "
            f"floors w13 {row['floor_w13']:.1f} w2 {row['floor_w2']:.1f} "
            f"flop {row['flop_us']:.1f}\n   w13 {best(row['w13'])}\n   w2  {best(row['w2'])}\n   "
            + "  ".join(f"{k}={v:.1f}" for k, v in row["parts"].items()),
            flush=True,
        )
    print(f"total {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
