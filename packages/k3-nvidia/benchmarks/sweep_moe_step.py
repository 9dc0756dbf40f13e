"""How a step is best laid out: ``python sweep_moe_step.py [--shape tp8] [--out DIR]``.

All layers of one rank's model (``bench_engine.rank_config``, random weights, vLLM's linear layers) one after the other,
with every kernel that a step has of them but the cores of attention, whose place a norm takes: so products stand behind
the kernels that a layer has before them, with weights that exceed the L2. Two choices are measured in it:

* how a layer of experts is laid over two streams. Every schedule of ``k3_nvidia.tuning.moe_step`` is checked against
  one stream on the same input, layer by layer, then all are timed with replays of their CUDA graphs alternating (long
  prompts eagerly, as vLLM runs them);
* how much of its weight a product asks the L2 for before its input is there (``ahead_mb`` of ``tuning/skinny.json``),
  one matrix size after the other, each under the best schedules so far. It changes no value.

<out>/moe_step.json has microseconds a step by token count and schedule; <out>/tuning_moe_step.json is the table with
what won at this shape, to be copied over ``k3_nvidia/tuning/moe_step.json``; <out>/moe_step_<shape>.override is the
same for ``K3_MOE_STEP``. <out>/tuning_skinny.json is ``k3_nvidia/tuning/skinny.json`` with what is asked for ahead. One
stream stays where nothing gains GAIN or more.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the layers are asked for in this process

import torch
from harness import Results, relative_error, require, time_pair_cold, time_pair_graph
from skinny_case import save_table

from k3_nvidia import few_rows
from k3_nvidia.kernels.skinny_gemm import MAX_ROWS
from k3_nvidia.tuning import moe_step, skinny
from k3_nvidia.tuning.moe_step import Schedule

#: Measured in this order, those of the benchmark page first; vLLM captures graphs up to 512 by default.
TOKENS, LAST_GRAPH = (1, 8, 32, 128, 8192, 16, 2048, 64, 512, 4, 2, 256, 1024), 512
ONE = Schedule()
#: A schedule must be this much faster than one stream, and a size asked for ahead than a smaller one, to be taken.
GAIN, AHEAD_GAIN = 1.005, 1.002
#: Against one stream: the same launches in another order give the same bits; another product of the input rounds the
#: latent (2^-9 of a value, rms 2^-9 / sqrt 3 = 1.1e-3) and the gate and up rows anew, on both sides.
SAME, ROUNDED = 0.0, 4e-3
#: Megabytes tried: what memory brings in 1 to 9 us.
MEGABYTES = (4.0, 8.0, 16.0, 24.0, 36.0)
#: Schedules whose products are tried with weights asked for ahead: the best so far, and one stream.
FINALISTS = 3
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

    folder = work / "rank"
    folder.mkdir(parents=True)
    config = bench_engine.rank_config(int(shape[2:])).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    llm = gpu_smoke.start(
        folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=128,
        max_num_batched_tokens=8192, enable_prefix_caching=False, enforce_eager=True, gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip
    llm.collective_rpc(engine_worker.randomise)
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


def asking(model: Any, ahead: Mapping[Size, float]) -> None:
    """Every product asks for so many megabytes ahead from now on."""
    os.environ[skinny.VARIABLE] = ",".join(f"{n}x{k}:{megabytes}" for (n, k), megabytes in ahead.items())
    device, kernels = device_name(), few_rows._kernels()
    for apply in hooked(model):
        apply.products = few_rows.products(skinny.choices(*apply.size, device, kernels))


def step(model: Any, how: Schedule, ahead: Mapping[Size, float], x: torch.Tensor) -> torch.Tensor:
    """All layers in a row; ``ahead`` where it is set for this call is what is captured."""
    under(experts_of(model), how)
    asking(model, ahead)
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


def measure(model: Any, tokens: int) -> dict[str, Any]:
    """Microseconds a step by schedule, errors by schedule, and for few tokens what is gained by asking ahead."""
    moes = experts_of(model)
    device = moes[0].gate.weight.device
    generator = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, moes[0].text.hidden_size, generator=generator, device=device).bfloat16()
    row: dict[str, Any] = {"tokens": tokens, "errors": {}}
    good: dict[str, Schedule] = {}
    asking(model, {})
    for how in schedules(tokens):
        try:
            row["errors"][how.name] = check(moes, how, x)
            good[how.name] = how
        except Exception as error:
            row[f"{how.name} failed"] = f"{type(error).__name__}: {error}"[:300]
    calls = [lambda how=how: step(model, how, {}, x) for how in good.values()]
    graphs = tokens <= LAST_GRAPH
    times = time_pair_graph([[call] for call in calls], iters=60) if graphs else time_pair_cold(calls, iters=10)
    row |= {"us": dict(zip(good, times, strict=True)), "graphs": graphs}
    if tokens <= MAX_ROWS:
        first = sorted(row["us"], key=lambda name: row["us"][name])[:FINALISTS]
        row["ahead"] = {name: ask(model, good[name], x) for name in dict.fromkeys([*first, ONE.name]) if name in good}
    return row


def ask(model: Any, how: Schedule, x: torch.Tensor) -> dict[str, Any]:
    """What to ask for ahead under a schedule, the largest matrices first: {"us": a step, "without": nothing asked for,
    "mb": {NxK: megabytes}}."""
    chosen: dict[Size, float] = {}
    for size in askable(model, x.shape[0]):
        options = [chosen, *({**chosen, size: mb} for mb in MEGABYTES if mb < 4e-6 * size[0] * size[1])]
        times = time_options(model, how, x, options, 40)
        fastest = min(range(len(times)), key=lambda i: times[i])
        if times[fastest] * AHEAD_GAIN <= times[0]:
            chosen = options[fastest]
    without, us = time_options(model, how, x, [{}, chosen], 60)
    return {"us": us, "without": without, "mb": {f"{n}x{k}": mb for (n, k), mb in chosen.items()}}


def askable(model: Any, rows: int) -> list[Size]:
    """Sizes whose product of so many rows can ask for its weight ahead, the largest first."""
    device, kernels = device_name(), few_rows._kernels()
    sizes = {apply.size for apply in hooked(model)}
    named = {size: skinny.choices(*size, device, kernels)[rows] for size in sizes}
    found = [size for size, choice in named.items() if choice is not None and dict(choice.config).get("pdl")]
    return sorted(found, key=lambda size: -size[0] * size[1])


def time_options(
    model: Any, how: Schedule, x: torch.Tensor, options: Sequence[Mapping[Size, float]], iters: int
) -> list[float]:
    """Microseconds a step of each, replays alternating."""
    return time_pair_graph([[lambda ahead=ahead: step(model, how, ahead, x)] for ahead in options], iters=iters)


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds a step by schedule; where some were tried with weights asked for ahead, theirs."""
    ahead = row.get("ahead")
    return {name: found["us"] for name, found in ahead.items()} if ahead else dict(row["us"])


def winner(us: Mapping[str, float]) -> str:
    """The fastest schedule, one stream unless another is faster by GAIN."""
    best = min(us, key=lambda name: us[name])
    return best if us[best] * GAIN <= us[ONE.name] else ONE.name


def entries(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{up_to, schedule}] of rows by token count: neighbours that agree are one entry, the last is left open by ending
    at the largest count that was measured; counts in between take the next measured one's."""
    found: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: row["tokens"]):
        name = winner(figures(row))
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


def with_ahead(data: dict[str, Any], device: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """skinny.json with what the winning schedules asked for ahead, by rows of x and matrix; other rows stay."""
    table = json.loads(json.dumps(data))
    for row in rows:
        asked = row["ahead"][winner(figures(row))]["mb"] if row.get("ahead") else {}
        for entry in table["devices"][device]["rows"]:
            if entry["m"] == row["tokens"] and (mb := asked.get(f"{entry['n']}x{entry['k']}")):
                entry["ahead_mb"] = mb
    return table


def run(out: Path, shape: str, seconds: float) -> None:
    """Rows ``<shape> T<tokens>``, as many as begin within ``seconds``; then the tables."""
    began = time.monotonic()
    results = Results(out / "moe_step.json")
    with tempfile.TemporaryDirectory() as work:
        model = started(Path(work), shape)
    print(f"{len(model.layers)} layers after {time.monotonic() - began:.0f} s", flush=True)
    with torch.no_grad():
        for tokens in TOKENS:
            if time.monotonic() - began > seconds:
                print(f"time is up before {tokens} tokens", flush=True)
                break
            row = results.row(f"{shape} T{tokens}", lambda tokens=tokens: measure(model, tokens))
            print(f"{time.monotonic() - began:.0f} s", json.dumps(row), flush=True)
    os.environ.pop(skinny.VARIABLE, None)
    rows = [row for key, row in results.rows.items() if key.startswith(f"{shape} ") and row.get("us")]
    device = results.record["device"]
    versions = f"torch {torch.__version__}, triton {results.record['triton']}, vllm {results.record['vllm']}"
    table = table_of(rows, experts_of(model)[0].width, device, versions)
    (out / "tuning_moe_step.json").write_text(json.dumps(table, indent=2) + "\n")
    (out / f"moe_step_{shape}.override").write_text(override_of(entries(rows)) + "\n")
    save_table(with_ahead(skinny.table(), device, rows), out / "tuning_skinny.json")
    print(json.dumps(entries(rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="tp16", choices=("tp16", "tp8"), help="whose share of the model")
    default = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--seconds", type=float, default=240.0, help="no row begins later")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("sweep_moe_step.py times a GPU; there is none")
    options.out.mkdir(parents=True, exist_ok=True)
    run(options.out, options.shape, options.seconds)


if __name__ == "__main__":
    main()
