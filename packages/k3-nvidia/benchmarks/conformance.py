"""Every kernel of this wheel through the conformance suite on this GPU: bf16, fp16 and fp32 against fp64, with poison.

    python packages/k3-nvidia/benchmarks/conformance.py [--operators kda_decode,route] [--scales small,real,huge]
        [--out FOLDER] [--first N] [--sanitize memcheck]

One process an operator (compiling takes longer than running, so they run side by side); "huge" cases, whose offsets
pass 2^31 elements, follow one after another because they fill the device. Writes conformance.json: the environment and
one row a case, failures with their reason. Exit status 1 where a case failed.

--sanitize TOOL runs the "small" cases under NVIDIA's compute-sanitizer (found on PATH or in $COMPUTE_SANITIZER).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
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


def run(name: str, scales: tuple[str, ...], first: int | None) -> dict[str, Any]:
    """Rows of one operator, in this process."""
    from k3_core.testing import conformance

    report = conformance.Report()
    kernel = implementation(name)
    for case in conformance.cases(name, scales)[:first]:
        report.rows.append(conformance.run_case(case, kernel, "cuda"))
    import torch

    return {"environment": conformance.environment(torch.device("cuda")), "rows": report.to_json()}


def child(name: str, scales: tuple[str, ...], options: argparse.Namespace) -> subprocess.Popen[str]:
    """A process for one operator; its rows come as one JSON line on its standard output."""
    command = [sys.executable, __file__, "--child", "--operators", name, "--scales", ",".join(scales)]
    if options.first is not None:
        command += ["--first", str(options.first)]
    if options.sanitize:
        tool = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
        if tool is None:
            raise SystemExit("--sanitize needs compute-sanitizer on PATH or in COMPUTE_SANITIZER")
        command = [tool, "--tool", options.sanitize, "--error-exitcode", "9", *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def collect(name: str, process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """What a child said, with its exit status."""
    try:
        text, _ = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        text += "\nstopped: out of time"
    lines = [line for line in text.splitlines() if line.startswith('{"environment"')]
    page: dict[str, Any] = json.loads(lines[-1]) if lines else {"rows": []}
    page |= {"operator": name, "status": process.returncode}
    if not lines or process.returncode:
        page["said"] = [line for line in text.splitlines() if not line.startswith('{"environment"')][-12:]
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--scales", default="small,real")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=540, help="for all of it")
    parser.add_argument("--first", type=int, help="only so many cases of each")
    parser.add_argument("--sanitize", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names, scales = options.operators.split(","), tuple(options.scales.split(","))
    if options.child:
        print(json.dumps(run(names[0], scales, options.first)), flush=True)
        return 0
    end = time.monotonic() + options.seconds
    pages = []
    together = tuple(s for s in scales if s != "huge")
    if together:
        running = {name: child(name, together, options) for name in names}
        pages += [collect(name, process, end - time.monotonic()) for name, process in running.items()]
    if "huge" in scales:
        pages += [collect(name, child(name, ("huge",), options), end - time.monotonic()) for name in names]
    rows = [row for page in pages for row in page["rows"]]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("pass", "fail", "refused")}
    unfinished = [page["operator"] for page in pages if page["status"] or not page["rows"]]
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python packages/k3-nvidia/benchmarks/conformance.py " + " ".join(sys.argv[1:]),
        "environment": next((page["environment"] for page in pages if "environment" in page), {}),
        "counts": counts,
        "unfinished": {page["operator"]: page.get("said", []) for page in pages if page["operator"] in unfinished},
        "rows": rows,
    }
    stem = "conformance" if not options.sanitize else f"sanitizer_{options.sanitize}"
    (options.out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(counts), "unfinished:", ", ".join(unfinished) or "nothing")
    for row in rows:
        if row["verdict"] == "fail":
            print(f"{row['case']}: {row['reason'][:300]}")
    return 1 if counts["fail"] or unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
