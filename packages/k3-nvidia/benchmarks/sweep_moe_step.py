"""How a step is best laid out: ``python sweep_moe_step.py [--shape tp8] [--out DIR]``.

All layers of one rank's model (``bench_engine.rank_config``, random weights, vLLM's linear layers) one after the other,
with every kernel that a step has of them but the cores of attention, whose place a norm takes: so products stand behind
the kernels that a layer has before them, with weights that exceed the L2. Two choices are measured in it:

* how a layer of experts is laid over two streams. Every schedule of ``k3_nvidia.tuning.moe_step`` is checked against
  one stream on the same input, layer by layer, then all are timed with replays of their CUDA graphs alternating (long
  prompts eagerly, as vLLM runs them);
* with ``--hold`` instead: how many steps of its weight a product loads before its input is there (``hold`` of
  ``tuning/skinny.json``), one matrix size after the other, each under the schedules that stand to gain. Products are
  checked against those that hold nothing.

<out>/moe_step.json has microseconds a step by token count and schedule; <out>/tuning_moe_step.json is the table with
what won at this shape, to be copied over ``k3_nvidia/tuning/moe_step.json``; <out>/moe_step_<shape>.override is the
same for ``K3_MOE_STEP``. One stream stays where nothing gains GAIN or more. ``--adopt moe_step.json...`` puts what the
``--hold`` rows of some files held into the installed ``k3_nvidia/tuning/skinny.json``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import Results, relative_error, require, time_pair_cold, time_pair_graph
from skinny_case import points, save_table

from k3_nvidia import few_rows
from k3_nvidia.kernels.skinny_gemm import MAX_HOLD
from k3_nvidia.tuning import moe_step, skinny
from k3_nvidia.tuning.moe_step import Schedule

#: Measured in this order, those of the benchmark page first; vLLM captures graphs up to 512 by default.
TOKENS, LAST_GRAPH = (1, 8, 32, 128, 8192, 16, 2048, 64, 512, 4, 2, 256, 1024), 512
#: Up to here an eager step takes as long as the host needs to launch it (an engine's prompt of 1024 tokens: 21 ms and
#: more, 6 of them the device's; results/engine.jsonl, TP16), and a second stream is more to launch: one stream,
#: whatever a busy host's figures say.
HOST_BOUND = 2048
#: Rows of x whose products may hold weights, in this order; processes that compile what will be tried.
HELD_TOKENS, WORKERS = (1, 8, 32, 16, 4), 10
ONE = Schedule()
#: A schedule must be this much faster than one stream, and a product that holds more than one that holds less.
GAIN, HOLD_GAIN = 1.005, 1.001
#: Against one stream: the same launches in another order give the same bits; another product of the input rounds the
#: latent (2^-9 of a value, rms 2^-9 / sqrt 3 = 1.1e-3) and the gate and up rows anew, on both sides.
SAME, ROUNDED = 0.0, 4e-3
Size = tuple[int, int]


def schedules(tokens: int) -> list[Schedule]:
    """Those worth a look: beyond 512 tokens every kernel fills the device, and only the products differ."""
    found = [Schedule(*flags) for flags in product((False, True), repeat=4)]
    found = [how for how in found if not (how.shared and how.early)]
    return found if tokens <= LAST_GRAPH else [how for how in found if not (how.choice or how.early)]


def started(work: Path, shape: str) -> Any:
    """The text model of a started engine, its cores of attention replaced; no graphs, a small cache."""
    import bench_engine
    import engine_worker
    import gpu_smoke

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # bench_engine has set it for its own engines
    folder = work / "rank"
    folder.mkdir(parents=True)
    config = bench_engine.rank_config(int(shape[2:])).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    llm = gpu_smoke.start(
        folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=128,
        max_num_batched_tokens=8192, enable_prefix_caching=False, enforce_eager=True, gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip
    engine_worker.randomise(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker)
    model = gpu_smoke.model_of(llm).model
    leave_out_cores(model)
    return model


def leave_out_cores(model: Any) -> None:
    """Attention is its projections from now on."""
    for layer in model.layers:
        layer.self_attn.forward = functools.partial(without_core, layer.self_attn)


def without_core(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """Both projections of attention, a norm between them."""
    from k3_nvidia.kernels.glue import rms_norm

    width = attention.o_proj.weight.shape[1]
    projected = attention.in_proj(x)
    result: torch.Tensor = attention.o_proj(rms_norm(projected[:, :width], x.new_ones(width), 1e-6))
    return result


def experts_of(model: Any) -> list[Any]:
    """The layers of experts."""
    return [layer.feed_forward for layer in model.layers if layer.is_moe]


def under(moes: Sequence[Any], how: Schedule) -> None:
    """Every layer runs as ``how`` from now on."""
    for moe in moes:
        moe._schedules = ((1 << 30, how),)


def hooked(model: Any) -> list[Any]:
    """The hooks of every product that a table of few rows names."""
    found = (getattr(getattr(module, "quant_method", None), "apply", None) for module in model.modules())
    return [apply for apply in found if isinstance(apply, few_rows.FewRows)]


def device_name() -> str:
    """As the tables call it."""
    return torch.cuda.get_device_name()


Held = Mapping[Size, int]


def holding(model: Any, held: Held) -> None:
    """Every product holds so many steps from now on, none where its size is not named."""
    device, kernels = device_name(), few_rows._kernels()
    for apply in hooked(model):
        steps = dict.fromkeys(skinny.KINDS, held.get(apply.size, 0))
        found = skinny.choices(*apply.size, device, kernels)
        apply.products = few_rows.products([None if c is None else skinny.holding(c, steps) for c in found])


def step(model: Any, how: Schedule, held: Held | None, x: torch.Tensor) -> torch.Tensor:
    """All layers in a row, as they are set for this call: a graph keeps that. held: None as the engine set them, which
    costs the clock of an eager call nothing."""
    under(experts_of(model), how)
    if held is not None:
        holding(model, held)
    result: torch.Tensor = model(x.clone(), None)
    return result


def check(moes: Sequence[Any], how: Schedule, x: torch.Tensor) -> float:
    """Largest relative error of a layer against one stream on the same input; raises where it is beyond the bound."""
    worst = 0.0
    for moe in moes:
        under([moe], ONE)
        want = moe(x)
        under([moe], how)
        for _ in range(3):  # a missing wait need not show the first time
            worst = max(worst, relative_error(moe(x), want))
    require(worst <= (ROUNDED if how.split else SAME), f"{how.name}: {worst:.2e} from one stream")
    return worst


def inputs(model: Any, tokens: int) -> torch.Tensor:
    """Random hidden states [T, H] where the model is."""
    gate = experts_of(model)[0].gate.weight
    generator = torch.Generator(gate.device).manual_seed(tokens)
    return torch.randn(tokens, gate.shape[1], generator=generator, device=gate.device).bfloat16()


def measure(model: Any, tokens: int) -> dict[str, Any]:
    """Microseconds a step by schedule, and errors by schedule."""
    moes, x = experts_of(model), inputs(model, tokens)
    row: dict[str, Any] = {"tokens": tokens, "errors": {}}
    good: dict[str, Schedule] = {}
    for how in schedules(tokens):
        try:
            row["errors"][how.name] = check(moes, how, x)
            good[how.name] = how
        except Exception as error:
            row[f"{how.name} failed"] = f"{type(error).__name__}: {error}"[:300]
    calls = [lambda how=how: step(model, how, None, x) for how in good.values()]
    graphs = tokens <= LAST_GRAPH
    times = time_pair_graph([[call] for call in calls], iters=60) if graphs else time_pair_cold(calls, iters=10)
    return row | {"us": dict(zip(good, times, strict=True)), "graphs": graphs}


# ------------------------------------------------------------------------------------------- weights that are held


def measure_held(model: Any, tokens: int) -> dict[str, Any]:
    """{schedule: {"us": a step, "without": nothing held, "held": {NxK: steps}}} of the ``contenders``."""
    moes, x = experts_of(model), inputs(model, tokens)
    found = {how.name: hold(model, how, x) for how in contenders(moes[0].width, tokens)}
    return {"tokens": tokens, "held": found}


def contenders(width: int, tokens: int) -> list[Schedule]:
    """The schedule of the table in use, and the one that puts the up projection behind the routed experts."""
    used = moe_step.choose(moe_step.schedules(device_name(), width), tokens)
    return list(dict.fromkeys([used, Schedule(choice=True, early=True)]))


def hold(model: Any, how: Schedule, x: torch.Tensor) -> dict[str, Any]:
    """What to hold under a schedule, the largest matrices first. A size whose values change when it holds something
    holds nothing and is named under ``wrong``."""
    chosen: dict[Size, int] = {}
    wrong: dict[str, str] = {}
    for size in holders(model, x.shape[0]):
        try:
            check_held(model, size, x)
        except Exception as error:
            wrong[f"{size[0]}x{size[1]}"] = f"{type(error).__name__}: {error}"[:300]
            continue
        options = [chosen, *({**chosen, size: steps} for steps in range(1, MAX_HOLD + 1))]
        times = time_options(model, how, x, options, 40)
        fastest = min(range(len(times)), key=lambda i: times[i])
        if times[fastest] * HOLD_GAIN <= times[0]:
            chosen = options[fastest]
    without, us = time_options(model, how, x, [{}, chosen], 60)
    return {"us": us, "without": without, "held": {f"{n}x{k}": h for (n, k), h in chosen.items()}, "wrong": wrong}


def check_held(model: Any, size: Size, x: torch.Tensor) -> None:
    """The products of a size give the same bits whatever they hold, but for the order of fp32 sums."""
    apply = next(apply for apply in hooked(model) if apply.size == size)
    layer = next(m for m in model.modules() if getattr(getattr(m, "quant_method", None), "apply", None) is apply)
    generator = torch.Generator(x.device).manual_seed(size[0])
    inner = torch.randn(x.shape[0], size[1], generator=generator, device=x.device).bfloat16()
    holding(model, {})
    want = apply(layer, inner)
    for steps in range(1, MAX_HOLD + 1):
        holding(model, {size: steps})
        error = max(relative_error(apply(layer, inner), want) for _ in range(3))
        require(error <= ROUNDED, f"{steps} steps held: {error:.2e} from none")


def holders(model: Any, rows: int) -> list[Size]:
    """Sizes whose product of so many rows can load its weight early, the largest first."""
    device, kernels = device_name(), few_rows._kernels()
    named = {apply.size: skinny.choices(*apply.size, device, kernels)[rows] for apply in hooked(model)}
    found = [size for size, choice in named.items() if choice is not None and dict(choice.config).get("pdl")]
    return sorted(found, key=lambda size: -size[0] * size[1])


def time_options(model: Any, how: Schedule, x: torch.Tensor, options: Sequence[Held], iters: int) -> list[float]:
    """Microseconds a step of each, replays alternating."""
    return time_pair_graph([[lambda held=held: step(model, how, held, x)] for held in options], iters=iters)


def compile_worker(index: int, count: int, shape: str) -> None:
    """Run every count-th variant that ``hold`` tries once, so that its binary is in the disk cache."""
    jobs = []
    for (n, k), names in points().items():
        if any(name.startswith(shape) for name in names):
            for rows in HELD_TOKENS:
                choice = skinny.choices(n, k, device_name(), frozenset({"triton"}))[rows]
                jobs += [] if choice is None else [(n, k, rows, choice, steps) for steps in range(MAX_HOLD + 1)]
    for n, k, rows, choice, steps in jobs[index::count]:
        product = few_rows._product(skinny.holding(choice, dict.fromkeys(skinny.KINDS, steps)))
        x, w = (torch.zeros(r, k, dtype=torch.bfloat16, device="cuda") for r in (rows, n))
        product(x, w)
        if n == 7168:
            product(x, w, x.new_zeros(rows, n))


def winner(us: Mapping[str, float], usual: str = ONE.name) -> str:
    """The fastest schedule; the usual one unless another is faster than that by GAIN."""
    best = min(us, key=lambda name: us[name])
    return usual if us.get(usual, float("inf")) < us[best] * GAIN else best


def entries(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{up_to, schedule}] of rows by token count: neighbours that agree are one entry, the last is left open by ending
    at the largest count that was measured; counts in between take the next measured one's. A schedule is kept from one
    count to the next where no other is faster by GAIN: each change is more for the warm-up to meet."""
    found: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: row["tokens"]):
        us = row["us"]
        name = ONE.name
        if not LAST_GRAPH < row["tokens"] <= HOST_BOUND and winner(us) != ONE.name:
            name = winner(us, found[-1]["schedule"] if found else ONE.name)
        if found and found[-1]["schedule"] == name:
            found[-1]["up_to"] = row["tokens"]
        else:
            found.append({"up_to": row["tokens"], "schedule": name})
    while found and found[-1]["schedule"] == ONE.name:
        found.pop()
    return found


def table_of(rows: Sequence[Mapping[str, Any]], width: int, device: str, versions: str) -> dict[str, Any]:
    """moe_step.json with the entries of this width; those of other widths and devices stay."""
    data = json.loads(json.dumps(moe_step.table()))
    entry = data["devices"].setdefault(device, {"measured": "", "widths": []})
    entry["measured"] = f"{time.strftime('%Y-%m-%d', time.gmtime())}, {versions}, sweep_moe_step.py"
    others = [w for w in entry["widths"] if w["max_width"] != width]
    entry["widths"] = sorted([*others, {"max_width": width, "rows": entries(rows)}], key=lambda w: w["max_width"])
    return data


def override_of(found: Sequence[Mapping[str, Any]]) -> str:
    """The entries as ``K3_MOE_STEP`` takes them: an engine can be timed with them before the table is shipped."""
    return ",".join(f"{entry['up_to']}:{entry['schedule']}" for entry in found)


def with_held(data: dict[str, Any], device: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """skinny.json with what the fastest schedules held, by rows of x and matrix; rows in between take the next larger
    count's, other rows stay."""
    table = json.loads(json.dumps(data))
    best = {row["tokens"]: min(row["held"].values(), key=lambda found: found["us"])["held"] for row in rows}
    sizes = {size for row in rows for found in row["held"].values() for size in found["held"]}
    for entry in table["devices"][device]["rows"]:
        size = f"{entry['n']}x{entry['k']}"
        measured = min((tokens for tokens in best if tokens >= entry["m"]), default=None)
        if size in sizes and measured is not None:
            entry.pop("hold", None)
            entry |= {"hold": best[measured][size]} if size in best[measured] else {}
    return table


def adopt(files: Sequence[Path]) -> None:
    """Write what the rows of some moe_step.json held into the installed ``tuning/skinny.json``."""
    path = Path(skinny.__file__).with_suffix(".json")
    table = json.loads(path.read_text())
    for file in files:
        page = json.loads(file.read_text())
        shapes: dict[str, list[dict[str, Any]]] = {}
        for key, row in page["rows"].items():
            if "held" in row:
                shapes.setdefault(key.split()[0], []).append(row)
        for rows in shapes.values():
            table = with_held(table, page["environment"]["device"], rows)
    save_table(table, path)


def run(out: Path, shape: str, seconds: float, held: bool = False) -> None:
    """Rows ``<shape> T<tokens>``, as many as begin within ``seconds``; then the table. held: rows ``<shape> T<tokens>
    held`` of what is held, no table."""
    began = time.monotonic()
    results = Results(out / "moe_step.json")
    command = [sys.executable, __file__, "--shape", shape, "--worker"]
    workers = [subprocess.Popen([*command, str(i), str(WORKERS)]) for i in range(WORKERS if held else 0)]
    with tempfile.TemporaryDirectory() as work:
        model = started(Path(work), shape)
    for worker in workers:
        worker.wait()
    print(f"{len(model.layers)} layers after {time.monotonic() - began:.0f} s", flush=True)
    with torch.no_grad():
        for tokens in HELD_TOKENS if held else TOKENS:
            if time.monotonic() - began > seconds:
                print(f"time is up before {tokens} tokens", flush=True)
                break
            measured = measure_held if held else measure
            key = f"{shape} T{tokens}" + " held" * held
            row = results.row(key, lambda tokens=tokens, how=measured: how(model, tokens))
            print(f"{time.monotonic() - began:.0f} s", json.dumps(row), flush=True)
    if held:
        return
    rows = [row for key, row in results.rows.items() if key.startswith(f"{shape} ") and row.get("us")]
    versions = f"torch {torch.__version__}, triton {results.record['triton']}, vllm {results.record['vllm']}"
    table = table_of(rows, experts_of(model)[0].width, results.record["device"], versions)
    (out / "tuning_moe_step.json").write_text(json.dumps(table, indent=2) + "\n")
    (out / f"moe_step_{shape}.override").write_text(override_of(entries(rows)) + "\n")
    print(json.dumps(entries(rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="tp16", choices=("tp16", "tp8"), help="whose share of the model")
    default = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--seconds", type=float, default=240.0, help="no row begins later")
    parser.add_argument("--hold", action="store_true", help="measure what products hold instead")
    parser.add_argument("--worker", type=int, nargs=2, help="(internal) compile a part")
    parser.add_argument("--adopt", type=Path, nargs="+", help="only write what these files' rows held into the table")
    options = parser.parse_args()
    if options.adopt:
        adopt(options.adopt)
        return
    if not torch.cuda.is_available():
        raise SystemExit("sweep_moe_step.py times a GPU; there is none")
    if options.worker:
        compile_worker(*options.worker, options.shape)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    run(options.out, options.shape, options.seconds, options.hold)


if __name__ == "__main__":
    main()
