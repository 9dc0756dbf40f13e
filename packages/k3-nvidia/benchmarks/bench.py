"""Benchmarks on one GPU: ``python bench.py --rows experts,kda [--out DIR] [--slice NAME ...]``.

Each topic is a module ``bench_<topic>.py`` beside this file with ``run(out, slices)``, which checks before it times and
writes ``<out>/<topic>.json`` (resumable: finished rows are kept).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", required=True, help="comma-separated topics")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--slice", action="append", default=[], help="only rows whose key contains this (repeatable)")
    args = parser.parse_args()
    topics = [t for t in args.rows.split(",") if t]
    unknown = [t for t in topics if not (HERE / f"bench_{t}.py").exists()]
    if unknown:
        known = sorted(p.stem[6:] for p in HERE.glob("bench_*.py"))
        parser.error(f"unknown rows {', '.join(unknown)}; known: {', '.join(known)}")
    for topic in topics:
        importlib.import_module(f"bench_{topic}").run(args.out, args.slice)


if __name__ == "__main__":
    main()
