"""Which configuration of the KDA kernels, and which prefill implementation, at which size: measured on one GPU.

``python sweep_kda.py --out DIR [--seconds 150] [--processes 12] [--write]``. Parts: decode configurations by (heads,
rows), prefill implementations by (heads, lengths), options of the prefill kernels. Each measurement is a row of
DIR/kda_sweep.json as soon as it is there; a later call goes on where this one ended. A configuration whose outputs
differ from the first one's has an error instead of a time. Compilation is spread over processes before the clock runs.
--write puts the choice into tuning/kda.json and tuning/kda_prefill.json of the installed package, with copies in DIR.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from harness import Results, relative_error, require, time_pair_graph

from k3_nvidia.kernels import kda_flash, kda_plan, kda_step
from k3_nvidia.tuning import kda as tuning

HERE = Path(__file__).resolve().parent
Config = dict[str, Any]


def _blocks(rows: int, stages: int, warps: int, **more: Any) -> Config:
    return {"BV": rows, "STAGES": stages, "num_warps": warps, **more}


#: What each is for: docs/notes/kda-hopper.md. The first is the reference of the comparison of outputs.
DECODE: dict[str, Config] = {
    "whole16": _blocks(128, 1, 16),
    "whole16 two": _blocks(128, 1, 16, maxnreg=64),
    "whole8": _blocks(128, 1, 8),
    "halves": _blocks(64, 2, 8, KEEP=True),
    "halves ahead": _blocks(64, 2, 16, KEEP=True, PREFETCH=128),
    "blocks": _blocks(32, 3, 8),
    "blocks keep": _blocks(32, 3, 8, KEEP=True),
    "blocks ahead": _blocks(32, 3, 8, KEEP=True, PREFETCH=128),
    "blocks ahead half": _blocks(32, 3, 8, KEEP=True, PREFETCH=64),
    "blocks ahead evict": _blocks(32, 3, 8, KEEP=True, PREFETCH=128, EVICT="evict_first"),
    "blocks evict": _blocks(32, 3, 8, EVICT="evict_first"),
    "blocks deep": _blocks(32, 4, 8, KEEP=True),
    "late": _blocks(32, 3, 8, LATE=True, KEEP=True),
    "late deep": _blocks(32, 4, 8, LATE=True, KEEP=True),
    "late three": _blocks(32, 3, 8, LATE=True, KEEP=True, maxnreg=80),
    "small": _blocks(16, 4, 8, KEEP=True),
    "small ahead": _blocks(16, 4, 8, KEEP=True, PREFETCH=128),
    "small ahead half evict": _blocks(16, 4, 8, KEEP=True, PREFETCH=64, EVICT="evict_first"),
    "narrow ahead": _blocks(32, 3, 4, KEEP=True, PREFETCH=128),
    "whole16 pdl": _blocks(128, 1, 16, PDL=True),
    "whole16 two pdl": _blocks(128, 1, 16, maxnreg=64, PDL=True),
    "halves pdl": _blocks(64, 2, 8, KEEP=True, PDL=True),
    "blocks keep pdl": _blocks(32, 3, 8, KEEP=True, PDL=True),
    "blocks ahead pdl": _blocks(32, 3, 8, KEEP=True, PREFETCH=128, PDL=True),
    "late pdl": _blocks(32, 3, 8, LATE=True, KEEP=True, PDL=True),
    "small ahead pdl": _blocks(16, 4, 8, KEEP=True, PREFETCH=128, PDL=True),
    "small pdl": _blocks(16, 4, 8, KEEP=True, PDL=True),
}
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


# ------------------------------------------------------------------------------------------------------------ decode


def warm(heads: int, share: int, shares: int) -> None:
    """Compiles this share of the decode configurations into Triton's cache (a process of its own)."""
    import bench_kda

    case = bench_kda.step_case(heads, 2, 0, 0)
    for name in list(DECODE)[share::shares]:
        try:
            with Tuned(DECODE[name]):
                kda_step.kda_decode(**case)
        except Exception as error:
            print(f"{name}: {str(error)[:200]}", flush=True)
    torch.cuda.synchronize()


def warm_all(processes: int) -> None:
    """All shares of all head counts, `processes` at a time."""
    heads = sorted({h for h, _ in STEPS})
    share = max(processes // len(heads), 1)
    command = [sys.executable, str(Path(__file__).resolve()), "--warm"]
    running = [subprocess.Popen([*command, f"{h},{i},{share}"]) for h in heads for i in range(share)]
    for process in running:
        process.wait()


def decode_row(heads: int, rows: int) -> dict[str, Any]:
    """Microseconds of every configuration in a graph over input sets that exceed the L2 where they can."""
    import bench_kda

    traffic = rows * heads * bench_kda.DIM**2 * 8
    sets = [bench_kda.step_case(heads, rows, 0, n) for n in range(max(2, min(8, bench_kda.GRAPH_BYTES // traffic)))]
    saved = [{n: c[n].clone() for n in ("conv_state", "recurrent_state")} for c in sets[:1]]
    row: dict[str, Any] = {"heads": heads, "rows": rows}
    first: torch.Tensor | None = None
    for name, config in DECODE.items():
        try:
            with Tuned(config):
                for key, value in saved[0].items():
                    sets[0][key].copy_(value)
                outs = [torch.full_like(c["z"], math.nan) for c in sets]
                kda_step.kda_decode(**sets[0], out=outs[0])
                result = torch.cat([outs[0].flatten().float(), sets[0]["recurrent_state"][1:3].flatten()])
                first = result if first is None else first
                require(relative_error(result, first) < 2e-3, f"{name} differs: {relative_error(result, first)}")
                calls = [lambda c=c, o=o: kda_step.kda_decode(**c, out=o) for c, o in zip(sets, outs, strict=True)]
                row[name] = time_pair_graph([calls], 9, repeat=2)[0]
        except Exception as error:
            row[f"{name} failed"] = str(error)[:200]
    return row


def decode_table(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of tuning/kda.json: for each measured number of (row, head) pairs the configuration with the least mean
    log time, that of the entry before where it is within 1.5 per cent; edges halfway (geometrically) between sizes."""
    sizes: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        sizes.setdefault(row["heads"] * row["rows"], []).append(row)
    chosen: list[tuple[int, str]] = []
    for size in sorted(sizes):
        there = [n for n in DECODE if all(n in row for row in sizes[size])]
        means = {n: sum(math.log(row[n]) for row in sizes[size]) / len(sizes[size]) for n in there}
        best = min(means, key=lambda n: means[n])
        if chosen and chosen[-1][1] in means and means[chosen[-1][1]] < means[best] + 0.015:
            best = chosen[-1][1]
        chosen.append((size, best))
    entries: list[dict[str, Any]] = []
    for (size, name), (after, following) in zip(chosen, [*chosen[1:], (0, "")], strict=True):
        if name != following:
            entries.append({"up_to": round(math.sqrt(size * after)) if after else None, **DECODE[name]})
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


def plan_rows() -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(key, measurement), the most valuable first."""
    import bench_kda

    rows: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    rows += [(f"decode h{h} n{n}", lambda h=h, n=n: decode_row(h, n)) for h, n in STEPS]
    if kda_flash.operator()[0] is not None:
        for heads, lengths in dict.fromkeys([*bench_kda.HEADLINES, *bench_kda.SWEEP]):
            name = f"engine h{heads} " + "+".join(map(str, lengths))
            rows.append((name, lambda h=heads, s=lengths: engine_row(h, s)))
    rows += [(f"options h{h} {s[0]}", lambda h=h, s=s: prefill_row(h, s)) for h, s in SHAPES]
    return rows


def write(rows: dict[str, dict[str, Any]], out: Path) -> None:
    """The tuning files of the installed package, with copies in `out`. Options of prefill kernels stay a person's."""
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    good = {k: r for k, r in rows.items() if "error" not in r}
    folder = Path(tuning.__file__).parent
    steps = [r for k, r in good.items() if k.startswith("decode ")]
    if len(steps) == len(STEPS):
        data = json.loads((folder / "kda.json").read_text())
        data |= {"device": torch.cuda.get_device_name(), "date": today, "decode": decode_table(steps)}
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
        _store(folder / "kda.json", "{\n" + lines + "\n}\n", out)
    shapes = [[r[n] for n in ("heads", "tokens", "longest")] + [round(r["chunks"], 1), round(r["flash"], 1)]
              for k, r in good.items() if k.startswith("engine ")]  # fmt: skip
    if len(shapes) > 20:
        data = json.loads((folder / "kda_prefill.json").read_text())
        data |= {"device": torch.cuda.get_device_name(), "date": today}
        data["note"] = "microseconds in a replayed CUDA graph, gather and scatter of states included, conv and norm not"
        rest = {k: v for k, v in data.items() if k != "rows"}
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in rest.items())
        table = ",\n".join(f"    {json.dumps(r)}" for r in sorted(shapes))
        _store(folder / "kda_prefill.json", "{\n" + lines + ',\n  "rows": [\n' + table + "\n  ]\n}\n", out)


def _store(path: Path, text: str, out: Path) -> None:
    json.loads(text)
    path.write_text(text)
    (out / path.name).write_text(text)
    print(f"written: {path.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--warm", help="heads,share,shares: compile and end (started by this script)")
    args = parser.parse_args()
    if args.warm:
        warm(*map(int, args.warm.split(",")))
        return
    stop = time.monotonic() + args.seconds
    results = Results(args.out / "kda_sweep.json")
    rows = plan_rows()
    if any(key not in results.rows for key, _ in rows if key.startswith("decode")):
        warm_all(args.processes)
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
