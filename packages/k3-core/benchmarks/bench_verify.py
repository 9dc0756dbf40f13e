"""`k3 verify --full` against merely reading the files, on a synthetic checkpoint in the released layout.

    python bench_verify.py [--size-gib 1] [--rounds 3] [--out FILE]

Per round and number of threads, alternating: read every byte of every shard in the same pieces and drop it; scan the
checkpoint (values checked); scan it with a checksum of every shard. "cold" drops the files from the page cache before
each pass (posix_fadvise), "warm" reads them from it. The fastest of the rounds is written for the benchmark
page, since other work may share the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_reader import synthetic_config, write_synthetic

from k3_core.checkpoint import Manifest, verify_headers
from k3_core.cli.scan import PIECE, Notes, scan

RESULTS = Path(__file__).parent / "results" / "verify.json"


def read_only(manifest: Manifest, jobs: int) -> None:
    """Read all shards into one buffer a thread."""

    def one(shard: str) -> None:
        buffer = bytearray(PIECE)
        with (manifest.folder / shard).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, manifest.by_shard()))


def scanned(manifest: Manifest, jobs: int) -> None:
    """The command's own engine; any problem is a defect of the benchmark."""
    problems = [r.problem for r in scan(manifest, jobs=jobs, notes=Notes(None)) if r.problem]
    assert not problems, problems


def forget(manifest: Manifest) -> None:
    """Drop the shards from the page cache."""
    for shard in manifest.by_shard():
        descriptor = os.open(manifest.folder / shard, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(action: Any, manifest: Manifest, jobs: int, cold: bool) -> tuple[float, float]:
    """Seconds on the clock and of processor time."""
    if cold:
        forget(manifest)
    wall, cpu = time.perf_counter(), time.process_time()
    action(manifest, jobs)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(folder: Path, size_gib: float, rounds: int) -> list[dict[str, Any]]:
    """Rows of the page."""
    write_synthetic(folder, synthetic_config(size_gib))
    manifest = verify_headers(folder)
    total = sum((manifest.folder / shard).stat().st_size for shard in manifest.by_shard())
    sums = folder / "SHA256SUMS"
    listing = "".join(
        f"{hashlib.sha256((folder / shard).read_bytes()).hexdigest()}  {shard}\n" for shard in manifest.by_shard()
    )
    rows = []
    for cold in (False, True):
        for jobs in (1, 2):
            times: dict[str, list[tuple[float, float]]] = {"read only": [], "verify": [], "verify and checksum": []}
            for _ in range(rounds):
                sums.unlink(missing_ok=True)
                times["read only"].append(timed(read_only, manifest, jobs, cold))
                times["verify"].append(timed(scanned, manifest, jobs, cold))
                sums.write_text(listing)
                times["verify and checksum"].append(timed(scanned, manifest, jobs, cold))
            base = min(wall for wall, _ in times["read only"])
            for what, pairs in times.items():
                wall = min(wall for wall, _ in pairs)
                rows.append(
                    {
                        "page cache": "cold" if cold else "warm", "threads": jobs, "pass": what,
                        "GiB/s": round(total / wall / 2**30, 2), "times reading": round(wall / base, 2),
                        "CPU s a GiB": round(min(cpu for _, cpu in pairs) / total * 2**30, 2),
                    }
                )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.size_gib, options.rounds)
    load = os.getloadavg()[0]
    report = {
        "title": "k3 verify --full against reading the files",
        "command": "python packages/k3-core/benchmarks/bench_verify.py "
        f"--size-gib {options.size_gib:g} --rounds {options.rounds}",
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": importlib.metadata.version("torch")},
        "rows": rows,
        "notes": [
            f"A synthetic checkpoint of {options.size_gib:g} GiB in the released layout; fastest of {options.rounds} "
            f"rounds, with the machine's load average at {load:.1f} on {os.cpu_count()} cores."
        ],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
