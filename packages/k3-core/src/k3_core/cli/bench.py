"""`k3 bench`: a running server through vLLM's own benchmark, and operators one by one on this machine."""

from __future__ import annotations

import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from k3_core.cli import choices, output, probe
from k3_core.errors import ConfigError, UnsupportedError

bench = typer.Typer(no_args_is_help=True, help="Benchmarks: a running server, or operators on this machine.")

_KEPT = (
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "median_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "p99_itl_ms",
)  # fmt: skip


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Served model name; default: what the server says.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder with the tokenizer; default: the served model.")] = None,
    tokenizer_mode: Annotated[str, typer.Option(help="How it is read; kimi_k3 runs no remote code.")] = "kimi_k3",
    prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 64,
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight; several, as in 1,4,16, are measured in turn.")
    ] = "8",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each random prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each reply; the end token is ignored.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where to write a plot over concurrency (needs matplotlib).")
    ] = None,
    as_json: output.AsJson = False,
) -> None:
    """Measure a running server with `vllm bench serve`: throughput and latencies of random prompts."""
    _check_targets(out, plot)
    command = [
        *_vllm(), "bench", "serve", "--backend", "openai", "--base-url", url, "--dataset-name", "random",
        "--random-input-len", str(input_len), "--random-output-len", str(output_len), "--num-prompts", str(prompts),
        "--seed", str(seed), "--ignore-eos",
    ]  # fmt: skip
    command += ["--model", model] if model else []
    command += ["--tokenizer", tokenizer] if tokenizer else []
    command += ["--tokenizer-mode", tokenizer_mode]
    counts = _counts("--concurrency", concurrency)
    _check_server(url)
    report = _header("serving", "k3 bench serve") | {
        "url": url, "settings": {"prompts": prompts, "concurrency": counts, "input_len": input_len,
                                 "output_len": output_len, "seed": seed},
    }  # fmt: skip

    def measure() -> Iterator[dict[str, Any]]:
        for count in counts:
            try:
                row = _measure([*command, "--max-concurrency", str(count)])
            except UnsupportedError as error:
                raise UnsupportedError(f"with {count} requests in flight {error}") from None
            yield {"concurrency": count, **row}

    _keep(report, measure(), out, plot, _plot_serving, as_json)


def _counts(option: str, text: str) -> list[int]:
    """Positive numbers separated by commas."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ConfigError(f"{option} {text}: expected positive numbers separated by commas, such as 1,4,16")
    return counts


def _measure(command: list[str]) -> dict[str, Any]:
    """The figures we keep of one run of vLLM's benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        done = _run(command)
        result = Path(folder) / "result.json"
        if done.returncode or not result.is_file():
            tail = "\n".join(done.stdout.splitlines()[-15:])
            raise UnsupportedError(f"`vllm bench serve` failed ({done.returncode}); the end of its output:\n{tail}")
        measured = json.loads(result.read_text())
    return {key: measured[key] for key in _KEPT if key in measured}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _vllm() -> list[str]:
    """vLLM's command line: beside this python, or on the path."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise UnsupportedError(
            "k3 bench serve drives `vllm bench serve`, and no vllm command is here: run it where vLLM is installed "
            "(the server may be elsewhere, see --url)"
        )
    return [found]


@bench.command()
def ops(
    rows: Annotated[str, typer.Option(help="Comma-separated token counts.")] = "1,16,128",
    only: Annotated[str | None, typer.Option(help="Comma-separated operators; default: attn_res, route, situ.")] = None,
    hidden: Annotated[int, typer.Option(min=32, help="Hidden size (release: 7168).")] = 7168,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time spent on each row.")] = 0.2,
    implementation: Annotated[str, typer.Option(help="reference, nvidia, amd or ascend.")] = "reference",
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to write a plot (SVG or PNG; needs matplotlib).")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Time row-wise operators on this machine's device; the vendor's own benchmarks go deeper.

    Medians of repeated calls with warm caches, synchronised; each row names the implementation that ran.
    """
    _check_targets(out, plot)
    published, _ = choices.registries()
    if implementation not in published:
        raise UnsupportedError(f"--implementation {implementation}: installed are {', '.join(published)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    wanted = only.split(",") if only else list(_CALLS)
    unknown = [name for name in wanted if name not in _CALLS]
    if unknown:
        raise UnsupportedError(f"--only {','.join(unknown)}: this command times {', '.join(_CALLS)}")
    counts = _counts("--rows", rows)

    def measure() -> Iterator[dict[str, Any]]:
        for name in wanted:
            chosen = next(iter(published[implementation].implementations(name)), None)
            if chosen is None:
                raise UnsupportedError(f"{implementation} has no implementation of {name}")
            for count in counts:
                try:
                    call = _CALLS[name](chosen, count, hidden, device, dtype)
                except (RuntimeError, ValueError, TypeError, MemoryError) as error:  # torch's words for too large
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    raise UnsupportedError(
                        f"--rows {count}: {name}'s arguments do not fit in memory ({reason})"
                    ) from None
                micros, calls = _time(call, seconds, device)
                yield {"operator": name, "implementation": chosen.name, "tokens": count, "dtype": str(dtype),
                       "median_us": micros, "calls": calls}  # fmt: skip

    _keep(_header("operators", "k3 bench ops"), measure(), out, plot, _plot, as_json)


def _attn_res(op: Any, tokens: int, hidden: int, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    prefix, delta = torch.randn(2, tokens, hidden, device=device, dtype=dtype)
    bank = torch.randn(tokens, 8, hidden, device=device, dtype=dtype)
    weights = torch.randn(2, hidden, device=device, dtype=dtype)
    return lambda: op(prefix, delta, bank, weights[0], weights[1], 1e-5, 4)


def _route(op: Any, tokens: int, hidden: int, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    logits = torch.randn(tokens, 896, device=device)
    bias = torch.zeros(896, device=device)
    groups = dict(num_expert_group=1, topk_group=1)
    return lambda: op(logits, bias, 16, renormalize=True, routed_scaling_factor=1.0, **groups)


def _situ(op: Any, tokens: int, hidden: int, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    x = torch.randn(tokens, 2 * 3072, device=device, dtype=dtype)
    return lambda: op(x, 4.0, 25.0)


_CALLS: dict[str, Callable[..., Callable[[], Any]]] = {"attn_res": _attn_res, "route": _route, "situ": _situ}


def _time(call: Callable[[], Any], seconds: float, device: str) -> tuple[float, int]:
    """Median microseconds of one call, and how many calls were timed."""

    def once() -> float:
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once(), once()  # compile, allocate
    times = [once()]
    while sum(times) < seconds:
        times.append(once())
    return statistics.median(times) * 1e6, len(times)


def _header(title: str, command: str) -> dict[str, Any]:
    machine = probe.accelerators()
    names = [d["name"] for d in machine["devices"]] or [f"CPU, {probe.system()['cores']} cores"]
    return {
        "title": title,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": ", ".join(sorted(set(names))),
        "versions": {k: v for k, v in probe.versions((*probe.WHEELS, *probe.LIBRARIES)).items() if v},
    }


def _check_targets(out: Path | None, plot: Path | None) -> None:
    """Refuse before measuring what would lose the measurement: nowhere to write it, no way to plot it."""
    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            what = "is a folder" if path.is_dir() else f"needs the folder {path.parent}, which does not exist"
            raise ConfigError(f"{option} {path}: {what}; name a file in an existing folder")
        if path is not None:
            _check_writable(option, path)
    if plot is not None:
        _pyplot()
        from matplotlib.backend_bases import FigureCanvasBase

        known = FigureCanvasBase.get_supported_filetypes()
        if plot.suffix.lstrip(".").lower() not in known:
            raise ConfigError(f"--plot {plot}: the file's ending must be one of {', '.join(sorted(known))}")


def _check_writable(option: str, path: Path) -> None:
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror or error})") from None
    if not existed:
        path.unlink()


def _check_server(url: str) -> None:
    """Refuse an address at which no server of the OpenAI API answers, before a benchmark is started for it."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=10) as answer:
            answer.read(1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UnsupportedError(
            f"--url {url}: no server answers at {url}/v1/models ({reason}); start one there"
        ) from None


def _keep(
    report: dict[str, Any],
    measured: Iterable[dict[str, Any]],
    out: Path | None,
    plot: Path | None,
    draw: Callable[[list[dict[str, Any]], Path], None],
    as_json: bool,
) -> None:
    """Deliver ``report`` with the rows of ``measured``. ``out`` holds every row as soon as it is there.

    Where a row fails, those before it are delivered all the same, with the reason as "failed", and its error follows.
    """
    rows: list[dict[str, Any]] = []
    report["rows"] = rows
    failure: Exception | None = None
    try:
        for row in measured:
            rows.append(row)
            if out is not None:
                out.write_text(json.dumps(report, indent=1) + "\n")
    except Exception as error:
        if not rows:
            raise
        failure = error
        report["failed"] = str(error)
    if plot is not None:
        draw(rows, plot)
    _deliver(report, out, as_json)
    if failure is not None:
        raise failure


def _deliver(report: dict[str, Any], out: Path | None, as_json: bool) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        output.emit(report)
        return
    rows = report["rows"]
    headers = list(rows[0])
    cells = [[f"{row[h]:.1f}" if isinstance(row[h], float) else row[h] for h in headers] for row in rows]
    if len(rows) == 1:
        output.table(report["title"], ("figure", "value"), zip(headers, cells[0], strict=True), right=("value",))
    else:
        output.table(report["title"], headers, cells, right=("tokens", "median_us", "calls"))
    if out is not None:
        output.say(f"wrote {out}")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UnsupportedError("--plot needs matplotlib; install it or leave --plot out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _plot_serving(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput and median latencies over the number of requests in flight."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4))
    names = {"output_throughput": "tokens/s", "median_ttft_ms": "first token, ms", "median_tpot_ms": "next tokens, ms"}
    for axes, (key, label) in zip(panels, names.items(), strict=True):
        known = [(row["concurrency"], row[key]) for row in rows if key in row]
        axes.plot(*zip(*known, strict=True), marker="o") if known else None
        axes.set(xlabel="requests in flight", ylabel=label, ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots()
    for name in dict.fromkeys(row["operator"] for row in rows):
        mine = [row for row in rows if row["operator"] == name]
        axes.plot([r["tokens"] for r in mine], [r["median_us"] for r in mine], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="median time of a call, us")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
