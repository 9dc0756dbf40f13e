"""Milliseconds of the engine's steps: this wheel's model, or vLLM's own in a process of its own, by the same code.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python packages/k3-nvidia/benchmarks/bench_engine.py
        [--shape tp8] [--impl upstream] [--experts marlin] [--profile]

8 layers (6 KDA, 2 MLA; 1 dense, 7 MoE) in the shapes of one rank of TP16 or TP8 with random weights, made on the
device, with CUDA graphs: a decoding step for several batch sizes and a prompt of several lengths. ``ms`` is the wall
clock of the engine, scheduling and output processing of this one process included; ``model_ms`` is what the device
needs from the start of a step's model to its end (events around the runner's execution, medians). vLLM's experts are
Humming's, or with ``--experts marlin`` Marlin's: the rival of a row is the faster of the two. Alternate the processes.
Appends JSON lines to gpu_smoke.jsonl in $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gpu_smoke
import torch
from gpu_smoke import compiled_since, layer_lists, model_of, prompts, say, start, stop


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="tp16", choices=("tp16", "tp8"), help="whose share of the model")
    parser.add_argument("--impl", default="ours", choices=("ours", "upstream"), help="whose model is timed")
    parser.add_argument("--experts", default="humming", choices=("humming", "marlin"), help="of the upstream model")
    parser.add_argument("--profile", action="store_true", help="device time by kernel as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_engine.py times a GPU; there is none")
    experts = "k3-nvidia"
    if options.impl == "upstream":
        os.environ["K3_IMPL"], experts = "upstream", options.experts
        if experts == "marlin":  # vLLM prefers Humming where the package can be imported
            sys.modules["humming"] = None  # type: ignore[assignment]
    gpu_smoke.prepare()
    tp = int(options.shape[2:])
    parts = {"rank": lambda work: rank(work, options.impl, tp, experts, options.profile)}
    return gpu_smoke.guarded(parts, ["rank"])


if __name__ == "__main__":
    sys.exit(main())
