"""Measuring on one GPU: cold and graph timing, ceilings, check-then-time, resumable results.

Rules the numbers follow:

* every figure is a median over CUDA-event timings of at least ``iters`` runs; the first runs are dropped;
* **cold**: a buffer larger than the L2 is read between runs, outside the timed region (bandwidth-bound sizes);
* **graph**: several calls, each on its own input set if the caller gives several, are captured into one CUDA graph and
  replayed; the figure is the replay time over the number of calls (launch-bound sizes). With input sets whose weights
  together exceed the L2 this is cold memory *and* free of launch gaps;
* a pair is timed alternately, in one process, so that clocks and temperature hit both sides alike;
* a check runs before the clock: a red check suppresses the figure and stands in the row instead;
* results are one JSON file a topic, rewritten after each row; finished rows of the same device and versions are skipped
  by a later call, so that a run can be cut into slices.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Fn = Callable[[], Any]


class CheckFailedError(AssertionError):
    """A correctness check before timing was red; the row has no figure."""


def device_record() -> dict[str, Any]:
    """Device, versions, date and command: what every results file carries."""
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
        # Absolute paths are of one machine: their last part says enough.
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.argv),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    for name in ("triton", "vllm", "humming", "cutlass"):
        try:
            module = __import__(name)
            record[name] = getattr(module, "__version__", "present")
        except Exception:
            record[name] = None
    if torch.cuda.is_available():
        props = torch.cuda.get_device_properties(0)
        record |= {
            "device": props.name,
            "capability": f"{props.major}.{props.minor}",
            "multiprocessors": props.multi_processor_count,
            "l2_bytes": props.L2_cache_size,
            "cuda": torch.version.cuda,
        }
    else:
        record["device"] = "cpu"
    return record


_flush: torch.Tensor | None = None


def flush_l2() -> None:
    """Read 256 MiB, several times the L2 of any present GPU. Reading leaves clean lines: whoever is timed next does
    not pay for writing someone else's data back."""
    global _flush
    if _flush is None:
        _flush = torch.zeros(32 << 20, dtype=torch.int64, device="cuda")
    _flush.sum()


def _timed(fn: Fn) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    end.record()
    return start, end


def _median_us(events: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]], drop: int) -> float:
    torch.cuda.synchronize()
    return statistics.median(1e3 * a.elapsed_time(b) for a, b in events[drop:])


def time_cold(fn: Fn, iters: int = 20, warmup: int = 3) -> float:
    """Median microseconds of ``fn`` with the L2 flushed before each run (launch gaps included)."""
    return time_pair_cold([fn], iters, warmup)[0]


def time_pair_cold(fns: Sequence[Fn], iters: int = 20, warmup: int = 3) -> list[float]:
    """``time_cold`` of several functions, alternating."""
    for fn in fns:
        fn()
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in fns]
    for _ in range(iters + warmup):
        for fn, log in zip(fns, events, strict=True):
            flush_l2()
            log.append(_timed(fn))
    return [_median_us(log, warmup) for log in events]


def capture(fns: Sequence[Fn]) -> torch.cuda.CUDAGraph:
    """One CUDA graph holding one call of each function, captured on a side stream after an eager warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for fn in fns:
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for fn in fns:
            fn()
    return graph


def time_graph(fns: Fn | Sequence[Fn], iters: int = 20, repeat: int = 1) -> float:
    """Median microseconds a call in a replayed CUDA graph of ``repeat`` rounds over ``fns`` (one an input set)."""
    return time_pair_graph([fns], iters, repeat)[0]


def time_pair_graph(sides: Sequence[Fn | Sequence[Fn]], iters: int = 20, repeat: int = 1) -> list[float]:
    """``time_graph`` of several sides, their replays alternating."""
    calls = [([s] if callable(s) else list(s)) * repeat for s in sides]
    graphs = [capture(c) for c in calls]
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(iters + 3):
        for graph, log in zip(graphs, events, strict=True):
            log.append(_timed(graph.replay))
    return [_median_us(log, 3) / len(c) for log, c in zip(events, calls, strict=True)]


def copy_bandwidth(nbytes: int = 4 << 30, iters: int = 10) -> float:
    """Bytes a second, read plus written, of a device copy that moves ``nbytes`` in all (half read, half written)."""
    src = torch.randint(0, 255, (max(nbytes // 2, 1),), dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    if nbytes >= 512 << 20:
        us = time_cold(lambda: dst.copy_(src), iters)
    else:  # launch gaps would dominate: graph over sets that exceed the L2
        count = min(16, max(2, math.ceil((1 << 30) / max(nbytes, 1))))
        pairs = [(src.clone(), dst.clone()) for _ in range(count)]
        us = time_graph([lambda a=a, b=b: b.copy_(a) for a, b in pairs], iters)
    return 2 * src.numel() / (us * 1e-6)


def matrix_rate(n: int = 8192, iters: int = 10) -> float:
    """FLOP/s of an n x n x n bf16 product on random data through the framework's library."""
    a = torch.randn(n, n, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(n, n, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    return 2 * n**3 / (time_cold(lambda: torch.mm(a, b, out=out), iters) * 1e-6)


def kernel_names(fn: Fn) -> list[str]:
    """Names of the device kernels that one call of ``fn`` runs, in order, repeats folded as ``name xN``."""
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        fn()
        torch.cuda.synchronize()
    kernels = [e for e in prof.events() if str(e.device_type).endswith("CUDA")]
    folded: dict[str, int] = {}
    for event in sorted(kernels, key=lambda e: e.time_range.start):
        folded[event.name] = folded.get(event.name, 0) + 1
    return [name if n == 1 else f"{name} x{n}" for name, n in folded.items()]


def kernel_times(fn: Fn, rounds: int = 3) -> dict[str, float]:
    """Mean device microseconds per kernel name of one call (profiler; L2 flushed before each call)."""
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        for _ in range(rounds):
            flush_l2()
            fn()
        torch.cuda.synchronize()
    total: dict[str, float] = {}
    for e in prof.events():
        if str(e.device_type).endswith("CUDA"):
            total[e.name] = total.get(e.name, 0.0) + (e.time_range.end - e.time_range.start)
    return {
        name: us / rounds for name, us in total.items() if "ReduceOp<long" not in name and "reduce_kernel" not in name
    }


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; NaN anywhere gives inf."""
    diff = (out.double() - ref.double()).norm().item()
    base = ref.double().norm().item()
    value = diff / base if base else diff
    return value if math.isfinite(value) else math.inf


def require(ok: bool, what: str) -> None:
    """Raise ``CheckFailedError`` unless ``ok``."""
    if not ok:
        raise CheckFailedError(what)


class Results:
    """A JSON file of rows keyed by name. ``row`` measures once, records errors, and rewrites the file each time."""

    def __init__(self, path: str | os.PathLike[str], resume: bool = True) -> None:
        self.path = Path(path)
        self.record = device_record()
        self.rows: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []  # Markdown that the page shows below the rows
        if resume and self.path.exists():
            old = json.loads(self.path.read_text())
            keep = ("device", "torch", "triton", "vllm")
            if all(old.get("environment", {}).get(k) == self.record.get(k) for k in keep):
                self.rows = {k: v for k, v in old.get("rows", {}).items() if "error" not in v}

    def save(self) -> None:
        """Write the file whole, through a temporary name."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tmp = self.path.with_suffix(".tmp")
        page = {"environment": self.record, "rows": self.rows} | ({"notes": self.notes} if self.notes else {})
        tmp.write_text(json.dumps(page, indent=1) + "\n")
        tmp.replace(self.path)

    def row(self, key: str, measure: Callable[[], dict[str, Any]], redo: bool = False) -> dict[str, Any] | None:
        """Measure ``key`` unless it is there already. A failure becomes a row with ``error`` and no figures."""
        if key in self.rows and not redo:
            return self.rows[key]
        try:
            row = measure()
        except CheckFailedError as err:
            row = {"error": f"check failed, figure suppressed: {err}"}
        except Exception as err:
            row = {"error": f"{type(err).__name__}: {err}"[:600], "where": traceback.format_exc()[-1200:]}
        row["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        self.rows[key] = row
        self.save()
        return row

    def check_then_time(self, key: str, check: Fn, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """``row`` whose measurement runs only after ``check`` returned without raising."""

        def both() -> dict[str, Any]:
            check()
            return measure()

        return self.row(key, both)


def table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """A plain aligned text table."""
    cells = [list(map(str, header))] + [[f"{c:.2f}" if isinstance(c, float) else str(c) for c in r] for r in rows]
    widths = [max(len(r[i]) for r in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in cells)
