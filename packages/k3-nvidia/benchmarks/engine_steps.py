"""A trace of an engine cut into its steps: the device time of the steps of a whole batch, and of single requests.

Where a step ends: with its head, the product before the first kernel of sampling (``engine_timeline.labels``), which
every step of the engine launches once. So a step here is the sampling of the step before it and what follows from that
(copies of its tokens, the next inputs), the layers, and its own head: a whole period, whichever place it is cut at, and
the only place that both sides have under a name. Launches are told apart by their *starts*, over all streams: one that
starts before the head ends its step's list belongs to that step, also where it is work for the next one (asynchronous
scheduling copies inputs early) or still runs when the next begins (programmatic launch, a second stream). An instant is
counted once, for the launch that started first (``engine_timeline.exposures``), and every launch is in exactly one step
or in the rest behind the last head; so the steps and that rest add up to the device time of the trace.

Which steps count: a run has ``tokens`` tokens for each request, so the request that came first is done in the
``tokens``-th step, and the one that came last begins ``tokens - 1`` steps before the last: between the two, and only
there, the batch is whole. Of those the most frequent kind is kept. A *kind* is how often each kernel of the model, the
head and sampling was launched; copies and small kernels of vLLM's own, whose number depends on what the host had to
say, do not count. Where fewer than half of ``tokens - 1`` steps are of one kind there is no figure, only the reason.

Run as ``python engine_steps.py TRACE...`` it reads traces that ``bench_engine.py --traces`` kept; with a folder instead
of a trace it prints the lines of the folder's engine.jsonl with the figures of the traces beside it, read anew
(``--pause``: with another threshold than they were kept with).
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_timeline
from engine_timeline import HEAD, REST, Launch, Span, exposures, gather

#: Kernels of one graph follow each other within two microseconds, and so do those of a launch queue that is never
#: empty; a longer pause is the device waiting for the host and belongs to no step. On an H200 any threshold from 2 to 5
#: gives the same figures; 20 counted up to 85 us a step of waits between vLLM's own launches beside starting engines.
PAUSE_US = 5.0
#: What a line of engine.jsonl says of who ran, in the order of the names of traces.
WHO = ("shape", "impl", "experts", "latent")
#: What a line says that comes from traces, figures or the reason why there is none.
DEVICE = ("device_ms", "device_iqr_ms", "device_all_ms", "device_refused", "launches", "kernels", "steps", "requests")
#: Prompts whose time is shown by part.
TIMELINE_PROMPTS = (300, 8192)
Label = tuple[str, str]
Kind = tuple[tuple[Label, int], ...]


@dataclass(frozen=True)
class Step:
    """Launches of a step in the order of their starts."""

    launches: Sequence[Launch]

    @property
    def us(self) -> float:
        """Microseconds that the device worked in this step, the gaps within it included."""
        return sum(launch.exposed + launch.gap for launch in self.launches)

    @property
    def kind(self) -> Kind:
        """How often each kernel was launched, without vLLM's own."""
        return tuple(sorted(Counter(x.label for x in self.launches if x.label[1] != REST).items()))


def cut(spans: Sequence[Span], pause: float) -> tuple[list[Step], list[Launch]]:
    """The steps of a trace, and the launches behind the last head."""
    launches = exposures(spans, pause)
    steps, begin, head = [], 0, -1
    for at, launch in enumerate(launches):
        name, part = launch.label
        if part == HEAD and name.endswith("(head)"):
            head = at
        elif part == HEAD and head >= begin:  # sampling: the head before it was whole, with its sum of cuts
            steps.append(Step(launches[begin : head + 1]))
            begin = head + 1
    return steps, launches[begin:]


def difference(kind: Kind, other: Kind, most: int = 3) -> str:
    """What ``other`` launches that ``kind`` does not, and the other way round, in words."""
    more = Counter(dict(other))
    more.subtract(dict(kind))
    found = sorted(((-abs(n), name, n) for (name, _), n in more.items() if n))
    return ", ".join(f"{n:+d} {name}" for _, name, n in found[:most]) + (" ..." if len(found) > most else "")


def largest(launches: Sequence[Launch], most: int = 6) -> list[str]:
    """Names (60 characters) of the kernels that took the most."""
    total: dict[str, float] = {}
    for launch in launches:
        name, _, start, end = launch.span
        total[name[:60]] = total.get(name[:60], 0.0) + end - start
    return sorted(total, key=lambda name: -total[name])[:most]


def _figures(launches: Sequence[Launch]) -> dict[str, Any]:
    """Device time, launches, largest kernels and timeline of some launches."""
    us = sum(launch.exposed + launch.gap for launch in launches)
    return {
        "device_ms": round(us / 1e3, 3),
        "launches": len(launches),
        "kernels": largest(launches),
        "timeline": gather(launches),
    }


def decode(spans: Sequence[Span], tokens: int, pause: float) -> dict[str, Any]:
    """A decoding step of a whole batch, from one run in which every request generated ``tokens`` tokens.

    ``device_ms``, ``launches``, ``kernels`` and ``timeline`` are those of one step that ran, the one whose time is the
    (lower) median of the kept: its parts and gaps add up to ``device_ms``. ``device_iqr_ms``: the quartiles of the
    kept; ``steps``: [kept, dropped]. Or ``device_refused``, the reason why there is no figure, and ``steps``.
    """
    steps, _ = cut(spans, pause)
    expected = tokens - 1
    whole = steps[max(len(steps) - tokens + 1, 1) : tokens]
    kinds = Counter(step.kind for step in whole).most_common()
    count = kinds[0][1] if kinds else 0
    if not kinds or 2 * count < expected:
        others = "; ".join(f"{n} with {difference(kinds[0][0], kind)}" for kind, n in kinds[1:4])
        reason = (
            f"{count} of {expected} expected steps are of one kind: {len(steps)} steps in the trace, {len(whole)} "
            f"of the whole batch, of {len(kinds)} kinds" + (f" ({others})" if others else "")
        )
        return {"device_refused": reason, "steps": [count, len(steps) - count]}
    kept = [step for step in whole if step.kind == kinds[0][0]]
    times = [step.us for step in kept]
    middle = statistics.median_low(times)
    first, _, third = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {
        **_figures(next(step for step in kept if step.us == middle).launches),
        "device_iqr_ms": [round(first / 1e3, 3), round(third / 1e3, 3)],
        "steps": [len(kept), len(steps) - len(kept)],
    }


def request(spans: Sequence[Span], pause: float) -> dict[str, Any]:
    """A request that was traced alone, from its inputs to its last token's copy: all the launches of the trace.

    As :func:`decode` has it, without quartiles; ``steps``: how many the engine made of it (chunks of its prompt);
    ``kind``: what it launched, in a form that survives a message.
    """
    steps, rest = cut(spans, pause)
    launches = [launch for step in steps for launch in step.launches] + rest
    kind = [[*label, count] for label, count in Step(launches).kind]
    return {**_figures(launches), "steps": len(steps), "kind": kind}


def median_request(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The (lower) median of several requests of one length, all of :func:`request`; ``device_all_ms``: of each.

    Requests that were cut into other chunks or launched other kernels than most are left out: ``requests`` is
    [kept, dropped]. ``device_refused`` where half of them or more differ from each other.
    """
    kinds = Counter(json.dumps([one["steps"], one["kind"]]) for one in found)
    kind, count = kinds.most_common(1)[0]
    steps = sorted(one["steps"] for one in found)
    if 2 * count <= len(found) or not steps[0]:
        reason = f"{count} of {len(found)} requests launched the same kernels, in {steps} steps"
        return {"device_refused": reason, "requests": [count, len(found) - count]}
    kept = [one for one in found if json.dumps([one["steps"], one["kind"]]) == kind]
    middle = sorted(kept, key=lambda one: one["device_ms"])[(len(kept) - 1) // 2]
    return {
        **{key: value for key, value in middle.items() if key != "kind"},
        "device_all_ms": [one["device_ms"] for one in found],
        "requests": [count, len(found) - count],
    }


def intervals(arrivals: Sequence[tuple[float, Mapping[str, int]]], batch: int) -> list[float]:
    """Times between consecutive outputs in each of which every one of ``batch`` requests got one token.

    arrivals: (time, request -> tokens that came) of a run, in order. That is what the reader of a stream waits for from
    token to token; steps that admit a request, or lack one that is done, are no end and no beginning.
    """
    came = [(time, tokens) for time, tokens in arrivals if tokens]
    whole = [len(tokens) == batch and set(tokens.values()) == {1} for _, tokens in came]
    return [came[i][0] - came[i - 1][0] for i in range(1, len(came)) if whole[i - 1] and whole[i]]


def step_ms(runs: Sequence[Sequence[tuple[float, Mapping[str, int]]]], batch: int, tokens: int) -> dict[str, Any]:
    """``ms``: the median of all the runs' :func:`intervals`; ``ms_iqr``, the quartiles, and ``ms_mean``, which is more
    where outputs come in bursts. ``ms_refused`` where fewer than half of ``tokens - 1`` intervals a run are there.

    runs: arrivals in seconds, one sequence for each run of ``tokens`` tokens a request.
    """
    times = [1e3 * one for run in runs for one in intervals(run, batch)]
    expected = len(runs) * (tokens - 1)
    if 2 * len(times) < expected or len(times) < 2:
        return {"ms_refused": f"{len(times)} of {expected} expected intervals are between outputs of the whole batch"}
    first, middle, third = statistics.quantiles(times, n=4, method="inclusive")
    iqr = [round(first, 3), round(third, 3)]
    return {"ms": round(middle, 3), "ms_iqr": iqr, "ms_mean": round(statistics.fmean(times), 3)}


def write(path: Path, spans: Sequence[Span], tokens: int | None, pause: float) -> None:
    """Keep a trace: names once, then [name's number, stream, start, end] with nanoseconds after the point."""
    numbers: dict[str, int] = {}
    rows = [[numbers.setdefault(s[0], len(numbers)), s[1], round(s[2], 3), round(s[3], 3)] for s in spans]
    data = {"tokens": tokens, "pause": pause, "names": list(numbers), "spans": rows}
    with gzip.open(path, "wt") as file:
        json.dump(data, file, separators=(",", ":"))


def read(path: Path, pause: float | None = None) -> dict[str, Any]:
    """The figures of a kept trace; pause: another threshold than the one it was kept with."""
    with gzip.open(path, "rt") as file:
        data = json.load(file)
    spans = [(data["names"][number], stream, start, end) for number, stream, start, end in data["spans"]]
    limit = data["pause"] if pause is None else pause
    return decode(spans, data["tokens"], limit) if data["tokens"] else request(spans, limit)


def again(folder: Path, pause: float | None = None) -> list[dict[str, Any]]:
    """The lines of a folder's engine.jsonl, what they say of the device replaced by its traces (``trace_*`` as
    ``bench_engine.py --traces`` names them). Raises FileNotFoundError where a line's trace is missing."""
    lines = [json.loads(line) for line in (folder / "engine.jsonl").read_text().splitlines() if line.startswith("{")]
    engines: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in lines:
        who = {key: line[key] for key in WHO if key in line}
        cases = engines.setdefault(tuple(who.values()), {})
        if line.get("part") == "timeline":
            line |= engine_timeline.line(who, cases)
        if "launches" not in line and "device_refused" not in line:
            continue
        case, length = next((kind, line[kind]) for kind in ("decode_batch", "prefill") if kind in line)
        stem = f"{trace_name(line)}_{case.removesuffix('_batch')}_{length}"
        if case == "prefill":
            found = median_request([read(folder / f"{stem}_{n}.json.gz", pause) for n in range(3)])
        else:
            found = read(folder / f"{stem}.json.gz", pause)
        timeline = found.pop("timeline", None)
        if timeline and (case != "prefill" or length in TIMELINE_PROMPTS):
            cases[f"{case.removesuffix('_batch')} {length}"] = timeline
        for key in DEVICE:
            line.pop(key, None)
        line |= found
    return lines


def trace_name(who: Mapping[str, Any]) -> str:
    """How the names of an engine's traces begin: ``trace_rank_tp16_ours_k3-nvidia``."""
    words = (str(who[key]) for key in ("part", *WHO) if key in who)
    return re.sub(r"[^\w-]+", "-", "_".join(("trace", *words)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+", help="traces, or folders with an engine.jsonl and its traces")
    parser.add_argument("--pause", type=float, help="microseconds from which on a gap is a wait for the host")
    options = parser.parse_args()
    for path in options.paths:
        if path.is_dir():
            print("\n".join(json.dumps(line) for line in again(path, options.pause)))
        else:
            found = read(path, options.pause)
            print(path, json.dumps({k: v for k, v in found.items() if k not in ("timeline", "kind")}))


if __name__ == "__main__":
    main()
