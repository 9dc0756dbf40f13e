"""Is the model right in production? Graphs, prefix caching, isolation, load, long prompts, determinism, restarts.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python packages/k3-nvidia/benchmarks/production.py
        [--parts graphs,align,isolation,soak,long,determinism,restart] [--seconds N] [--jobs N]

Every part runs in a process of its own (``--jobs`` of them at a time, with a fixed cache each, so that they can share
one GPU) and appends one JSON line a check to production.jsonl in $OUT: ``ok``, figures, and the reason of a failure.
``--seconds`` limits each part. Exit status 1 if a check failed or a part did not end. Without a GPU the same checks run
on a CPU at tiny sizes. What the checks are and the rule they use: docs/serving.md, "What is checked under load".
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import gpu_smoke
import production_batches as batches
from gpu_smoke import say
from production_support import Checks

gpu_smoke.LOG = "production.jsonl"
SECONDS = float(os.environ.get("K3_BENCH_SECONDS", "280"))
Part = Callable[[Checks, Path, float], None]


def parts() -> dict[str, Part]:
    """Every part by name."""
    import production_cache as cache
    import production_isolation as isolation
    import production_soak as soak

    return {
        "graphs": batches.graphs,
        "align": cache.align,
        "isolation": isolation.isolation,
        "soak": soak.soak,
        "long": cache.long,
        "determinism": batches.determinism,
        "restart": batches.restart,
    }


def run_part(name: str, seconds: float) -> int:
    """One part in this process; 1 if a check failed."""
    gpu_smoke.prepare()
    check, began = Checks(name), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=os.environ.get("K3_SCRATCH")) as work:
            parts()[name](check, Path(work), seconds)
    except BaseException as error:
        traceback.print_exc()
        check("part", False, reason=f"{type(error).__name__}: {error}"[:500])
    say(part=name, seconds=round(time.monotonic() - began, 1), ok=not check.failed, failed=check.failed)
    return 1 if check.failed else 0


def run_all(names: list[str], seconds: float, jobs: int) -> int:
    """Each part in a process of its own, ``jobs`` at a time; 1 if one failed."""
    waiting, failed = list(names), []
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            command = [sys.executable, __file__, "--part", name, "--seconds", str(seconds)]
            running[name] = (subprocess.Popen(command), time.monotonic() + seconds + 60)
        time.sleep(0.2)
        for name, (process, limit) in list(running.items()):
            status = process.poll()
            if status is None and time.monotonic() > limit:
                process.kill()
                process.wait()
                status = 124
                say(part=name, ok=False, reason=f"stopped 60 s after its {seconds:.0f} s")
            if status is not None:
                del running[name]
                failed += [name] if status else []
    say(part="all", parts=names, failed=failed, ok=not failed)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="graphs,align,isolation,soak,long,determinism,restart")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of each part")
    parser.add_argument("--jobs", type=int, default=1, help="parts at a time")
    parser.add_argument("--part", help="run this part in this process")
    parser.add_argument("--first-token", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_token:
        gpu_smoke.prepare()
        batches.first_token(options.first_token)
        return 0
    if options.part:
        return run_part(options.part, options.seconds)
    return run_all(options.parts.split(","), options.seconds, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
