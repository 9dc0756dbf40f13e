"""The engine's rows: ``bench.py --rows engine`` runs ``bench_engine.py`` for ours and both rivals, one after another.

What is in <out>/engine.jsonl already is not run again; K3_BENCH_SECONDS (600) ends the last process. The page's rows
are <out>/engine.json: per shape and batch or prompt our milliseconds, each rival's, and ours over the faster of the
two, for the wall clock (``ms``) and for the device alone (``device_ms``). Several measurements of a part show their
median. A start is in seconds: what the engine needed after its weights with warm caches. Lines ``timeline`` become
tables of their own (``engine_timeline.tables``), and so does what has ``latent`` (``bench_engine.py --share-latent``):
it is in no row, and a process that wrote only such lines counts as not run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import engine_steps
import engine_timeline

HERE = Path(__file__).resolve().parent
#: (implementation, experts as bench_engine.py names them) -> column.
SIDES = {("ours", "k3-nvidia"): "ours", ("upstream", "marlin"): "marlin", ("upstream", "auto"): "humming"}
RUNS = tuple(
    (shape, impl, experts)
    for shape in ("tp16", "tp8")
    for impl, experts in (("ours", "auto"), ("upstream", "marlin"), ("upstream", "auto"))
)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a JSON-lines file."""
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def case_of(record: Mapping[str, Any]) -> str | None:
    """``tp16 decode 8``, ``tp8 prefill 8192``, ``tp16 (cold) start``; None for a record of something else.

    Nor has a record with ``latent`` a case: take that off to ask what it is of.
    """
    if "latent" in record:
        return None
    if record.get("part") == "startup":
        return f"{record['shape']} {'cold ' if record.get('caches') == 'cold' else ''}start"
    for kind, key in (("decode", "decode_batch"), ("prefill", "prefill")):
        if key in record and ("ms" in record or "device_ms" in record):
            return f"{record['shape']} {kind} {record[key]}"
    return None


def rows(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """case -> ours, marlin, humming and the ratios; cases without a measurement of ours are left out."""
    times: dict[str, dict[str, list[float]]] = {}
    for record in found:
        case, side = case_of(record), SIDES.get((record.get("impl", ""), record.get("experts", "")))
        if case is None or side is None:
            continue
        columns = times.setdefault(case, {})
        for measure, label in (("ms", side), ("init_s", side), ("device_ms", f"{side}, device")):
            if measure in record:
                columns.setdefault(label, []).append(record[measure])
        if "launches" in record:
            columns.setdefault(f"{side}, launches", []).append(record["launches"])
    result = {}
    for case, columns in times.items():
        row: dict[str, Any] = {label: round(statistics.median(values), 3) for label, values in columns.items()}
        for ours, suffix in (("ours", ""), ("ours, device", ", device")):
            rivals = [row[f"{side}{suffix}"] for side in ("marlin", "humming") if f"{side}{suffix}" in row]
            if ours in row and rivals:
                row[f"ratio{suffix}"] = round(row[ours] / min(rivals), 2)
        if "ours" in row or "ours, device" in row:
            result[case] = row
    return result


def refusals(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each figure that ``bench_engine.py`` could not tell."""
    said = []
    for record in found:
        side = SIDES.get((record.get("impl", ""), record.get("experts", "")))
        kind = next((kind for kind in ("decode_batch", "prefill") if kind in record), None)
        for key, what in (("ms_refused", "wall clock"), ("device_refused", "device time")):
            if side and kind and key in record:
                case = f"{record['shape']} {kind.removesuffix('_batch')} {record[kind]}"
                latent = f", latent {record['latent']}" if "latent" in record else ""
                said.append(f"No {what} of {side} in {case}{latent}: {record[key]}.")
    return said


def shared_latent(found: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """title -> rows for the page of the lines with ``latent``: prompts, then where their time goes; {} without any."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in found:
        if "latent" in record:
            groups.setdefault(record["latent"], []).append({k: v for k, v in record.items() if k != "latent"})
    tables: dict[str, list[dict[str, Any]]] = {}
    for latent, records in groups.items():
        for case, row in rows(records).items():
            shape, what = case.split(" ", 1)
            title = f"{shape}: prefill with the latent {latent}, milliseconds"
            tables.setdefault(title, []).append({"case": what, **row})
        times = engine_timeline.tables(records)
        tables |= {f"{title}, latent {latent}": parts for title, parts in times.items()}
    return tables


def write(out: Path) -> Path:
    """engine.json from engine.jsonl."""
    found = list(records(out / "engine.jsonl"))
    place: dict[str, Any] = next((dict(r) for r in found if "device" in r), {})
    environment = {
        "command": "bench.py --rows engine", "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": "?", **place,
    }  # fmt: skip
    title = "engine, 8 layers of one rank, milliseconds"
    notes = [
        "decode: one step of that many requests; prefill: a prompt of that many tokens and one generated token. ratio: "
        "ours over the faster rival; device: the device's own time, waits for the host left out. start: seconds that "
        "an engine needs after its weights (memory profile, warm-up, graphs) with warm caches; cold start: with none."
    ]
    data = {"title": title, "environment": environment, "rows": rows(found), "notes": notes}
    notes += refusals(found)
    shared = shared_latent(found)
    if shared:
        notes.append(
            "Latent shared over ranks: one GPU multiplies what one rank of so many would in long batches. Ours: its "
            "share of the latent's down and up projections, and it writes the gathered latent, as it does by itself "
            "with tensor parallelism (the up projection from 1024 tokens on at the latest, the down projection from "
            "2048); vLLM's: its share of the up projection, as vLLM does by itself with tensor parallelism. "
            "Collectives are left out on both sides. In every other row either side multiplies both projections whole."
        )
    where = engine_timeline.tables([record for record in found if "latent" not in record])
    if where or shared:
        data["tables"] = shared | where
    if where:
        notes.append(
            "Where a step's time goes: an instant that several kernels cover counts for the one that started first; "
            f"sum of parts and gaps (device idle below {engine_steps.PAUSE_US:g} us) are the whole. Theirs: the faster "
            "rival. Projections: "
            "every product but the router's and the head's, those of the shared experts included. Kernel by kernel: "
            "the lines `timeline` of engine.jsonl."
        )
    path = out / "engine.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def run(out: Path, slices: Sequence[str]) -> None:
    """Every process that is not recorded yet, then the page's rows. slices: parts of ``tp16 ours auto``."""
    end = time.monotonic() + float(os.environ.get("K3_BENCH_SECONDS", "600"))
    out.mkdir(parents=True, exist_ok=True)
    for shape, impl, experts in RUNS:
        name = f"{shape} {impl} {experts}"
        recorded = "k3-nvidia" if impl == "ours" else experts
        have = {
            case_of(r) for r in records(out / "engine.jsonl")
            if (r.get("shape"), r.get("impl"), r.get("experts")) == (shape, impl, recorded)
        }  # fmt: skip
        if (slices and not any(part in name for part in slices)) or f"{shape} prefill 32768" in have:
            continue
        left = end - time.monotonic()
        if left < 60:
            print(f"time is up before {name}", flush=True)
            break
        command = [
            sys.executable,
            str(HERE / "bench_engine.py"),
            "--shape",
            shape,
            "--impl",
            impl,
            "--experts",
            experts,
        ]
        try:
            done = subprocess.run(command, env={**os.environ, "OUT": str(out)}, timeout=left, check=False)
            print(f"{name}: rc {done.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{name}: ran out of time", flush=True)
    write(out)


if __name__ == "__main__":
    print(write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"))
