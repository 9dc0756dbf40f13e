"""The state copy against the native gather, clear and scatter: paired, in one process, every sample kept.

    python bench_state_copy.py --device npu:0                    on an NPU: eager event time, wall time, graph replay
    python bench_state_copy.py --device cpu --pairs 3            mechanics only: wall time of the contracts

A pair is one run of each side on the same cache, indices and flags; the order alternates from pair to pair. What is
timed is a whole step: output allocation, treatment of the metadata, launches. Three figures are recorded apart: time
between two events around an eager call, wall time of a call with a synchronisation at its end, and replay of a captured
graph. Before timing, both sides must give the same bits. Each run writes a new file, results/state_copy-<date>.json,
with the seed, every sample and a hash of the sources it measured.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3_ascend import state_copy
from k3_ascend.kernels import __file__ as kernels_file
from k3_ascend.state_copy.layout import WORDS

HERE = Path(__file__).resolve().parent
Step = Callable[[], Any]


class _Layer(state_copy.StateCopyLayer):
    def __init__(self, cache: Tensor) -> None:
        self.prefix, self.kv_cache = "bench", (cache, cache)


def source_hash() -> str:
    """SHA-256 over this file and every source of the state copy, by name and content."""
    package = Path(state_copy.__file__).parent
    digest = hashlib.sha256()
    for path in (Path(__file__), Path(kernels_file).parent / "state_copy.py", *sorted(package.glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def native_gather(cache: Tensor, indices: Tensor, flags: Tensor) -> Tensor:
    """Advanced indexing, then a masked fill: what a layer does without a plan. Invalid rows become zeros too."""
    valid = (indices >= 0) & (indices < cache.shape[0]) & flags
    packed = cache[torch.where(valid, indices, 0).long()]
    return packed.masked_fill_(~valid.view(-1, 1, 1, 1), 0)


def native_scatter(cache: Tensor, indices: Tensor, packed: Tensor) -> None:
    """Advanced indexing; the caller's indices are all valid (skipping would wait for the device)."""
    cache[indices.long()] = packed


class Timer:
    """The three clocks of a device; a clock that a device lacks gives None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else getattr(torch, device.type)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.module is not None:
            self.module.synchronize()

    def event(self, step: Step) -> float | None:
        """Microseconds between events around an eager call."""
        if self.module is None:
            return None
        begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        begin.record()
        step()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def wall(self, step: Step) -> float:
        """Microseconds of a call with a synchronisation at its end."""
        self.synchronize()
        begin = time.perf_counter()
        step()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e6

    def graph(self, step: Step) -> Step | None:
        """A captured graph of the call, or None where there are none."""
        if self.module is None:
            return None
        graph = self.module.NPUGraph() if self.device.type == "npu" else self.module.CUDAGraph()
        with self.module.graph(graph):
            step()
        replay: Step = graph.replay
        return replay


def case(args: argparse.Namespace, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Every sample of one size: both operations, both sides, three clocks."""
    device = torch.device(args.device)
    generator = torch.Generator().manual_seed(args.seed)
    heads, dim, slots = args.heads, args.head_dim, args.slots
    page = heads * dim * dim + args.gap
    raw = torch.randn(slots * page, generator=generator).to(dtype).to(device)
    cache = raw.as_strided((slots, heads, dim, dim), (page, dim * dim, dim, 1))
    indices = torch.randperm(slots, generator=generator)[:rows].to(torch.int32).to(device)
    flags = (torch.rand(rows, generator=generator) > 0.25).to(device)
    layer = _Layer(cache)
    keywords = {} if args.generation is None else {"generation": lambda _: args.generation}
    published = state_copy.initialise({"bench": layer}, max_num_seqs=max(args.rows), **keywords)  # type: ignore[arg-type]
    plan = state_copy.of(layer)
    states = torch.randn(rows, heads, dim, dim, generator=generator).to(dtype).to(device)
    operations: dict[str, dict[str, Step]] = {
        "gather": {
            "plan": lambda: plan.gather(cache, indices, flags),
            "native": lambda: native_gather(cache, indices, flags),
        },
        "scatter": {
            "plan": lambda: plan.scatter(cache, indices, states),
            "native": lambda: native_scatter(cache, indices, states),
        },
    }
    check(operations, cache)
    samples = {name: pairs(Timer(device), sides, args.pairs, args.warmup) for name, sides in operations.items()}
    table = published.tables[0]
    return {
        "rows": rows, "slots": slots, "heads": heads, "head_dim": dim, "gap": args.gap, "dtype": str(dtype)[6:],
        "plan": str(table.kind), "layout": table.layout.describe(), "unit": "microseconds", "samples": samples,
    }  # fmt: skip


def check(operations: dict[str, dict[str, Step]], cache: Tensor) -> None:
    """Both sides give the same bits, or SystemExit: a wrong answer has no speed."""
    gathered = [step() for step in operations["gather"].values()]
    written = []
    before = cache.clone()
    for step in operations["scatter"].values():
        cache.copy_(before)
        step()
        written.append(cache.clone())
    cache.copy_(before)
    for pair in (gathered, written):
        one, other = (t.view(WORDS[t.element_size()]) for t in pair)
        if not torch.equal(one, other):
            raise SystemExit("the plan and the native copy differ: nothing is timed")


def pairs(timer: Timer, sides: dict[str, Step], count: int, warmup: int) -> dict[str, Any]:
    """count alternating pairs a clock; the order of each pair is recorded with it."""
    for _ in range(warmup):
        for step in sides.values():
            step()
    timer.synchronize()
    graphs = {name: timer.graph(step) for name, step in sides.items()}
    found: dict[str, Any] = {"order": [], "event": [], "wall": [], "graph": []}
    for number in range(count):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        found["order"].append(order)
        found["event"].append({name: timer.event(sides[name]) for name in order})
        found["wall"].append({name: timer.wall(sides[name]) for name in order})
        replays = {name: graphs[name] for name in order}
        found["graph"].append({n: None if replay is None else timer.event(replay) for n, replay in replays.items()})
    return found


def environment(device: torch.device) -> dict[str, Any]:
    """Device and versions."""
    record: dict[str, Any] = {"device": str(device), "torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("triton", "torch_npu", "vllm_ascend"):
        try:
            record[name] = getattr(__import__(name), "__version__", "present")
        except ImportError:
            record[name] = None
    if device.type != "cpu":
        record["device_name"] = getattr(torch, device.type).get_device_name(device)
    return record


def fresh(folder: Path) -> Path:
    """A file of its own for this run: never one that exists."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    path, number = folder / f"state_copy-{stamp}.json", 1
    while path.exists():
        number += 1
        path = folder / f"state_copy-{stamp}-{number}.json"
    return path


def main(argv: list[str] | None = None) -> Path:
    """Command line; returns the file written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True, help="npu:0; cpu for the mechanics")
    parser.add_argument("--generation", help="pretend a device generation (950, A2); default: the device's own")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--heads", type=int, default=12, help="local heads: 12 on 8 ranks")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--gap", type=int, default=6912, help="elements between payloads (the convolution state)")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args(argv)
    if max(args.rows) > args.slots:
        parser.error(f"--rows {max(args.rows)} needs as many --slots, there are {args.slots}")
    cases = [case(args, rows, getattr(torch, dtype)) for dtype in args.dtypes for rows in args.rows]
    page = {
        "seed": args.seed,
        "source_sha256": source_hash(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment(torch.device(args.device)),
        "pretended_generation": args.generation,
        "cases": cases,
    }
    path = fresh(args.out)
    path.write_text(json.dumps(page, indent=1) + "\n")
    print(path.name)
    return path


if __name__ == "__main__":
    main()
