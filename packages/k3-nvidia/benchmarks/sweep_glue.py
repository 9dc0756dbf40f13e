"""Tiles of the small kernels, side by side: ``python sweep_glue.py [--out DIR] [--seconds 60] [--slice NAME ...]``.

Every tile of SiTU, the fp32 sigmoid, the gated norm, the weighted sum (with the ids read and without) and the choice of
experts is compiled first, by several threads at once; then each is checked against its contract in fp64 and all of one
kernel and size are timed in CUDA graphs whose replays alternate, beside a device copy of as many bytes, under
``bench_glue.py``'s rule. <out>/glue_sweep.json has microseconds by tile; ``won`` in it is the best tile a kernel, and
<out>/tuning_glue.json is ``k3_nvidia/tuning/glue.json`` with what won: copy it there. The norm's is for kda.json, the
weighted sum's columns for experts.json. A tile replaces the present one where it gains GAIN or more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_glue
import torch
from bench_glue import Case
from harness import Results, time_pair_graph

from k3_core.operators import compiling
from k3_nvidia.kernels import moe_combine, router
from k3_nvidia.tuning import glue as tuning
from k3_nvidia.tuning import kda as kda_tuning

#: (rows, columns, warps) by the entry of the table they compete for: its ``up_to``.
SITU: dict[int | None, tuple[tuple[int, int, int], ...]] = {
    64: ((1, 512, 4), (1, 256, 2), (1, 128, 1), (1, 256, 1)),
    2048: ((4, 128, 4), (4, 128, 2), (2, 128, 2), (8, 64, 4), (8, 128, 4)),
    None: ((16, 128, 4), (8, 128, 4), (8, 128, 2), (4, 128, 2), (32, 64, 4)),
}
SIGMOID = ((512, 4), (256, 2), (256, 1), (1024, 4), (2048, 4))  # most elements, warps
NORM = ((16, 4), (8, 4), (8, 2), (4, 2), (4, 1))  # rows, warps
COLUMNS = (512, 256, 128, 1024)  # of the weighted sum
WARPS = (1, 2, 4, 8)  # of the choice by itself; of the choice that builds the list LISTING
LISTING = (8, 4)
#: A tile must be this much faster than the one in the table, over the sizes together, to take its place.
GAIN = 1.02

Variants = dict[str, Callable[[], Any]]


@contextmanager
def tuned(table: dict[str, Any], key: str, value: Any) -> Iterator[None]:
    """Within it the table has ``value`` at ``key``."""
    before = table[key]
    table[key] = value
    try:
        yield
    finally:
        table[key] = before


def _with(table: dict[str, Any], key: str, value: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with tuned(table, key, value):
            return call()

    return run


def situ_tiles(case: Case, tokens: int) -> Variants:
    """By (rows, columns, warps), the present first."""
    reach = next(e["up_to"] for e in tuning.table()["situ"] if e["up_to"] is None or tokens <= e["up_to"])
    found = {}
    for tile in dict.fromkeys([tuple(tuning.situ(tokens).values()), *SITU[reach]]):
        entry = {"up_to": None, "rows": tile[0], "columns": tile[1], "warps": tile[2]}
        found["-".join(map(str, tile))] = _with(tuning.table(), "situ", [entry], case.call)
    return found


def sigmoid_tiles(case: Case, tokens: int) -> Variants:
    """By (elements, warps)."""
    tiles = dict.fromkeys([tuning.sigmoid(), *SIGMOID])
    return {f"{e}-{w}": _with(tuning.table(), "sigmoid", {"elements": e, "warps": w}, case.call) for e, w in tiles}


def norm_tiles(case: Case, tokens: int) -> Variants:
    """By (rows, warps)."""
    table = kda_tuning.table()
    tiles = dict.fromkeys([(table["norm"]["ROWS"], table["norm"]["num_warps"]), *NORM])
    return {f"{r}-{w}": _with(table, "norm", {"ROWS": r, "num_warps": w}, case.call) for r, w in tiles}


def choice_tiles(case: Case, tokens: int) -> Variants:
    """By warps, the choice alone."""
    key = "few" if tokens <= router.ONE_LAUNCH_TOKENS else "many"
    tiles = dict.fromkeys([tuning.table()["choice"][key], *WARPS])
    return {str(w): _with(tuning.table(), "choice", tuning.table()["choice"] | {key: w}, case.call) for w in tiles}


def combine_tiles(tokens: int) -> tuple[Case, Variants]:
    """By columns a program, with the ids read and, as the layers have it, without."""
    case = bench_glue.combine(tokens)
    d, weights, ids, out = case.tensors
    found: Variants = {}
    for every in (False, True):
        for columns in COLUMNS:
            name = ("every " if every else "ids ") + str(columns)
            found[name] = lambda c=columns, e=every: moe_combine.combine(
                d, weights, ids, bench_glue.EXPERTS, None, out, c, True, e
            )
    return case, found


def listing_tiles(tokens: int) -> tuple[Case, Variants]:
    """By warps of the choice that also builds the list; the router's product is timed with it, the same in all."""
    x, weight = bench_glue.normal(tokens, bench_glue.HIDDEN), bench_glue.normal(bench_glue.EXPERTS, bench_glue.HIDDEN)
    weight *= bench_glue.HIDDEN**-0.5  # scores that differ
    bias = torch.zeros(bench_glue.EXPERTS, device=bench_glue.DEVICE)

    def call() -> torch.Tensor:
        return router.route_and_list(x, weight, bias, bench_glue.TOP_K, bench_glue.EXPERTS, 8, pdl=True)[0]

    def want() -> torch.Tensor:
        logits = x.double() @ weight.double().t()
        return bench_glue.moe.route(logits.float(), bias, bench_glue.TOP_K, renormalize=True)[0]

    case = Case(call, want, 2 * bench_glue.EXPERTS * bench_glue.HIDDEN)
    choice = tuning.table()["choice"]
    return case, {str(w): _with(tuning.table(), "choice", choice | {"listing": w}, call) for w in LISTING}


def _of(make: Callable[[int], Case], tiles: Callable[[Case, int], Variants]) -> Callable[[int], tuple[Case, Variants]]:
    def both(tokens: int) -> tuple[Case, Variants]:
        case = make(tokens)
        return case, tiles(case, tokens)

    return both


#: kernel -> (its sizes, case and variants of a size), in the order of what they are worth.
KERNELS: dict[str, tuple[tuple[int, ...], Callable[[int], tuple[Case, Variants]]]] = {
    "weighted sum": ((1, 8, 32, 128), combine_tiles),
    "situ shared": ((1, 32, 128, 8192), _of(bench_glue.CASES["situ shared"], situ_tiles)),
    "situ dense": ((1, 32, 128, 8192), _of(bench_glue.CASES["situ dense"], situ_tiles)),
    "choice": ((1, 32, 8192), _of(bench_glue.CASES["route"], choice_tiles)),
    "choice and list": ((1, 32), listing_tiles),
    "gated_norm": ((32, 128, 8192), _of(bench_glue.CASES["gated_norm"], norm_tiles)),
    "beta": ((32, 128, 8192), _of(bench_glue.CASES["beta"], sigmoid_tiles)),
}


def measure(
    case: Case, variants: Variants, make: Callable[[int], tuple[Case, Variants]], tokens: int
) -> dict[str, Any]:
    """Checks every variant, then microseconds by variant, ``copy``, and the errors of those that failed."""
    row: dict[str, Any] = {"tokens": tokens}
    good: Variants = {}
    for name, call in variants.items():
        try:
            bench_glue.check(Case(call, case.want, case.bytes))
            good[name] = call
        except Exception as error:
            row[f"{name} failed"] = f"{type(error).__name__}: {error}"[:200]
    count = 1 if tokens <= 128 else max(2, min(bench_glue.GRAPH_CALLS, bench_glue.SETS_BYTES // case.bytes))
    sets = [variants, *(make(tokens)[1] for _ in range(count - 1))]
    half = max(case.bytes // 2, 16)
    copies = [torch.zeros(2, half, dtype=torch.uint8, device=bench_glue.DEVICE) for _ in sets]
    sides = [[each[name] for each in sets] for name in good]
    sides.append([lambda pair=pair: pair[1].copy_(pair[0]) for pair in copies])
    times = time_pair_graph(sides, repeat=-(-bench_glue.GRAPH_CALLS // count))
    return row | {"us": dict(zip(good, times, strict=False)), "copy us": times[-1]}


def winner(rows: Sequence[Mapping[str, Any]], present: str | None = None) -> str | None:
    """The tile with the least product of times over the rows that have it everywhere; the present one unless beaten by
    GAIN. present: its name, the first of the first row if None."""
    times = [row["us"] for row in rows if row.get("us")]
    if not times:
        return None
    score = {
        name: math.prod(t[name] for t in times) ** (1 / len(times))
        for name in times[0]
        if all(name in t for t in times)
    }
    if not score:
        return None
    best = min(score, key=lambda name: score[name])
    present = present or next(iter(times[0]))
    return present if present in score and score[present] < score[best] * GAIN else best


def won(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What won by kernel, or by kernel and sizes where the tables have entries of their own."""

    def of(*keys: str) -> list[Mapping[str, Any]]:
        return [rows[key] for key in keys if key in rows and "error" not in rows[key]]

    found: dict[str, str | None] = {
        f"situ up to {reach}": winner(of(*(f"situ {k} T{t}" for k in ("dense", "shared") for t in sizes)))
        for reach, sizes in ((64, (1, 32)), (2048, (128,)), (None, (8192,)))
    }
    found["sigmoid"] = winner(of("beta T32", "beta T128", "beta T8192"))
    found["norm"] = winner(of("gated_norm T32", "gated_norm T128", "gated_norm T8192"))
    found["choice few"] = winner(of("choice T1", "choice T32"))
    found["choice many"] = winner(of("choice T8192"))
    found["choice listing"] = winner(of("choice and list T1", "choice and list T32"))
    for tokens, columns in ((1, 512), (8, 512), (32, 1024), (128, 1024)):
        found[f"weighted sum T{tokens}"] = winner(of(f"weighted sum T{tokens}"), f"every {columns}")
    return {key: name for key, name in found.items() if name is not None}


def table_of(names: Mapping[str, str], device: str) -> dict[str, Any]:
    """glue.json with what won; entries without a measurement stay."""
    data = json.loads(json.dumps(tuning.table()))
    for entry in data["situ"]:
        if name := names.get(f"situ up to {entry['up_to']}"):
            entry["rows"], entry["columns"], entry["warps"] = map(int, name.split("-"))
    if name := names.get("sigmoid"):
        data["sigmoid"] = dict(zip(("elements", "warps"), map(int, name.split("-")), strict=True))
    data["choice"] |= {k.removeprefix("choice "): int(name) for k, name in names.items() if k.startswith("choice ")}
    versions = f"torch {torch.__version__}, triton {__import__('triton').__version__}"
    return data | {"measured": f"{device}, {time.strftime('%Y-%m-%d', time.gmtime())}, {versions}, sweep_glue.py"}


def run(out: Path, slices: Sequence[str], seconds: float = 60.0) -> None:
    """Rows ``<kernel> T<tokens>`` of glue_sweep.json, as many as begin within ``seconds``; then what won."""
    began = time.monotonic()
    results = Results(out / "glue_sweep.json")
    wanted = [
        (f"{kernel} T{tokens}", make, tokens)
        for kernel, (sizes, make) in KERNELS.items()
        for tokens in sizes
        if not slices or any(part in f"{kernel} T{tokens}" for part in slices)
    ]
    ready = {key: make(tokens) for key, make, tokens in wanted}
    if bench_glue.DEVICE == "cuda":
        # Cases are made before: making one may run its kernel and look at the result, and nothing runs in here.
        with compiling.timed() as spent, compiling.ahead() as possible:
            for _, variants in ready.values() if possible else ():
                for call in variants.values():
                    call()
        print("compiled:", spent.told(), flush=True)
    for key, make, tokens in wanted:
        if time.monotonic() - began > seconds:
            print(f"time is up before {key}", flush=True)
            break
        case, variants = ready.pop(key)
        row = results.row(key, lambda c=case, v=variants, make=make, n=tokens: measure(c, v, make, n))
        print(key, json.dumps(row), flush=True)
    names = won(results.rows)
    results.notes = [f"Won: {json.dumps(names)}."]
    results.save()
    table = table_of(names, results.record["device"])
    (out / "tuning_glue.json").write_text(json.dumps(table, indent=2) + "\n")
    print(f"{time.monotonic() - began:.0f} s; won: {json.dumps(names)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--seconds", type=float, default=60.0, help="no row begins later")
    parser.add_argument("--slice", action="append", default=[], help="only rows whose key contains this (repeatable)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run(options.out, options.slice, options.seconds)


if __name__ == "__main__":
    main()
