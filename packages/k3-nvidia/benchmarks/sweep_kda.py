"""Which configuration of the KDA kernels, and which prefill implementation, at which size: measured on one GPU.

``python sweep_kda.py --out DIR [--seconds 150] [--processes 12] [--parts decode,verify] [--write]``. Parts: decode and
verify configurations by (heads, rows), prefill implementations by (heads, lengths), options of the prefill kernels.
Each measurement is a row of DIR/kda_sweep.json as soon as it is there; a later call goes on where this one ended. A
configuration whose outputs differ from the first one's has an error instead of a time. Compilation is spread over
processes before the clock runs. --write puts the choice into tuning/kda.json and tuning/kda_prefill.json of the
installed package, with copies in DIR; --table FILE only writes tuning/kda_prefill.json, from the prefill rows of a
kda.json of bench_kda.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Results, relative_error, require, time_pair_graph

from k3_nvidia.kernels import kda_flash, kda_plan, kda_prefill, kda_step
from k3_nvidia.tuning import kda as tuning

HERE = Path(__file__).resolve().parent
Config = dict[str, Any]


def _blocks(rows: int, stages: int, warps: int, **more: Any) -> Config:
    return {"BV": rows, "STAGES": stages, "num_warps": warps, **more}


def _async(rows: int, warps: int, **more: Any) -> Config:
    return {"BV": rows, "STAGES": 3, "num_warps": warps, "FORM": "async", **more}


def _cluster(split: int, warps: int, **more: Any) -> Config:
    return {"BV": 32, "STAGES": 3, "num_warps": warps, "FORM": "cluster", "SPLIT": split, "PDL": True, **more}


#: What each is for: docs/notes/kda-hopper.md. The first is the reference of the comparison of outputs.
DECODE: dict[str, Config] = {
    "blocks keep": _blocks(32, 3, 8, KEEP=True),
    "blocks keep pdl": _blocks(32, 3, 8, KEEP=True, PDL=True),
    "blocks ahead pdl": _blocks(32, 3, 8, KEEP=True, PREFETCH=128, PDL=True),
    "blocks ahead half": _blocks(32, 3, 8, KEEP=True, PREFETCH=64),
    "blocks ahead evict": _blocks(32, 3, 8, KEEP=True, PREFETCH=128, EVICT="evict_first"),
    "small ahead half evict": _blocks(16, 4, 8, KEEP=True, PREFETCH=64, EVICT="evict_first"),
    "whole8 pdl": _blocks(128, 1, 8, PDL=True),
    "async": _async(32, 8),
    "async pdl": _async(32, 8, PDL=True),
    "async evict": _async(32, 8, EVICT="evict_first"),
    "async narrow": _async(32, 4),
    "async 64 pdl": _async(64, 8, PDL=True),
    "async 64 evict pdl": _async(64, 8, PDL=True, EVICT="evict_first"),
    "async 64 narrow pdl": _async(64, 4, PDL=True),
    "async whole pdl": _async(128, 16, PDL=True),
    "direct pdl": _async(128, 16, DIRECT=True, PDL=True),
    "direct8 pdl": _async(128, 8, DIRECT=True, PDL=True),
    "cluster 4x4": _cluster(4, 4),
    "cluster 4x8": _cluster(4, 8),
    "cluster 2x8": _cluster(2, 8),
    "cluster 1x16": _cluster(1, 16),
    "cluster 1x8 bulk": _cluster(1, 8, BULK=True),
    "cluster 2x4 bulk": _cluster(2, 4, BULK=True),
    "cluster 4x4 five": _cluster(4, 4, BLOCKS=5),
    "cluster 4x8 three": _cluster(4, 8, BLOCKS=3),
}
#: Verification in blocks of value rows, and in clusters; the first is the reference of the outputs.
VERIFY: dict[str, Config] = {
    "tokens": _blocks(32, 1, 4, maxnreg=128),
    "tokens free": _blocks(32, 1, 4),
    "tokens pdl": _blocks(32, 1, 4, maxnreg=128, PDL=True),
    "tokens free pdl": _blocks(32, 1, 4, PDL=True),
    "tokens 64 pdl": _blocks(64, 1, 8, maxnreg=128, PDL=True),
    "tokens 16 pdl": _blocks(16, 1, 4, PDL=True),
}
VERIFY |= {
    "cluster 4x4": _cluster(4, 4),
    "cluster 4x4 five": _cluster(4, 4, BLOCKS=5),
    "cluster 4x8": _cluster(4, 8),
    "cluster 2x8": _cluster(2, 8),
    "cluster 2x8 three": _cluster(2, 8, BLOCKS=3),
    "cluster 1x16": _cluster(1, 16),
}
for _config in VERIFY.values():
    del _config["STAGES"]
VERIFIES = [(heads, rows, spec) for spec in (7, 3, 1) for heads in (6, 12) for rows in (1, 8, 32, 64)]
STEPS = [(6, 1), (6, 8), (6, 16), (6, 32), (6, 64), (6, 128), (6, 256)]
STEPS += [(12, 1), (12, 8), (12, 32), (12, 64), (12, 128), (12, 256), (96, 32)]
PREFILL: dict[str, dict[str, Config]] = {
    "as it is": {},
    "chunk 8 warps": {"chunk": {"PART": 64, "num_warps": 8, "maxnreg": None}},
    "chunk 128 wide 8 warps": {"chunk": {"PART": 128, "num_warps": 8, "maxnreg": None}},
    "chunk 32 wide": {"chunk": {"PART": 32, "num_warps": 4, "maxnreg": None}},
    "chunk 168 registers": {"chunk": {"PART": 64, "num_warps": 4, "maxnreg": 168}},
    "prepare 32 rows": {"prepare": {"GROUP": 32, "num_warps": 1}},
    "prepare 8 rows": {"prepare": {"GROUP": 8, "num_warps": 1}},
    "output 128 rows": {"output": {"BR": 128, "STAGES": 3, "num_warps": 8}},
    "output 4 stages": {"output": {"BR": 64, "STAGES": 4, "num_warps": 4}},
    "local 128 rows": {"local": {"BR": 128, "STAGES": 3, "num_warps": 8}},
    "local 4 stages": {"local": {"BR": 64, "STAGES": 4, "num_warps": 4}},
    "norm 8": {"norm": {"ROWS": 8, "num_warps": 4}},
}
#: The bandwidth-bound neighbours of a prefill: (channels, parts of a chunk, warps), and (rows, warps) of the norm.
CONV = [(c, p, w) for c, w in ((128, 1), (256, 1), (256, 2), (512, 2), (512, 4), (1024, 4)) for p in (1, 2, 4)]
AROUND = (6, 12, 96)  # heads
NORM = [(r, w) for r in (8, 16, 32) for w in (2, 4, 8)]
SHAPES = [(6, (8192,)), (12, (8192,)), (96, (1024,))]


def with_step(config: Config) -> Callable[..., Config]:
    """A stand-in for tuning.step_launch that answers with one configuration."""
    return lambda kernel, programs, dim: config | {"BV": min(config["BV"], dim)}


class Tuned:
    """Runs a block with a decode configuration or with other prefill options in the place of the tables'."""

    def __init__(self, decode: Config | None = None, prefill: dict[str, Config] | None = None) -> None:
        self.decode, self.prefill = decode, prefill or {}

    def __enter__(self) -> None:
        self.step, self.table = tuning.step_launch, dict(tuning.table())
        if self.decode:
            tuning.step_launch = with_step(self.decode)
        tuning.table().update(self.prefill)

    def __exit__(self, *error: object) -> None:
        tuning.step_launch = self.step
        tuning.table().update(self.table)


# ------------------------------------------------------------------------------------------------- decode and verify


def configurations(spec: int) -> dict[str, Config]:
    """Those of decode (no drafted tokens) or of verification."""
    return VERIFY if spec else DECODE


def warm(heads: int, spec: int, share: int, shares: int) -> None:
    """Compiles this share of the configurations into Triton's cache (a process of its own)."""
    import bench_kda

    case = bench_kda.step_case(heads, 2, spec, 0)
    kernel = kda_step.kda_verify if spec else kda_step.kda_decode
    found = configurations(spec)
    for name in list(found)[share::shares]:
        try:
            with Tuned(found[name]):
                kernel(**case)
        except Exception as error:
            print(f"{name}: {str(error)[:200]}", flush=True)
    torch.cuda.synchronize()


def warm_all(processes: int, wanted: set[tuple[int, int]], forms: str | None = None) -> None:
    """All shares of all (heads, drafted tokens), about `processes` at a time."""
    share = max(processes // max(len(wanted), 1), 1)
    command = [sys.executable, str(Path(__file__).resolve()), *(["--forms", forms] if forms else []), "--warm"]
    running = [subprocess.Popen([*command, f"{h},{s},{i},{share}"]) for h, s in sorted(wanted) for i in range(share)]
    for process in running:
        process.wait()


def step_row(heads: int, rows: int, spec: int) -> dict[str, Any]:
    """Microseconds of every configuration in a graph over input sets that exceed the L2 where they can."""
    import bench_kda

    traffic = rows * heads * bench_kda.DIM**2 * 4 * (2 + spec)
    sets = [bench_kda.step_case(heads, rows, spec, n) for n in range(max(2, min(8, bench_kda.GRAPH_BYTES // traffic)))]
    saved = {n: sets[0][n].clone() for n in ("conv_state", "recurrent_state")}
    kernel = kda_step.kda_verify if spec else kda_step.kda_decode
    row: dict[str, Any] = {"heads": heads, "rows": rows, "spec": spec}
    first: torch.Tensor | None = None
    for name, config in configurations(spec).items():
        try:
            with Tuned(config):
                for key, value in saved.items():
                    sets[0][key].copy_(value)
                outs = [torch.full_like(c["z"], math.nan) for c in sets]
                kernel(**sets[0], out=outs[0])
                result = torch.cat(
                    [x.flatten().float() for x in (outs[0], sets[0]["conv_state"], sets[0]["recurrent_state"][1:3])]
                )
                first = result if first is None else first
                require(relative_error(result, first) < 2e-3, f"{name} differs: {relative_error(result, first)}")
                calls = [lambda c=c, o=o: kernel(**c, out=o) for c, o in zip(sets, outs, strict=True)]
                row[name] = time_pair_graph([calls], 9, repeat=2)[0]
        except Exception as error:
            row[f"{name} failed"] = str(error)[:200]
    return row


def step_table(rows: Iterable[dict[str, Any]], configs: dict[str, Config]) -> list[dict[str, Any]]:
    """Entries of tuning/kda.json: for each measured number of (row, head) pairs the configuration with the least mean
    log time, that of the entry before where it is within 1.5 per cent; edges halfway (geometrically) between sizes."""
    sizes: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        sizes.setdefault(row["heads"] * row["rows"], []).append(row)
    chosen: list[tuple[int, str]] = []
    for size in sorted(sizes):
        there = [n for n in configs if all(n in row for row in sizes[size])]
        means = {n: sum(math.log(row[n]) for row in sizes[size]) / len(sizes[size]) for n in there}
        best = min(means, key=lambda n: means[n])
        if chosen and chosen[-1][1] in means and means[chosen[-1][1]] < means[best] + 0.015:
            best = chosen[-1][1]
        chosen.append((size, best))
    entries: list[dict[str, Any]] = []
    for (size, name), (after, following) in zip(chosen, [*chosen[1:], (0, "")], strict=True):
        if name != following:
            entries.append({"up_to": round(math.sqrt(size * after)) if after else None, **configs[name]})
    return entries


# ----------------------------------------------------------------------------------------------------------- prefill


def engine_row(heads: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Graph microseconds of both prefill implementations on dense inputs."""
    import bench_kda

    case, cu = bench_kda.prefill_case(heads, lengths), bench_kda.boundaries(lengths)
    saved = case["recurrent_state"].clone()
    row: dict[str, Any] = {"heads": heads, "tokens": sum(lengths), "longest": max(lengths)}
    outs, sides = [], []
    for engine in (kda_plan.CHUNKS, kda_plan.FLASH):
        out = torch.full_like(case["q"], math.nan)
        plan = kda_plan.plan_prefill(cu, heads, "cuda", engine=engine)
        sides.append(bench_kda.ours_prefill(case, cu.cuda(), plan, out))
        case["recurrent_state"].copy_(saved)
        sides[-1]()
        outs.append(out)
    difference = relative_error(outs[0], outs[1].double())
    require(difference < 2e-2, f"the implementations differ by {difference}")
    row["chunks"], row["flash"] = time_pair_graph(sides, 7)
    return row


def prefill_row(heads: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Graph microseconds of this wheel's kernels with each set of options."""
    import bench_kda

    case, cu = bench_kda.prefill_case(heads, lengths), bench_kda.boundaries(lengths)
    saved, first = case["recurrent_state"].clone(), None
    row: dict[str, Any] = {"heads": heads, "tokens": sum(lengths)}
    for name, options in PREFILL.items():
        try:
            with Tuned(prefill=options):
                case["recurrent_state"].copy_(saved)
                out = torch.full_like(case["q"], math.nan)
                plan = kda_plan.plan_prefill(cu, heads, "cuda", engine=kda_plan.CHUNKS)
                call = bench_kda.ours_prefill(case, cu.cuda(), plan, out)
                call()
                first = out.clone() if first is None else first
                require(relative_error(out, first.double()) < 1e-2, f"{name} differs")
                row[name] = time_pair_graph([call], 7)[0]
        except Exception as error:
            row[f"{name} failed"] = str(error)[:200]
    return row


def around_forms() -> dict[str, dict[str, Config]]:
    """Launch options of the convolution and of the norm by name."""
    forms: dict[str, dict[str, Config]] = {}
    forms |= {f"conv {c}/{p} {w}": {"conv": {"BC": c, "PARTS": p, "num_warps": w}} for c, p, w in CONV}
    return forms | {f"norm {r} {w}": {"norm": {"ROWS": r, "num_warps": w}} for r, w in NORM}


def around_row(heads: int, tokens: int) -> dict[str, Any]:
    """Graph microseconds of the convolution (three dense tensors) and of the gated norm, launch options varied."""
    import bench_kda

    case, cu = bench_kda.prefill_case(heads, (tokens,)), bench_kda.boundaries((tokens,)).cuda()
    plan = kda_plan.plan_prefill(cu, heads, "cuda")
    y = torch.empty(3, tokens, heads * bench_kda.DIM, dtype=torch.bfloat16, device="cuda")
    names = ("qkv", "conv_weight", "conv_state", "slot_mapping")
    arguments = [*(case[n] for n in names), cu, case["has_initial_state"]]
    o = torch.empty_like(case["q"])

    def conv() -> None:
        kda_prefill.short_conv(*arguments, out=y, plan=plan, parts=3)

    def norm() -> None:
        kda_prefill.gated_norm(case["v"], case["gate"], case["o_norm_weight"], case["o_norm_eps"], out=o)

    row: dict[str, Any] = {}
    for name, options in around_forms().items():
        call = conv if name.startswith("conv") else norm
        try:
            with Tuned(prefill=options):
                row[name] = time_pair_graph([call], 7, repeat=2)[0]
        except Exception as error:
            row[f"{name} failed"] = str(error)[:200]
    return row


def plan_rows(parts: Sequence[str]) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(key, measurement) of the wanted parts, the most valuable first."""
    import bench_kda

    rows: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    rows += [(f"verify h{h} n{n} spec{s}", lambda h=h, n=n, s=s: step_row(h, n, s)) for h, n, s in VERIFIES]
    rows += [(f"decode h{h} n{n}", lambda h=h, n=n: step_row(h, n, 0)) for h, n in STEPS]
    if "engine" in parts and kda_flash.operator()[0] is not None:
        for heads, lengths in dict.fromkeys([*bench_kda.HEADLINES, *bench_kda.SWEEP]):
            name = f"engine h{heads} " + "+".join(map(str, lengths))
            rows.append((name, lambda h=heads, s=lengths: engine_row(h, s)))
    rows += [(f"options h{h} {s[0]}", lambda h=h, s=s: prefill_row(h, s)) for h, s in SHAPES]
    rows += [(f"around h{h}", lambda h=h: around_row(h, 8192)) for h in AROUND]
    return [row for row in rows if row[0].split()[0] in parts]


def write(rows: dict[str, dict[str, Any]], out: Path) -> None:
    """The tuning files of the installed package, with copies in `out`. Options of prefill kernels stay a person's."""
    good = {k: r for k, r in rows.items() if "error" not in r}
    data = json.loads((Path(tuning.__file__).parent / "kda.json").read_text())
    old = dict(data)
    for part, count, configs in (("decode", len(STEPS), DECODE), ("verify", len(VERIFIES), VERIFY)):
        steps = [r for k, r in good.items() if k.startswith(part + " ")]
        if len(steps) == count:
            data[part] = step_table(steps, configs)
    around = [r for k, r in good.items() if k.startswith("around ")]
    if len(around) == len(AROUND):
        mean = {n: sum(math.log(r[n]) for r in around) for n in around[0] if all(n in r for r in around)}
        forms = around_forms()
        for part in ("conv", "norm"):
            data[part] = forms[min((n for n in mean if n.startswith(part)), key=lambda n: mean[n])][part]
    if data != old:
        data |= {"device": torch.cuda.get_device_name(), "date": _today()}
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
        _store("kda.json", "{\n" + lines + "\n}\n", out)
    write_prefill([(r, r["chunks"], r["flash"]) for k, r in good.items() if k.startswith("engine ")], out)


def write_prefill(measured: list[tuple[dict[str, Any], float, float]], out: Path) -> None:
    """tuning/kda_prefill.json from (row with heads, tokens, longest; our time; FlashKDA's) of enough shapes."""
    shapes = [[r["heads"], r["tokens"], r["longest"], round(a, 1), round(b, 1)] for r, a, b in measured]
    if len(shapes) <= 20:
        return
    data = {"device": torch.cuda.get_device_name(), "date": _today()}
    data["note"] = "microseconds in a replayed CUDA graph, gather and scatter of states included, conv and norm not"
    head = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
    names = json.dumps(["heads", "tokens", "longest", "chunks", "flash"])
    lines = ",\n".join(f"    {json.dumps(r)}" for r in sorted(shapes))
    _store("kda_prefill.json", "{\n" + head + f',\n  "columns": {names},\n  "rows": [\n' + lines + "\n  ]\n}\n", out)


def from_bench(path: Path, out: Path) -> None:
    """tuning/kda_prefill.json from the prefill rows of bench_kda.py: there both of ours alternate with the rival."""
    rows = [r for k, r in json.loads(path.read_text())["rows"].items() if k.startswith("prefill ")]
    names = ("chunks_graph_us", "flash_graph_us")
    write_prefill([(r, *(r[n] for n in names)) for r in rows if all(n in r for n in names)], out)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def _store(name: str, text: str, out: Path) -> None:
    json.loads(text)
    (Path(tuning.__file__).parent / name).write_text(text)
    (out / name).write_text(text)
    print(f"written: {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--parts", default="verify,decode,engine,around,options")
    parser.add_argument("--forms", help="comma-separated parts of names: only these forms and the first of each kind")
    parser.add_argument("--table", type=Path, help="a kda.json of bench_kda.py: write kda_prefill.json from it and end")
    parser.add_argument("--warm", help="heads,spec,share,shares: compile and end (started by this script)")
    args = parser.parse_args()
    for configs in (DECODE, VERIFY) if args.forms else ():
        for name in list(configs)[1:]:
            if not any(part in name for part in args.forms.split(",")):
                del configs[name]
    if args.warm:
        warm(*map(int, args.warm.split(",")))
        return
    if args.table:
        from_bench(args.table, args.out)
        return
    stop = time.monotonic() + args.seconds
    results = Results(args.out / "kda_sweep.json")
    rows = plan_rows(args.parts.split(","))
    missing = [key.split() for key, _ in rows if key not in results.rows]
    steps = [k for k in missing if k[0] in ("decode", "verify")]
    wanted = {(int(k[1][1:]), int(k[3][4:]) if k[0] == "verify" else 0) for k in steps}
    if wanted:
        warm_all(args.processes, wanted, args.forms)
        print(f"compiled in {args.seconds - (stop - time.monotonic()):.0f} s", flush=True)
    for key, measure in rows:
        if key not in results.rows and time.monotonic() > stop:
            print(f"{key}: not begun, the time is over", flush=True)
            continue
        row = results.row(key, measure) or {}
        torch.cuda.empty_cache()
        times = {k: v for k, v in row.items() if isinstance(v, float)}
        print(key, row.get("error", ""), " ".join(f"{k} {v:.1f}" for k, v in sorted(times.items(), key=lambda i: i[1])))
        for name, why in row.items():
            if name.endswith(" failed"):
                print(f"    {name}: {why}", flush=True)
    if args.write:
        write(results.rows, args.out)


if __name__ == "__main__":
    main()
