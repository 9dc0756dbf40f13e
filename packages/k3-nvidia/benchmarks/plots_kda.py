"""Plots and words of the KDA results: ``python plots_kda.py [results/kda.json]``.

Three panels a part (prefill, decode, verify): time against size, ratio to vLLM's path, ratio to the byte floor. Results
in this folder's results/ draw into docs/benchmarks and render the page anew (ci/render_docs.py); others draw beside
themselves. bench_kda.py calls `publish` at its end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import plots
from plots import Row

PARTS = ("prefill", "decode", "verify")
Series = dict[str, list[tuple[float, Row]]]


def rival_us(row: Row) -> float | None:
    """The rival's time in a CUDA graph; of two rivals the faster."""
    times = [row[k] for k in ("rival_graph_us", "decode_fused_us", "decode_parts_us", "verify_parts_us") if k in row]
    return min((t for t in times if isinstance(t, float)), default=None)


def series(rows: dict[str, Row], part: str) -> Series:
    """Points (size, row) by label; rows without a figure are left out."""
    found: Series = {}
    for key, row in rows.items():
        if not key.startswith(part + " ") or "graph_us" not in row:
            continue
        if part == "prefill":
            label = "1 sequence" if row["tokens"] == row["longest"] else "several"
            found.setdefault(f"{row['heads']} heads, {label}", []).append((row["tokens"], row))
        else:
            label = f"{row['heads']} heads" + (f", 1+{row['spec']}" if row["spec"] else "")
            found.setdefault(label, []).append((row["rows"], row))
    return {label: sorted(points, key=lambda p: p[0]) for label, points in found.items()}


def draw(rows: dict[str, Row], folder: Path) -> list[Path]:
    """One SVG a part that has rows. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kda", "font.size": 9}
    from matplotlib import pyplot

    made = []
    for part in PARTS:
        lines = series(rows, part)
        if not lines:
            continue
        figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
        for n, (label, points) in enumerate(sorted(lines.items(), key=lambda item: (int(item[0].split()[0]), item[0]))):
            look = {"color": f"C{n % 10}", "marker": "o^sv"[n // 10 % 4], "ms": 4, "lw": 1}
            style = "" if part == "prefill" and label.endswith("several") else "-"
            axes[0].plot([x for x, _ in points], [r["graph_us"] for _, r in points], ls=style, label=label, **look)
            against = [(x, r["graph_us"] / t) for x, r in points if (t := rival_us(r))]
            axes[1].plot([x for x, _ in against], [y for _, y in against], ls=style, **look)
            floors = [(x, r["floor_ratio"]) for x, r in points if "floor_ratio" in r]
            axes[2].plot([x for x, _ in floors], [y for _, y in floors], ls=style, **look)
        size = "tokens of the batch" if part == "prefill" else "sequences"
        for axis, title in zip(axes, ("microseconds", "ours / vLLM's path", "ours / time of its bytes"), strict=True):
            axis.set(xscale="log", xlabel=size, title=title)
            axis.grid(alpha=0.3)
            axis.minorticks_off()  # a third of the file
        axes[0].set_yscale("log")
        axes[0].minorticks_off()
        axes[1].axhline(1.0, color="black", lw=0.8)
        axes[0].legend(fontsize=6, ncols=2)
        figure.suptitle(f"KDA {part}, in a replayed CUDA graph")
        figure.tight_layout()
        path = folder / f"k3-nvidia-kda-{part}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        made.append(path)
    return made


def notes(rows: dict[str, Row]) -> list[str]:
    """What the page shows below the rows: the plots, and the kernels of each path on both sides."""
    text = [f"![KDA {part}](k3-nvidia-kda-{part}.svg)" for part in PARTS if series(rows, part)]
    paths: dict[str, Iterable[str]] = {}
    for key, row in rows.items():
        for side, names in row.get("kernels", {}).items():
            engine = f" ({row['engine']})" if side == "ours" and "engine" in row else ""
            paths[f"{key.split()[0]}, {side}{engine}"] = names
    return text + [f"Kernels, {path}: {', '.join(f'`{n}`' for n in names)}." for path, names in sorted(paths.items())]


def publish(results: Path) -> None:
    """Notes, plots and page of these results."""
    plots.publish("kda.json", results, notes, draw, "plots_kda.py")


if __name__ == "__main__":
    publish(Path(sys.argv[1]) if len(sys.argv) > 1 else plots.HERE / "results" / "kda.json")
