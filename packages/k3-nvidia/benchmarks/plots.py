"""What the plots of a results file have in common: where they are drawn, and the page that is rendered anew."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PAGES = ROOT / "docs/benchmarks"
Row = dict[str, Any]


def render() -> None:
    """The repository's benchmark pages from its results."""
    subprocess.run([sys.executable, ROOT / "ci/render_docs.py"], cwd=ROOT, check=True)


def publish(
    name: str,
    results: Path,
    notes: Callable[[dict[str, Row]], list[str]],
    draw: Callable[[dict[str, Row], Path], Sequence[Path]],
    script: str,
) -> None:
    """Writes notes, draws plots and, for the repository's own results, the page; says what is missing and goes on.

    The repository's own are results/``name`` and draw into docs/benchmarks, others beside themselves. script: what to
    call where matplotlib is installed.
    """
    data = json.loads(results.read_text())
    data["notes"] = notes(data["rows"])
    results.write_text(json.dumps(data, indent=1) + "\n")
    ours = results.resolve() == HERE / "results" / name and PAGES.is_dir()
    try:
        made = draw(data["rows"], PAGES if ours else results.parent)
    except ImportError as error:
        print(f"no plots: {error}; draw them with {script} where matplotlib is installed", flush=True)
        return
    print("drawn: " + ", ".join(path.name for path in made), flush=True)
    if ours:
        render()
