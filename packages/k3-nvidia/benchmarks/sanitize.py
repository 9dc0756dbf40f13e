"""Every kernel of this wheel under NVIDIA's compute-sanitizer: reads and writes out of bounds, races in shared memory.

    python packages/k3-nvidia/benchmarks/sanitize.py [--tool memcheck|racecheck|initcheck|synccheck] [--spread 4]
        [--only kda_prefill,test_nvidia_glue] [--scales small] [--more="--racecheck-report all"]
        [--together 6] [--seconds 240] [--out FOLDER]

Two kinds of processes, ``--together`` at a time, each under the tool: ``--spread`` supported cases of every operator of
the conformance suite (conformance.py), and the pytest files of the kernels that are no operator of the suite. The tool
is found on PATH, in $COMPUTE_SANITIZER or under /usr/local/cuda*.

memcheck does not list failed calls of the driver (one of ours is an exception anyway): the CuTe DSL asks the driver for
functions that it does not have, 34 times in test_skinny_cute (cuGetProcAddress, "invalid argument").

What racecheck may say of a compiled kernel and what it means: where a tensor has fewer elements than the block has
threads, Triton's threads hold copies of an element and store the same value to the same shared address, which is
reported as a write against a write of one instruction.

sanitizer_<tool>.json, written anew whenever a process ends: the environment, the tool's version, and for each process
its cases, the tool's own count of errors, and how it ended. Exit status 1 where a case failed, the tool found
something, or a process did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import conformance

TESTS = Path(__file__).resolve().parents[1] / "tests"
#: Kernels that are no operator of the suite: glue, the ring of AttnRes, products for few rows, repacking of experts.
#: File -> which of its tests (pytest's -k; "" is all).
FILES = {
    "test_nvidia_glue": "",
    "test_attn_res_kernel": "small and False-2-4 or nan and False-2-4 or cluster_conforms and bfloat16",
    "test_skinny_gemm": "",
    "test_skinny_cute": "conforms",
    "test_expert_kernels_layout": "",
}
#: The tools' last words: errors of memcheck, initcheck and synccheck; hazards of racecheck.
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
ERROR_STATUS = 9


def tool() -> str:
    """Path of compute-sanitizer. Raises SystemExit where there is none."""
    places = [os.environ.get("COMPUTE_SANITIZER"), shutil.which("compute-sanitizer")]
    places += sorted(map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), reverse=True)
    for place in places:
        if place and Path(place).exists():
            return place
    raise SystemExit("compute-sanitizer is neither on PATH nor in COMPUTE_SANITIZER nor under /usr/local/cuda*")


def found_by_tool(words: list[str]) -> int | None:
    """Errors or hazards that the tool counted; None where it did not come to its summary."""
    counts = [int(match[1]) for line in words if (match := SUMMARY.search(line))]
    return sum(counts) if counts else None


def passed_tests(words: list[str]) -> int:
    """Tests that passed, from pytest's last line."""
    return sum(int(match[1]) for line in words[-40:] if (match := re.search(r"\b(\d+) passed", line)))


def errors_of(words: list[str]) -> list[str]:
    """What the tool and the program said without the host's stack, the first lines of it: where errors begin."""
    return [line for line in words if line.strip() and "Host Frame" not in line][:60]


def part(name: str, prefix: list[str], scales: tuple[str, ...], spread: int, end: float) -> dict[str, Any]:
    """Run one process under the tool; its row."""
    operator = name in conformance.OPERATORS
    if operator:
        command = conformance.command(name, scales, spread)
    else:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / f"{name}.py")]
        command += ["-k", FILES[name]] if FILES[name] else []
    began = time.monotonic()
    page = conformance.collect(name, conformance.child([*prefix, *command]), end - began)
    counts = conformance.counts_of(page["rows"])
    row = {
        "what": name, "cases": counts if operator else {"pass": passed_tests(page["words"])},
        "found": found_by_tool(page["words"]), "status": page["status"], "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    if operator:
        row["names"] = [r["case"] for r in page["rows"] if r["verdict"] == "pass"]
        row["failed"] = [f"{r['case']}: {r['reason'][:300]}" for r in page["rows"] if r["verdict"] == "fail"]
    row["ok"] = row["status"] == 0 and row["found"] == 0 and not counts["fail"]
    if not row["ok"]:
        row["said"] = errors_of(page["words"])
    return row | {"environment": page.get("environment", {})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--only", default=",".join((*conformance.OPERATORS, *FILES)))
    parser.add_argument("--spread", type=int, default=4)
    parser.add_argument("--scales", default="small")
    parser.add_argument("--more", default="", help="further options of the tool")
    parser.add_argument("--together", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=240, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    path = tool()
    quiet = ["--report-api-errors", "no"] if options.tool == "memcheck" else []
    prefix = [path, "--tool", options.tool, *quiet, "--error-exitcode", str(ERROR_STATUS), *options.more.split()]
    scales = tuple(options.scales.split(","))
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
    page: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python packages/k3-nvidia/benchmarks/sanitize.py " + " ".join(sys.argv[1:]),
        "tool": [line for line in version if line.strip()][-1:],
        "environment": {},
        "rows": [],
    }
    with ThreadPoolExecutor(options.together) as pool:
        for future in as_completed(
            [pool.submit(part, name, prefix, scales, options.spread, end) for name in options.only.split(",")]
        ):
            row = future.result()
            page["environment"] |= row.pop("environment")
            page["rows"].append(row)
            print(json.dumps({k: v for k, v in row.items() if k != "names"}), flush=True)
            (options.out / f"sanitizer_{options.tool}.json").write_text(json.dumps(page, indent=1) + "\n")
    return 0 if all(row["ok"] for row in page["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
