"""Milliseconds of the engine's steps: this wheel's model, or vLLM's own in processes of its own, by the same code.

    python packages/k3-nvidia/benchmarks/bench_engine.py [--shape tp8] [--impl upstream] [--experts marlin]

8 layers (6 KDA, 2 MLA; 1 dense, 7 MoE) in the shapes of one rank of TP16 or TP8 with random weights, made on the
device, with CUDA graphs, in an engine as ``vllm serve`` runs it (a process of its own, asynchronous scheduling): a
decoding step for several batch sizes and a prompt of several lengths. ``ms`` is the wall clock a user sees, scheduling
and output processing included: the median time between consecutive tokens of a whole batch, or a whole request of a
prompt; ``device_ms`` is the time the device worked, the median step of a trace of another run of the same batch or the
median of three traced prompts (``engine_steps``; waits for the host are left out). What cannot be told is refused: the
row has ``ms_refused`` or ``device_refused`` with the reason, and the exit status is 1. vLLM's experts are what it
chooses on this device (Humming on Hopper), or with ``--experts marlin`` Marlin: the rival of a row is the faster.
``--share-latent`` measures prompts only, whose long batches compute this rank's share of the latent's projections as
either side does with several ranks (``engine_worker.share_latent``); its lines have ``latent``, saying so.
Alternate the processes, or start them together with ``--turns`` and let them take turns.
``--startup`` starts an engine twice in a process of its own, measures nothing else and takes from its log what it
needed after its weights ("init engine ... took": memory profile, warm-up, graphs), the parts that are named there, and
the log's longest silences: first with empty caches (a home of its own), then with those that the first start filled.
Appends JSON lines to engine.jsonl in $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

# Before gpu_smoke, which keeps the engine in this process: here it runs as it is installed.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions of engine_worker are sent to it

import engine_steps
import engine_timeline
import engine_worker
import gpu_smoke
import torch
from engine_turns import Turns
from gpu_smoke import layer_lists, prompts, say, start

from k3_core.checkpoint import tiny_config, write_tiny


def rank_config(tp: int = 16, layers: int = 8, experts: int = 896) -> Any:
    """One rank of the release under tensor parallelism: heads, widths and vocabulary divided, text only."""
    from k3_core.config import load_config

    text = dict(tiny_config("k3").to_dict()["text_config"])
    text |= {
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 163840 // tp,
        "hidden_size": 7168,
        "num_hidden_layers": layers,
        "num_attention_heads": 96 // tp,
        "num_key_value_heads": 96 // tp,
        "intermediate_size": 33792 // tp,
        "moe_intermediate_size": 3072 // tp,
        "routed_expert_hidden_size": 3584,
        "num_experts": experts,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attn_res_block_size": 12,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    text["linear_attn_config"] = {
        "num_heads": 96 // tp,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    } | layer_lists(layers)
    return load_config(text)


BATCHES, LENGTHS = (1, 8, 32, 128), (1024, 8192, 32768)
VOCABULARY = 512  # of the prompts; every shape has as many
#: Of each request of a decoding run, timed or traced: a batch of 128 may need tens of steps until its last has come.
TOKENS = 64
REFUSALS = ("ms_refused", "device_refused")
#: What a line of ``--share-latent`` says under ``latent``.
SHARED_LATENT = "shared over {} ranks, collectives left out"


class Arrivals:
    """Notes while it is entered when outputs of the engine reach this process, and of which requests: what a user sees.

    ``runs``: for each time it was entered [(seconds, request -> its new tokens)]. The engine's own process sends what
    a step made when it is done; the next is taken up once the last was processed here.
    """

    def __init__(self, llm: Any) -> None:
        self.core = llm.llm_engine.engine_core
        self.runs: list[list[tuple[float, dict[str, int]]]] = []

    def __enter__(self) -> None:
        get, run = self.core.get_output, []

        def noted() -> Any:
            found = get()
            run.append((time.perf_counter(), {o.request_id: len(o.new_token_ids) for o in found.outputs}))
            return found

        self.core.get_output = noted  # on the object: the class's own is back once this is gone
        self.runs.append(run)

    def __exit__(self, *_: object) -> None:
        del self.core.get_output


def decode_ms(llm: Any, batch: int, context: int, traced: bool, keep: str) -> dict[str, Any]:
    """Milliseconds of a decoding step of a whole batch, by ``engine_steps``; traced: the device's, of another run."""
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": p} for p in prompts((context,) * batch, seed=batch, vocabulary=VOCABULARY)]

    def generate(count: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        llm.generate(requests, sampling, use_tqdm=False)

    generate(8)
    arrivals = Arrivals(llm)
    for _ in range(3):
        with arrivals:
            generate(TOKENS)
    result = engine_steps.step_ms(arrivals.runs, batch, TOKENS)
    if traced:
        result |= _traced(llm, lambda: generate(TOKENS), TOKENS, keep and f"{keep}_decode_{batch}")
    return result


def _traced(llm: Any, call: Callable[[], Any], tokens: int | None, keep: str) -> dict[str, Any]:
    """What the trace of one call says (``engine_worker.stop_profile``)."""
    llm.collective_rpc(engine_worker.start_profile)
    call()
    found: dict[str, Any] = llm.collective_rpc(engine_worker.stop_profile, args=(tokens, keep and f"{keep}.json.gz"))[0]
    return found


def prefill_ms(llm: Any, length: int, repeats: int, traced: bool, keep: str) -> dict[str, Any]:
    """Median milliseconds of a request of ``length`` prompt tokens and one generated; traced: the device's, too, of
    three more of them, each in a trace of its own (``engine_steps.median_request``)."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def request(seed: int) -> float:
        prompt = prompts((length,), seed=seed, vocabulary=VOCABULARY)[0]
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return 1e3 * (time.perf_counter() - began)

    times = [request(100 + repeat) for repeat in range(repeats + 2)]
    result: dict[str, Any] = {"ms": round(statistics.median(times[2:]), 2)}
    if traced:
        traces = [
            _traced(llm, lambda s=97 + n: request(s), None, keep and f"{keep}_prefill_{length}_{n}") for n in range(3)
        ]
        result |= engine_steps.median_request(traces)
    return result


def rank(work: Path, options: argparse.Namespace, experts: str) -> None:
    """Times of the rank-shaped model, ours or (in processes of its own) vLLM's; with only_start none but its start."""
    impl, shape = options.impl, options.shape
    folder = work / "rank"
    folder.mkdir(parents=True, exist_ok=True)
    small = shape == "tiny"
    config = (tiny_config("linear") if small else rank_config(int(shape[2:]))).to_dict()
    who: dict[str, Any] = {"part": "rank", "shape": shape, "impl": impl, "experts": experts}
    if options.share_latent:
        who["latent"] = SHARED_LATENT.format(shape[2:])
    settings: dict[str, Any] = {}
    if impl == "upstream":
        # What vLLM makes of the release's quantisation: only the routed experts are MXFP4.
        config["quantization_config"] = {"quant_method": "mxfp4"}
        if experts == "marlin":
            settings["moe_backend"] = "marlin"
    if small:
        folder = write_tiny(work / "tiny", "linear", seed=3)
    else:
        (folder / "config.json").write_text(json.dumps(config))
    began = time.monotonic()
    llm = start(
        folder,
        load_format="auto" if small else "dummy",
        skip_tokenizer_init=True,
        max_model_len=1024 if small else 40960,
        max_num_seqs=8 if small else 128,
        max_num_batched_tokens=256 if small else 8192,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.05,  # engines that wait for their turn hold memory: the cache has a fixed size
        kv_cache_memory_bytes=(1 if small else 12) << 30,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
        **settings,
    )
    say(**who, start_s=round(time.monotonic() - began, 1))
    if options.only_start:
        return
    llm.collective_rpc(engine_worker.randomise)
    if options.share_latent:
        llm.collective_rpc(engine_worker.share_latent, args=(int(shape[2:]),))
    llm.collective_rpc(engine_worker.watch)
    say(**who, **llm.collective_rpc(engine_worker.facts)[0])
    measure(llm, who, options)
    del llm


def measure(llm: Any, who: dict[str, Any], options: argparse.Namespace) -> None:
    """Say every row, in the turns of this engine. Raises RuntimeError at the end where a figure was refused."""
    small, cases, refused = options.shape == "tiny", {}, []
    batches = () if "latent" in who else BATCHES[:2] if small else BATCHES
    for number in options.turns.rounds(options.rounds):
        traced = number == 0 and torch.cuda.is_available()
        keep = str(options.traces / engine_steps.trace_name(who)) if traced and options.traces else ""
        for batch in batches:
            found = decode_ms(llm, batch, 128, traced, keep)
            if timeline := found.pop("timeline", None):
                cases[f"decode {batch}"] = timeline
            say(**who, round=number, decode_batch=batch, **found)
            refused += [f"decode {batch}: {found[key]}" for key in REFUSALS if key in found]
        for length in LENGTHS if not small else (300,):
            found = prefill_ms(llm, length, 5 if length < 16384 else 3, traced, keep)
            if (timeline := found.pop("timeline", None)) and length in engine_steps.TIMELINE_PROMPTS:
                cases[f"prefill {length}"] = timeline
            say(**who, round=number, prefill=length, **found)
            refused += [f"prefill {length}: {found[key]}" for key in REFUSALS if key in found]
        if traced:
            say(**engine_timeline.line({k: v for k, v in who.items() if k != "part"}, cases))
    say(**who, compiled_while_serving=llm.collective_rpc(engine_worker.compiled)[0])
    if refused:
        raise RuntimeError("no figure of " + "; ".join(refused))


#: What the log says of a start: seconds, and our warm-up's parts in words.
SAID: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "load_s": (re.compile(r"Model loading took .* ([0-9.]+) seconds"), float),
    "init_s": (re.compile(r"init engine \(.*\) took ([0-9.]+) s"), float),
    "compile_s": (re.compile(r"init engine .*\(compilation: ([0-9.]+) s"), float),
    "capture_s": (re.compile(r"Graph capturing finished in ([0-9.]+) secs"), float),
    "warmup_s": (re.compile(r"Kimi K3: kernels compiled or loaded in ([0-9.]+) s"), float),
    "warmup": (re.compile(r"Kimi K3: kernels compiled or loaded in [0-9.]+ s \((.*)\)"), str),
}
#: Folders of caches that a variable may have put elsewhere than below the home.
CACHES = (
    "TRITON_CACHE_DIR", "K3_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH",
    "DG_JIT_CACHE_DIR", "XDG_CACHE_HOME",
)  # fmt: skip


def told(line: str) -> dict[str, Any]:
    """What one line of the log says of a start."""
    return {key: kind(match[1]) for key, (pattern, kind) in SAID.items() if (match := pattern.search(line))}


def waits(heard: list[tuple[float, str]], most: int = 12) -> list[list[Any]]:
    """Where a start spent its time: the longest silences of its log, in their order, with the line that ended each.

    heard: (seconds, line). Gives [seconds, the line without what is before its file's name, at most 100 characters].
    """
    silences = [(now - before, number, line) for number, ((before, _), (now, line)) in enumerate(pairwise(heard))]
    longest = sorted(sorted(silences, reverse=True)[:most], key=itemgetter(1))
    return [[round(gap, 2), line.rstrip().split("] ", 1)[-1][:100]] for gap, _, line in longest if gap >= 0.05]


def own_caches(home: Path) -> dict[str, str]:
    """The environment of a process whose caches are below ``home``.

    FlashInfer's stay where they are: it builds with a compiler and sources that such a machine may not have.
    """
    here = os.path.expanduser("~")
    kept = {"PYTHONUSERBASE": f"{here}/.local", "FLASHINFER_WORKSPACE_BASE": here}
    moved = {name: str(home / name.lower()) for name in CACHES}
    return {**kept, **os.environ, **moved, "HOME": str(home), "PYTHONUNBUFFERED": "1"}


def startup(who: dict[str, str]) -> None:
    """Start the engine with empty and with filled caches and say what its log says of it."""
    experts = "k3-nvidia" if who["impl"] == "ours" else who["experts"]
    words = [word for key, value in who.items() for word in (f"--{key}", value)]
    with tempfile.TemporaryDirectory() as home:
        for caches in ("cold", "warm"):
            began = time.monotonic()
            command = [sys.executable, __file__, *words, "--only-start"]
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own_caches(Path(home))
            )
            found: dict[str, Any] = {}
            heard = [(began, "")]
            assert child.stdout is not None
            for line in child.stdout:
                print(line, end="", flush=True)
                heard.append((time.monotonic(), line))
                found |= told(line)
            if child.wait():
                raise RuntimeError(f"the engine ended with {child.returncode}")
            seconds = round(time.monotonic() - began, 1)
            found |= {"process_s": seconds, "waits": waits(heard)}
            say(part="startup", caches=caches, **{**who, "experts": experts}, **found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="tp16", choices=("tp16", "tp8", "tiny"), help="whose share of the model")
    parser.add_argument("--impl", default="ours", choices=("ours", "upstream"), help="whose model is timed")
    parser.add_argument("--experts", default="auto", choices=("auto", "marlin"), help="of the upstream model")
    parser.add_argument("--rounds", type=int, default=1, help="times that every row is measured")
    parser.add_argument("--turns", help="FOLDER:INDEX:COUNT, engines that share this GPU (engine_turns.py)")
    parser.add_argument("--traces", type=Path, help="keep the traces in this folder (engine_steps.py reads them)")
    parser.add_argument("--share-latent", action="store_true", help="prompts as one of several ranks multiplies them")
    parser.add_argument("--startup", action="store_true", help="only start it, with empty and with filled caches")
    parser.add_argument("--only-start", action="store_true", help="(internal) that process")
    options = parser.parse_args()
    if options.share_latent and (options.shape == "tiny" or options.startup):
        parser.error("--share-latent takes its ranks from --shape tp16 or tp8 and measures prompts, no start")
    if not torch.cuda.is_available() and options.shape != "tiny":
        raise SystemExit("bench_engine.py times a GPU; there is none (--shape tiny tries the script)")
    experts = "k3-nvidia"
    if options.impl == "upstream":
        os.environ["K3_IMPL"], experts = "upstream", options.experts
    gpu_smoke.LOG = "engine.jsonl"
    if options.startup:
        startup({"shape": options.shape, "impl": options.impl, "experts": options.experts})
        return 0
    if options.only_start:
        os.environ.pop("OUT", None)  # the parent writes the row
    gpu_smoke.prepare()
    if options.traces:
        options.traces = options.traces.resolve()
        options.traces.mkdir(parents=True, exist_ok=True)
    folder, index, count = options.turns.rsplit(":", 2) if options.turns else (tempfile.mkdtemp(), "0", "1")
    options.turns = Turns(Path(folder), int(index), int(count))
    try:
        return gpu_smoke.guarded({"rank": lambda work: rank(work, options, experts)}, ["rank"])
    finally:
        options.turns.close()


if __name__ == "__main__":
    sys.exit(main())
