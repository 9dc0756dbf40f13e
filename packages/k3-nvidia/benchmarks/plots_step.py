"""Plots of AttnRes, the low-latency products and the engine: ``python plots_step.py`` draws them from results/.

Three panels each, as for KDA (``plots_kda.py``): time against size, ratio to the rival, ratio to the byte floor. Drawn
into docs/benchmarks, named in the results' notes, and the page is rendered anew (ci/render_docs.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plots import HERE, PAGES, render

#: label -> (size, our time, rival's time or None, floor), microseconds.
Lines = dict[str, list[tuple[float, float, float | None, float]]]


def attn_res_lines(rows: Mapping[str, Mapping[str, Any]]) -> Lines:
    """Against tokens, a line for each number of blocks; rows without a figure are left out."""
    found: Lines = {}
    for row in rows.values():
        if "ours_us" in row:
            point = (row["tokens"], row["ours_us"], row.get("vllm_us"), row["floor_us"])
            found.setdefault(f"{row['blocks']} blocks", []).append(point)
    return {label: sorted(points) for label, points in found.items()}


def gemm_lines(rows: Mapping[str, Mapping[str, Any]]) -> Lines:
    """Against megabytes of weights, a line for 1, 8, 16 and 32 rows of x; 2 and 4 lie between."""
    found: Lines = {}
    for key, row in rows.items():
        if key.split()[0] not in ("M=1", "M=8", "M=16", "M=32"):
            continue
        point = (row["MB"], row["us"], row["cublas us"], row["floor us"])
        found.setdefault(key.split()[0].replace("M=", "M = "), []).append(point)
    return {label: sorted(points) for label, points in sorted(found.items(), key=lambda item: int(item[0][4:]))}


def glue_lines(rows: Mapping[str, Mapping[str, Any]]) -> Lines:
    """Against tokens, a line for each kernel; no rival, the floor is a copy."""
    found: Lines = {}
    for key, row in rows.items():
        if "us" in row:
            found.setdefault(key.rsplit(" ", 1)[0], []).append((row["tokens"], row["us"], None, row["copy us"]))
    return {label: sorted(points) for label, points in found.items()}


def draw_engine(rows: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Ours over the faster rival, wall clock and device alone, against batch and prompt. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4))
    for axis, kind, size in zip(axes, ("decode", "prefill"), ("requests", "tokens of the prompt"), strict=True):
        for n, shape in enumerate(("tp16", "tp8")):
            for key, style in (("ratio", "-"), ("ratio, device", "--")):
                points = sorted(
                    (int(case.split()[2]), row[key])
                    for case, row in rows.items()
                    if case.startswith(f"{shape} {kind} ") and key in row
                )
                sizes, ratios = [p[0] for p in points], [p[1] for p in points]
                axis.plot(sizes, ratios, ls=style, color=f"C{n}", marker="o", ms=3, label=f"{shape} {key}")
        axis.set(xscale="log", xlabel=size, title=f"{kind}: ours / the faster of Marlin and Humming")
        axis.axhline(1.0, color="black", lw=0.8)
        axis.grid(alpha=0.3)
        axis.minorticks_off()
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw(lines: Lines, path: Path, title: str, size: str, rival: str) -> None:
    """One SVG of three panels. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    for n, (label, points) in enumerate(lines.items()):
        look: dict[str, Any] = {"color": f"C{n % 10}", "marker": "o", "ms": 3, "lw": 1}
        sizes = [point[0] for point in points]
        axes[0].plot(sizes, [ours for _, ours, _, _ in points], label=label, **look)
        against = [(s, ours / other) for s, ours, other, _ in points if other]
        axes[0].plot([p[0] for p in points if p[2]], [p[2] for p in points if p[2]], ls=":", color=look["color"], lw=1)
        axes[1].plot([s for s, _ in against], [ratio for _, ratio in against], **look)
        axes[2].plot(sizes, [ours / floor for _, ours, _, floor in points], **look)
    titles = (f"microseconds (dotted: {rival})", f"ours / {rival}", "ours / time of its bytes")
    for axis, name in zip(axes, titles, strict=True):
        axis.set(xscale="log", xlabel=size, title=name)
        axis.grid(alpha=0.3)
        axis.minorticks_off()
    axes[0].set_yscale("log")
    axes[0].minorticks_off()
    axes[1].axhline(1.0, color="black", lw=0.8)
    axes[2].axhline(1.15, color="black", lw=0.8, ls="--")
    axes[0].legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


PLOTS = {
    "attnres.json": (
        attn_res_lines, "k3-nvidia-attnres.svg", "AttnRes, delta and norm fused", "tokens", "vLLM's kernel",
    ),
    "skinny.json": (
        gemm_lines, "k3-nvidia-gemm.svg", "Low-latency products, weights cold", "megabytes of weights", "cuBLAS",
    ),
    "glue.json": (glue_lines, "k3-nvidia-glue.svg", "Kernels between the products", "tokens", "no rival"),
}  # fmt: skip


def notes(old: list[str], svg: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The notes with the plot and, where the rows tell them, the kernels that ran on both sides."""
    kept = [note for note in old if not note.startswith(("![", "Kernels, "))]
    text = [f"![{svg.removesuffix('.svg')}]({svg})"]
    for side, key in (("ours", "ours_kernels"), ("vLLM's", "vllm_kernels")):
        names = sorted({name for row in rows.values() for name in row.get(key, ())})
        if names:
            text.append(f"Kernels, {side}: {', '.join(f'`{name}`' for name in names)}.")
    return kept + text


def publish(folder: Path = HERE / "results") -> None:
    """Draw every plot whose results are there, name it in them, write the page."""
    for name, (lines, svg, title, size, rival) in PLOTS.items():
        file = folder / name
        if not file.exists():
            print(f"no {name}", flush=True)
            continue
        data = json.loads(file.read_text())
        draw(lines(data["rows"]), PAGES / svg, title, size, rival)
        data["notes"] = notes(data.get("notes", []), svg, data["rows"])
        file.write_text(json.dumps(data, indent=1) + "\n")
    file = folder / "engine.json"
    data = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    if any(key in row for row in data["rows"].values() for key in ("ratio", "ratio, device")):  # what the plot shows
        draw_engine(data["rows"], PAGES / "k3-nvidia-engine.svg")
        data["notes"] = notes(data["notes"], "k3-nvidia-engine.svg", {})
        file.write_text(json.dumps(data, indent=1) + "\n")
    render()


if __name__ == "__main__":
    publish()
