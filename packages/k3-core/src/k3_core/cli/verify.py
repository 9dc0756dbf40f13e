"""`k3 verify`: every shard's header against the tensor table and, with `--full`, every byte."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from k3_core.checkpoint import Manifest, verify_headers
from k3_core.cli import output
from k3_core.cli.scan import Notes, ShardResult, scan
from k3_core.config import load_config
from k3_core.errors import K3Error


def verify(
    path: Annotated[Path, typer.Argument(help="Folder with config.json and the shards.")],
    full: Annotated[
        bool, typer.Option(help="Read every byte: scales, finite values, A_log's tail, checksums.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Shards read at the same time, with --full.")] = min(
        8, os.cpu_count() or 1
    ),
    fresh: Annotated[bool, typer.Option(help="Read again what an earlier run found whole.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Check a checkpoint against the tensor table of its configuration; exit status 1 on a problem.

    Headers alone take seconds. --full reads the files at the disk's speed; an interrupted run goes on where it stopped.
    """
    report: dict[str, Any] = {"path": str(path), "ok": False, "problems": [], "warnings": []}
    try:
        manifest = verify_headers(path, load_config(path))
    except K3Error as error:
        if not as_json:
            raise
        output.emit(report | {"problems": [str(error)]})
        raise typer.Exit(1) from error
    report["warnings"] = list(manifest.warnings)
    report |= {"ok": True, "tensors": len(manifest), "bytes": manifest.total_bytes, "shards": len(manifest.by_shard())}
    if full:
        report |= _full(manifest, jobs, fresh, show=not as_json)
    if as_json:
        output.emit(report)
    else:
        _say(path, report, full)
    if not report["ok"]:
        raise typer.Exit(1)


def _full(manifest: Manifest, jobs: int, fresh: bool, show: bool) -> dict[str, Any]:
    notes = Notes.of(manifest.folder, fresh)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    started = time.monotonic()
    results: list[ShardResult] = []
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not show) as bar:
        total = sum((manifest.folder / shard).stat().st_size for shard in manifest.by_shard())
        task = bar.add_task(f"reading with {jobs} threads", total=total)
        for result in scan(manifest, jobs=jobs, notes=notes, advance=lambda n: bar.advance(task, n)):
            results.append(result)
            if result.problem and show:
                bar.console.print(result.problem, markup=False, highlight=False)
    seconds = time.monotonic() - started
    problems = sorted(r.problem for r in results if r.problem)
    read = sum(r.nbytes for r in results if not r.resumed)
    return {
        "ok": not problems,
        "problems": problems,
        "bytes_read": read,
        "seconds": round(seconds, 3),
        "shards_read": sum(not r.resumed for r in results),
        "shards_known_good": sum(r.resumed for r in results),
        "shards_hashed": sum(r.hashed for r in results),
    }


def _say(path: Path, report: dict[str, Any], full: bool) -> None:
    output.say(f"{path}: headers of {report['tensors']:,} tensors in {report['shards']} shards match the configuration")
    for warning in report["warnings"]:
        output.say(f"warning: {warning}")
    if not full:
        return
    known = report["shards_known_good"]
    output.say(
        f"read {output.size(report['bytes_read'])} of {report['shards_read']} shards in {report['seconds']:.1f} s"
        + (f"; {known} were found whole by an earlier run (--fresh reads them again)" if known else "")
        + (
            f"; {report['shards_hashed']} checksums compared"
            if report["shards_hashed"]
            else "; no checksums to compare"
        )
    )
    if report["problems"]:
        output.say(f"{len(report['problems'])} shards are damaged; the first bad place of each:")
        for problem in report["problems"]:
            output.say(f"  {problem}")
    else:
        output.say("every value is finite, no scale is NaN, A_log's tails are zero")
