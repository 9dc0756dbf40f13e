"""How a layer of experts is best laid over two streams: ``python sweep_moe_step.py [--shape tp8] [--out DIR]``.

The seven layers of experts of one rank's model (``bench_engine.rank_config``, random weights, vLLM's linear layers),
each behind a norm, one after the other: what a step runs of them, with weights that exceed the L2. Every schedule of
``k3_nvidia.tuning.moe_step`` is checked against one stream on the same input, layer by layer, then all are timed with
replays of their CUDA graphs alternating (long prompts eagerly, as vLLM runs them).

<out>/moe_step.json has microseconds a layer by token count and schedule; <out>/tuning_moe_step.json is the table with
what won at this shape, to be copied over ``k3_nvidia/tuning/moe_step.json``; <out>/moe_step_<shape>.override is the
same for ``K3_MOE_STEP``. One stream stays where nothing gains GAIN or more.
"""

from __future__ import annotations

import argparse
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

from k3_nvidia.tuning import moe_step
from k3_nvidia.tuning.moe_step import Schedule

GRAPH_TOKENS, EAGER_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1024, 2048, 8192)
ONE = Schedule()
#: A schedule must be this much faster than one stream to be taken.
GAIN = 1.01
#: Against one stream: the same launches in another order give the same bits; another product of the input rounds the
#: latent (2^-9 of a value, rms 2^-9 / sqrt 3 = 1.1e-3) and the gate and up rows anew, on both sides.
SAME, ROUNDED = 0.0, 4e-3


def schedules(tokens: int) -> list[Schedule]:
    """Those worth a look: beyond 512 tokens every kernel fills the device, and only the products differ."""
    found = [Schedule(*flags) for flags in product((False, True), repeat=3)]
    return found if tokens <= GRAPH_TOKENS[-1] else [how for how in found if not how.choice]


def layers(work: Path, shape: str) -> list[Any]:
    """The layers of experts of a started engine; no graphs, a small cache."""
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
    model = gpu_smoke.model_of(llm)
    return [layer.feed_forward for layer in model.model.layers if layer.is_moe]


def under(moes: Sequence[Any], how: Schedule) -> None:
    """Every layer runs as ``how`` from now on."""
    for moe in moes:
        moe._schedules = ((1 << 30, how),)


def step(moes: Sequence[Any], how: Schedule, x: torch.Tensor) -> torch.Tensor:
    """All layers in a row, a norm before each."""
    from k3_nvidia.kernels.glue import rms_norm

    under(moes, how)
    weight = x.new_ones(x.shape[1])
    for moe in moes:
        x = moe(rms_norm(x, weight, 1e-6))
    return x


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


def measure(moes: Sequence[Any], tokens: int) -> dict[str, Any]:
    """Microseconds a layer by schedule, and errors by schedule."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, moes[0].text.hidden_size, generator=generator, device="cuda").bfloat16()
    row: dict[str, Any] = {"tokens": tokens, "errors": {}}
    good: dict[str, Schedule] = {}
    for how in schedules(tokens):
        try:
            row["errors"][how.name] = check(moes, how, x)
            good[how.name] = how
        except Exception as error:
            row[f"{how.name} failed"] = f"{type(error).__name__}: {error}"[:300]
    calls = [lambda how=how: step(moes, how, x) for how in good.values()]
    graphs = tokens <= GRAPH_TOKENS[-1]
    times = time_pair_graph([[call] for call in calls], iters=60) if graphs else time_pair_cold(calls, iters=10)
    return row | {"us": {name: t / len(moes) for name, t in zip(good, times, strict=True)}, "graphs": graphs}


def winner(us: Mapping[str, float]) -> str:
    """The fastest schedule, one stream unless another is faster by GAIN."""
    best = min(us, key=lambda name: us[name])
    return best if us[best] * GAIN <= us[ONE.name] else ONE.name


def entries(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{up_to, schedule}] of rows by token count: neighbours that agree are one entry, the last is left open by ending
    at the largest count that was measured; counts in between take the next measured one's."""
    found: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: row["tokens"]):
        name = winner(row["us"])
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


def run(out: Path, shape: str, seconds: float) -> None:
    """Rows ``<shape> T<tokens>``, as many as begin within ``seconds``; then the table."""
    began = time.monotonic()
    results = Results(out / "moe_step.json")
    with tempfile.TemporaryDirectory() as work:
        moes = layers(Path(work), shape)
    print(f"{len(moes)} layers after {time.monotonic() - began:.0f} s", flush=True)
    with torch.no_grad():
        for tokens in (*GRAPH_TOKENS, *EAGER_TOKENS):
            if time.monotonic() - began > seconds:
                print(f"time is up before {tokens} tokens", flush=True)
                break
            row = results.row(f"{shape} T{tokens}", lambda tokens=tokens: measure(moes, tokens))
            print(json.dumps(row), flush=True)
    rows = [row for key, row in results.rows.items() if key.startswith(f"{shape} ") and row.get("us")]
    versions = f"torch {torch.__version__}, triton {results.record['triton']}, vllm {results.record['vllm']}"
    table = table_of(rows, moes[0].width, results.record["device"], versions)
    (out / "tuning_moe_step.json").write_text(json.dumps(table, indent=2) + "\n")
    (out / f"moe_step_{shape}.override").write_text(override_of(entries(rows)) + "\n")
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
