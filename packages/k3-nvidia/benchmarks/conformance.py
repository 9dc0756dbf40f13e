"""Every kernel of this wheel through the conformance suite on this GPU: bf16, fp16 and fp32 against fp64, with poison.

    python packages/k3-nvidia/benchmarks/conformance.py [--operators kda_decode,route] [--scales small,real,huge]
        [--out FOLDER] [--spread N] [--huge-together 3]

One process an operator (compiling takes longer than running, so they run side by side); "huge" cases, whose offsets
pass 2^31 elements and which need 45 GiB each, run ``--huge-together`` operators at a time. Writes conformance.json:
the environment and one row a case, failures with their reason. Exit status 1 where a case failed. Under
compute-sanitizer: sanitize.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

OPERATORS = (
    "kda_prefill", "kda_decode", "kda_verify", "experts", "attn_res", "route", "short_conv", "gated_norm", "situ",
)  # fmt: skip


def implementation(name: str) -> Any:
    """The Triton kernel of an operator, without its check for a served model's device."""
    from k3_nvidia import dispatch

    return next(i for i in dispatch.registry().implementations(name) if i.name == dispatch.KERNEL)


def run(name: str, scales: tuple[str, ...], spread: int | None) -> None:
    """Print the environment and the rows of one operator, in this process, one JSON line each."""
    import torch

    from k3_core.testing import conformance

    print(json.dumps({"environment": conformance.environment(torch.device("cuda"))}), flush=True)
    kernel = implementation(name)
    cases = conformance.cases(name, scales)
    if spread is not None:
        cases = some([case for case in cases if kernel.supports(case.spec(torch.device("cuda")))[0]], spread)
    for case in cases:
        report = conformance.Report([conformance.run_case(case, kernel, "cuda")])
        print(json.dumps({"row": report.to_json()[0]}), flush=True)


def some(cases: list[Any], count: int) -> list[Any]:
    """``count`` of the cases, evenly spread from the first to the last; all where there are fewer."""
    if count >= len(cases):
        return cases
    return [cases[round(i * (len(cases) - 1) / max(count - 1, 1))] for i in range(count)]


def command(name: str, scales: tuple[str, ...], spread: int | None = None) -> list[str]:
    """The command of a process for one operator."""
    words = [sys.executable, __file__, "--child", "--operators", name, "--scales", ",".join(scales)]
    return words + (["--spread", str(spread)] if spread is not None else [])


def child(words: list[str]) -> subprocess.Popen[str]:
    """A process whose words are read by :func:`collect`; it leads a group, which is ended as one."""
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def collect(name: str, process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """What a child said, with its exit status; of one that ran out of time, the rows that came."""
    try:
        text, _ = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        text += "\nstopped: out of time"
    page: dict[str, Any] = {"operator": name, "status": process.returncode, "rows": []}
    other = []
    for line in text.splitlines():
        if line.startswith('{"environment"'):
            page |= json.loads(line)
        elif line.startswith('{"row"'):
            page["rows"].append(json.loads(line)["row"])
        else:
            other.append(line)
    page["words"] = other
    return page


def counts_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many rows passed, failed and were refused."""
    return {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("pass", "fail", "refused")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--scales", default="small,real")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=540, help="for all of it")
    parser.add_argument("--spread", type=int, help="only so many cases of each that it supports, evenly spread")
    parser.add_argument("--huge-together", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names, scales = options.operators.split(","), tuple(options.scales.split(","))
    if options.child:
        run(names[0], scales, options.spread)
        return 0
    end = time.monotonic() + options.seconds
    pages = []
    together = tuple(s for s in scales if s != "huge")
    if together:
        running = {name: child(command(name, together, options.spread)) for name in names}
        pages += [collect(name, process, end - time.monotonic()) for name, process in running.items()]
    if "huge" in scales:

        def huge(name: str) -> dict[str, Any]:
            return collect(name, child(command(name, ("huge",), options.spread)), end - time.monotonic())

        with ThreadPoolExecutor(options.huge_together) as pool:
            pages += pool.map(huge, names)
    rows = [row for page in pages for row in page["rows"]]
    counts = counts_of(rows)
    unfinished = [page["operator"] for page in pages if page["status"] or not page["rows"]]
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python packages/k3-nvidia/benchmarks/conformance.py " + " ".join(sys.argv[1:]),
        "environment": next((page["environment"] for page in pages if "environment" in page), {}),
        "counts": counts,
        "unfinished": {page["operator"]: page["words"][-12:] for page in pages if page["operator"] in unfinished},
        "rows": rows,
    }
    (options.out / "conformance.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(counts), "unfinished:", ", ".join(unfinished) or "nothing")
    for row in rows:
        if row["verdict"] == "fail":
            print(f"{row['case']}: {row['reason'][:300]}")
    return 1 if counts["fail"] or unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
