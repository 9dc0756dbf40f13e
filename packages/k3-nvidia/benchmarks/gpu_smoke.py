"""Does the whole model run in vLLM on this GPU, is it right, and how long does a step take? One script, JSON lines out.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python packages/k3-nvidia/benchmarks/gpu_smoke.py
        [--parts tiny,linear,rank] [--modes eager,graphs] [--impl upstream] [--shape tp8] [--experts marlin] [--profile]

tiny, linear: random checkpoints with kernel-sized heads are written, served by vLLM with this plugin (with CUDA
graphs, or eager) and compared with ``k3_core.reference`` on the same device. The measure: log probabilities of the
tokens that were generated, teacher-forced, against the reference in fp32; the reference in bf16 has the same distance
from it, so ours may have twice as much at the 90th percentile (beyond lie rows that chose another expert).

rank: 8 layers (6 KDA, 2 MLA; 1 dense, 7 MoE) in the shapes of one rank of TP16 or TP8 with random weights, made on the
device, with CUDA graphs: milliseconds of a decoding step for several batch sizes and of a prompt for several lengths.
``ms`` is the wall clock of the engine, scheduling and output processing of this one process included; ``model_ms`` is
what the device needs from the start of a step's model to its end (events around the runner's execution, medians).
vLLM's own model (``--impl upstream``; its experts by Humming, or ``--experts marlin``) is timed by the same code in a
process of its own; alternate the two.

Every part is guarded: a failure prints its traceback and the next part runs. Exit status 1 if any part failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

PROMPTS = (1, 5, 64, 65, 130, 300)
GENERATED = 8
TOP = 20
CAPTURE = [1, 2, 4, 8, 16]
GRAPHS = {"cudagraph_capture_sizes": CAPTURE}
LOG = "gpu_smoke.jsonl"


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)
    if os.environ.get("OUT"):
        with (Path(os.environ["OUT"]) / LOG).open("a") as log:
            log.write(json.dumps(values) + "\n")


# ---------------------------------------------------------------------------------------------------------- checkpoints


def layer_lists(count: int) -> dict[str, list[int]]:
    mla = sorted({*range(4, count + 1, 4), count})
    return {"full_attn_layers": mla, "kda_layers": [i for i in range(1, count + 1) if i not in mla]}


def tiny_text(preset: str, kernels: bool) -> dict[str, Any]:
    """Changes to a tiny preset that give heads the sizes of the real ones; without a GPU the preset stays as it is."""
    if not kernels:
        return {}
    linear: dict[str, Any] = {"head_dim": 128, "num_heads": 4, "short_conv_kernel_size": 4}
    if preset == "k3":
        linear |= {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    layers = 5 if preset == "k3" else 7
    return {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": linear | layer_lists(layers),
    }


def rank_config(tp: int = 16, layers: int = 8, experts: int = 896) -> Any:
    """One rank of the release under tensor parallelism: heads, widths and vocabulary divided, text only."""
    from k3_core.checkpoint import tiny_config
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


# -------------------------------------------------------------------------------------------------------------- engines

COMPILED: list[str] = []


def watch_compiler() -> None:
    """Note every kernel of this wheel that Triton compiles from now on."""
    from triton.runtime.jit import JITFunction

    honest = getattr(JITFunction, "_do_compile", None)
    if honest is None:
        COMPILED.append("this Triton has no _do_compile to watch")
        return

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        if name.startswith("k3_nvidia"):
            COMPILED.append(name)
        return honest(self, *args, **kwargs)

    JITFunction._do_compile = watched


def compiled_since() -> list[str]:
    """Kernels compiled since the last call."""
    names = sorted(COMPILED)
    COMPILED.clear()
    return names


def start(folder: Path, **options: Any) -> Any:
    from vllm import LLM

    from k3_nvidia import plugin

    plugin.register()
    if torch.cuda.is_available() and "gpu_memory_utilization" not in options:
        # A fixed cache: other checks may share the device, so free memory says nothing.
        options = {"kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.05} | options
    defaults: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 16, "seed": 0}
    return LLM(str(folder), **{**defaults, **options})


def stop(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def model_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.model


def prompts(lengths: tuple[int, ...], seed: int, vocabulary: int = 512) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocabulary, (n,), generator=generator).tolist() for n in lengths]


# ----------------------------------------------------------------------------------------------------------- comparison


def generate(llm: Any, ids: list[list[int]], images: list[Any] | None = None) -> list[Any]:
    from vllm import SamplingParams

    requests: list[dict[str, Any]] = [{"prompt_token_ids": p} for p in ids]
    for request, image in zip(requests, images or [None] * len(ids), strict=True):
        if image is not None:
            request["multi_modal_data"] = {"image": [image]}
    sampling = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=TOP)
    return llm.generate(requests, sampling, use_tqdm=False)


def compare(outputs: list[Any], ids: list[list[int]], exact: Any, rounded: Any, images: list[Any] | None = None) -> Any:
    """Distances of log probabilities from the fp32 reference: ours, and those of the bf16 reference."""
    ours, theirs, agree, ties = [], [], 0, 0
    for prompt, output, image in zip(ids, outputs, images or [None] * len(ids), strict=True):
        completion = output.outputs[0]
        whole = torch.tensor(prompt + list(completion.token_ids))
        given = {} if image is None else {"images": [image]}
        reference = exact.logits(whole, **given).float().log_softmax(-1)[-GENERATED - 1 : -1]
        bf16 = rounded.logits(whole, **given).float().log_softmax(-1)[-GENERATED - 1 : -1]
        for row, entries in enumerate(completion.logprobs):
            chosen = completion.token_ids[row]
            agree += int(reference[row].argmax()) == chosen
            # A token that the reference prefers by less than the bf16 distance is a tie.
            ties += float(reference[row].max() - reference[row][chosen]) < 0.5
            for token, entry in entries.items():
                ours.append(entry.logprob - float(reference[row][token]))
                theirs.append(float(bf16[row][token] - reference[row][token]))
    total = len(ids) * GENERATED
    near, near_reference = (torch.tensor(x).abs() for x in (ours, theirs))
    p90, p90_reference = (float(x.quantile(0.9)) for x in (near, near_reference))
    return {
        "median_ours": float(near.median()),
        "median_bf16_reference": float(near_reference.median()),
        "p90_ours": p90,
        "p90_bf16_reference": p90_reference,
        "max_ours": float(near.max()),
        "max_bf16_reference": float(near_reference.max()),
        "argmax_agreement": agree / total,
        "within_half_a_nat": ties / total,
        "finite": all(x == x for x in ours),
        # Single rows may be far off on either side: with 8 experts, one that is chosen differently is half the layer.
        "ok": p90 <= 2 * p90_reference + 0.02 and ties == total,
    }


def tiny(preset: str, modes: list[str], work: Path) -> None:
    """Served tokens against the reference, eager and with graphs, with images and cached prefixes."""
    from k3_core.checkpoint import tiny_config, write_tiny
    from k3_core.reference import load_model

    gpu = torch.cuda.is_available()
    config = tiny_config(preset, **tiny_text(preset, gpu))
    folder = write_tiny(work / preset, config, seed=3, long_memory=True)
    device = "cuda" if gpu else "cpu"
    exact = load_model(folder, torch.float32, device)
    rounded = load_model(folder, torch.bfloat16, device)
    ids = prompts(PROMPTS, seed=1)
    with_images = preset == "k3"
    for mode in modes if gpu else ("eager",):
        options: dict[str, Any] = {"max_num_batched_tokens": 128}
        options |= {"enforce_eager": True} if mode == "eager" else {"compilation_config": GRAPHS}
        began = time.monotonic()
        llm = start(folder, **options)
        started = time.monotonic() - began
        say(part=preset, mode=mode, start_s=round(started, 1), model=type(model_of(llm)).__name__)
        say(part=preset, mode=mode, compiled_at_start=len(compiled_since()))
        say(part=preset, mode=mode, check="batch", **compare(generate(llm, ids), ids, exact, rounded))
        first, other = prompts((300, 290), seed=4)
        again = [first, other, first + other[:70]]
        outputs = [generate(llm, [prompt])[0] for prompt in again]
        cached = [output.num_cached_tokens for output in outputs]
        say(part=preset, mode=mode, check="prefixes", cached=cached, **compare(outputs, again, exact, rounded))
        if with_images:
            from PIL import Image

            noise = torch.randint(0, 255, (70, 100, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
            image = Image.fromarray(noise.numpy())
            prompt = [[7, 8, 9, config.media_placeholder_token_id, 10, 11]]
            found = compare(generate(llm, prompt, [image]), prompt, exact, rounded, [image])
            say(part=preset, mode=mode, check="image", **found)
        say(part=preset, mode=mode, compiled_while_serving=compiled_since())
        stop(llm)
        del llm
    from k3_nvidia import dispatch

    say(part=preset, chosen=dispatch.report())


# --------------------------------------------------------------------------------------------------------------- timing


def randomise(model: Any) -> None:
    """Weights of ordinary size and random experts, in place: graphs keep their addresses."""
    from k3_core.vllm.serving.experts import RoutedExperts

    for name, p in model.named_parameters():
        if "norm" in name and p.dim() == 1:
            p.data.fill_(1.0)
        elif name.endswith("A_log"):
            p.data.fill_(0.3)
        elif name.endswith("dt_bias"):
            p.data.uniform_(-4, 0)
        elif name.endswith("e_score_correction_bias"):
            p.data.zero_()
        elif "scale" in name:  # of vLLM's packed experts, in whatever form its kernel wants
            p.data.fill_(2.0**-8) if p.dtype.itemsize > 1 else p.data.view(torch.uint8).fill_(119)
        elif not p.is_floating_point():
            p.data.view(torch.uint8).random_(0, 256)
        elif p.dim() > 0 and p.dtype.itemsize > 1:
            p.data.normal_(0, 0.02)
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            for name, tensor in module.store.tensors().items():
                raw = tensor.view(torch.uint8)
                if name.startswith("s") or name.endswith("scale"):
                    raw.random_(117, 121)
                else:
                    raw.random_(0, 256)


class Steps:
    """Device time of every execution of the runner's model, from events recorded around it."""

    def __init__(self, llm: Any) -> None:
        self.events: list[tuple[Any, Any]] = []
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        honest = runner.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = honest(*args, **kwargs)
            end.record()
            self.events.append((begin, end))
            return result

        runner.execute_model = execute_model

    def take(self) -> list[float]:
        """Milliseconds of the executions since the last call."""
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) for begin, end in self.events]
        self.events.clear()
        return times


def decode_ms(llm: Any, device: Steps, batch: int, context: int, steps: int = 64) -> dict[str, float]:
    """Milliseconds of a decoding step: what ``steps`` more tokens add to a whole batch, and the device's median."""
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": p} for p in prompts((context,) * batch, seed=batch, vocabulary=8192)]

    def seconds(count: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        began = time.perf_counter()
        llm.generate(requests, sampling, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(8)
    few = min(seconds(8) for _ in range(3))
    device.take()
    many = min(seconds(8 + steps) for _ in range(3))
    return {
        "ms": round(1e3 * (many - few) / steps, 3),
        "model_ms": round(statistics.median(device.take()), 3),
    }


def profile_step(llm: Any, batch: int) -> dict[str, Any]:
    """Device time of a decoding step by kernel, in microseconds, the largest first."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    count = 24
    requests = [{"prompt_token_ids": p} for p in prompts((128,) * batch, seed=9, vocabulary=8192)]
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        llm.generate(requests, sampling, use_tqdm=False)
        torch.cuda.synchronize()
    rows = sorted(traced.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    top = {row.key[:60]: [round(row.self_device_time_total / count, 1), row.count] for row in rows[:24]}
    return {"batch": batch, "device_us_a_step": round(total / count, 1), "kernels_us_and_count": top}


def prefill_ms(llm: Any, device: Steps, length: int, repeats: int = 5) -> dict[str, float]:
    """Median milliseconds of a request of ``length`` prompt tokens and one generated token, and the device's part."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    times, parts = [], []
    for repeat in range(repeats + 2):
        prompt = prompts((length,), seed=100 + repeat, vocabulary=8192)[0]
        torch.cuda.synchronize()
        device.take()
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
        parts.append(sum(device.take()))
    return {"ms": round(statistics.median(times[2:]), 2), "model_ms": round(statistics.median(parts[2:]), 2)}


def rank(work: Path, impl: str, tp: int, experts: str, profiled: bool = False) -> None:
    """Times of the rank-shaped model, ours or (in a process of its own) vLLM's."""
    folder = work / "rank"
    folder.mkdir(parents=True, exist_ok=True)
    config = rank_config(tp).to_dict()
    who: dict[str, Any] = {"part": "rank", "shape": f"TP{tp} rank, 8 layers", "impl": impl, "experts": experts}
    if impl == "upstream":
        # What vLLM makes of the release's quantisation: only the routed experts are MXFP4.
        config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    began = time.monotonic()
    llm = start(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=40960,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.6,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
    )
    say(**who, start_s=round(time.monotonic() - began, 1), compiled_at_start=len(compiled_since()))
    randomise(model_of(llm))
    from vllm.compilation.counter import compilation_counter

    mode = str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)
    say(**who, cudagraph_mode=mode, graphs=compilation_counter.num_cudagraph_captured)
    device = Steps(llm)
    for batch in (1, 8, 32, 128):
        say(**who, decode_batch=batch, **decode_ms(llm, device, batch, 128))
    for length in (1024, 8192, 32768):
        say(**who, prefill=length, **prefill_ms(llm, device, length, 5 if length < 16384 else 3))
    if profiled:
        for batch in (1, 32):
            say(**who, profile=profile_step(llm, batch))
    say(**who, compiled_while_serving=compiled_since())
    say(**who, peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2))
    stop(llm)


# ----------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="tiny,linear,rank" if torch.cuda.is_available() else "tiny,linear")
    parser.add_argument("--impl", default="ours", choices=("ours", "upstream"), help="of rank: whose model is timed")
    parser.add_argument("--shape", default="tp16", choices=("tp16", "tp8"), help="of rank: whose share of the model")
    parser.add_argument("--experts", default="humming", choices=("humming", "marlin"), help="of rank, upstream")
    parser.add_argument("--profile", action="store_true", help="of rank: device time by kernel as well")
    parser.add_argument("--modes", default="graphs", help="of tiny and linear: eager, graphs, or both by comma")
    options = parser.parse_args()
    wanted, modes = options.parts.split(","), options.modes.split(",")
    if options.impl == "upstream":
        os.environ["K3_IMPL"] = "upstream"
        if options.experts == "marlin":  # vLLM prefers Humming where the package can be imported
            sys.modules["humming"] = None  # type: ignore[assignment]
    if not torch.cuda.is_available():
        os.environ.setdefault("K3_IMPL", "nvidia")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    else:
        import vllm

        say(device=torch.cuda.get_device_name(), torch=torch.__version__, vllm=vllm.__version__)
        watch_compiler()
    experts = options.experts if options.impl == "upstream" else "k3-nvidia"
    parts: dict[str, Callable[[Path], None]] = {
        "tiny": lambda work: tiny("k3", modes, work),
        "linear": lambda work: tiny("linear", modes, work),
        "rank": lambda work: rank(work, options.impl, int(options.shape[2:]), experts, options.profile),
    }
    failed = []
    for name in wanted:
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as work:
                parts[name](Path(work))
        except BaseException:
            traceback.print_exc()
            failed.append(name)
            try:
                stop(None)
            except Exception:
                traceback.print_exc()
        say(part=name, seconds=round(time.monotonic() - began, 1), failed=name in failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
