"""Benchmarks on one GPU: ``python bench.py --rows experts,kda [--out DIR] [--slice NAME ...]``.

Each topic is a module ``bench_<topic>.py`` beside this file with ``run(out, slices)``, which checks before it times and
writes ``<out>/<topic>.json`` (resumable: finished rows are kept). ``gemm`` are the low-latency products (skinny.json),
``engine`` whole engines in processes of their own (engine.json).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Topics whose module has another name.
MODULES = {"gemm": "bench_skinny", "engine": "engine_rows"}
sys.path.insert(0, str(HERE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", required=True, help="comma-separated topics")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--slice", action="append", default=[], help="only rows whose key contains this (repeatable)")
    args = parser.parse_args()
    topics = [t for t in args.rows.split(",") if t]
    modules = {t: MODULES.get(t, f"bench_{t}") for t in topics}
    unknown = [t for t, module in modules.items() if not (HERE / f"{module}.py").exists()]
    if unknown:
        known = sorted({p.stem[6:] for p in HERE.glob("bench_*.py")} | MODULES.keys())
        parser.error(f"unknown rows {', '.join(unknown)}; known: {', '.join(known)}")
    for topic in topics:
        importlib.import_module(modules[topic]).run(args.out, args.slice)


if __name__ == "__main__":
    main()
