"""Times this wheel's kernels at the released sizes on the GPU at hand, each checked against the oracle first.

    python bench_kernels.py [--only kda_decode] [--out FILE]

One JSON line a case: device, versions, launch table, median microseconds over warm runs (device events around single
calls, so host overhead of short kernels is in it). No result is kept in this repository: nobody has run it on an AMD
device, and figures of another vendor's device would say nothing about these launch tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from k3_amd import kernels
from k3_amd.kernels import launch
from k3_core.testing import conformance
from k3_core.testing.case import Case, Problem

WARM, RUNS = 5, 50


def measure(case: Case, implementation: Any, device: torch.device) -> dict[str, Any]:
    """The case's verdict and, where it passed, its median time."""
    row = conformance.run_case(case, implementation, device)
    result: dict[str, Any] = {"operator": case.operator, "case": case.id, "verdict": row.verdict, "why": row.reason}
    if row.verdict != "pass":
        return result
    problem = Problem.build(case, case.inputs(device), device, implementation)
    with_out = "out" in problem.arena.views
    times = []
    for _ in range(WARM + RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        problem.call(implementation, with_out)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000.0)
    return result | {"median_us": round(statistics.median(times[WARM:]), 2), "runs": RUNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="operator (repeatable)")
    parser.add_argument("--out", type=Path, help="append lines to this file as well")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels: no GPU; nothing was timed")
    device = torch.device("cuda", torch.cuda.current_device())
    about = {
        "device": torch.cuda.get_device_name(device), "torch": torch.__version__, "triton": triton.__version__,
        "table": launch.architecture(device),
    }  # fmt: skip
    for name, implementation in kernels.implementations().items():
        if arguments.only and name not in arguments.only:
            continue
        for case in conformance.cases(name, ("real",)):
            line = json.dumps(about | measure(case, implementation, device))
            print(line, flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
