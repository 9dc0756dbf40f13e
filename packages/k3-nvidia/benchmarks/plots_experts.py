"""Plot and words of the expert results: ``python plots_experts.py [results/experts.json]``.

Three panels: time against tokens, ratio to the faster of vLLM's paths, ratio to the floor (the larger of weight bytes
at the copy's bandwidth and FLOPs at the matrix rate). Results in this folder's results/ draw into docs/benchmarks and
render the page anew (ci/render_docs.py); others draw beside themselves. bench_experts.py calls `publish` at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import plots
from plots import Row

SHAPES = {"tp16": "TP16 (width 192)", "tp8": "TP8 (width 384)", "ep16": "EP16 (56 experts of width 3072)"}
NAME = "k3-nvidia-experts.svg"


def times(row: Row) -> dict[str, float]:
    """Microseconds by side: in a CUDA graph, or eager with a cold L2 where no graph was timed (8192 tokens)."""
    found: dict[str, float] = row.get("graph_us") or row.get("cold_us") or {}
    return found


def series(rows: dict[str, Row]) -> dict[str, list[tuple[int, Row]]]:
    """Points (tokens, row) by shape; rows without a figure of ours are left out."""
    found: dict[str, list[tuple[int, Row]]] = {}
    for key, row in rows.items():
        if "ours" in times(row):
            found.setdefault(key.split(".")[0], []).append((row["tokens"], row))
    return {shape: sorted(found[shape], key=lambda p: p[0]) for shape in SHAPES if shape in found}


def draw(rows: dict[str, Row], folder: Path) -> list[Path]:
    """The SVG of the three panels. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "experts", "font.size": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    for n, (shape, points) in enumerate(series(rows).items()):
        for side, style in (("ours", "-"), ("marlin", ":"), ("humming", "--")):
            line = [(t, times(r)[side]) for t, r in points if side in times(r)]
            label = SHAPES[shape] if side == "ours" else None
            axes[0].plot(
                [t for t, _ in line],
                [us for _, us in line],
                color=f"C{n}",
                ls=style,
                marker="o",
                ms=3,
                lw=1,
                label=label,
            )
        look = {"color": f"C{n}", "marker": "o", "ms": 4, "lw": 1}
        ratios = [(t, r["ratio"]) for t, r in points if "ratio" in r]
        axes[1].plot([t for t, _ in ratios], [y for _, y in ratios], **look)
        floors = [(t, times(r)["ours"] / max(r["weight_floor_us"], r["flop_floor_us"])) for t, r in points]
        axes[2].plot([t for t, _ in floors], [y for _, y in floors], **look)
    titles = (
        "us (dotted Marlin, dashed Humming)",
        "ours / the faster of vLLM's",
        "ours / weight or FLOP floor",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xscale="log", xlabel="tokens", title=title)
        axis.grid(alpha=0.3)
        axis.minorticks_off()
    axes[0].set_yscale("log")
    axes[0].minorticks_off()
    axes[1].axhline(1.0, color="black", lw=0.8)
    axes[0].legend(fontsize=7)
    figure.suptitle("Routed experts of a rank, router to weighted sum, weights cold")
    figure.tight_layout()
    path = folder / NAME
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return [path]


def notes(rows: dict[str, Row]) -> list[str]:
    """What the page shows below the rows: the plot, and the kernels that ran on each side at one and at 8192 tokens."""
    text = [f"![Experts]({NAME})"] if series(rows) else []
    for shape, points in series(rows).items():
        for tokens, row in (points[0], points[-1]) if len(points) > 1 else points:
            for side, names in row.get("kernels", {}).items():
                listed = ", ".join(f"`{n.split('(')[0]}`" for n in names)
                text.append(f"Kernels, {shape}, {tokens} tokens, {side}: {listed}.")
    return text


def publish(results: Path) -> None:
    """Notes, plot and page of these results."""
    plots.publish("experts.json", results, notes, draw, "plots_experts.py")


if __name__ == "__main__":
    publish(Path(sys.argv[1]) if len(sys.argv) > 1 else plots.HERE / "results" / "experts.json")
