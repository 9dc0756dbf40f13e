"""Does the whole model run in vLLM on this GPU, and is it right? One script, JSON lines out.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python packages/k3-nvidia/benchmarks/gpu_smoke.py
        [--parts tiny,linear] [--modes eager,graphs]

tiny, linear: random checkpoints with kernel-sized heads are written, served by vLLM with this plugin (with CUDA
graphs, or eager) and compared with ``k3_core.reference`` on the same device. The measure: log probabilities of the
tokens that were generated, teacher-forced, against the reference in fp32; the reference in bf16 has the same distance
from it, so ours may have twice as much at the 90th percentile (beyond lie rows that chose another expert).

Once an engine has started, a kernel of this wheel that is compiled raises: the warm-up must have met every variant.

Every part is guarded: a failure prints its traceback and the next part runs. Exit status 1 if any part failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
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


# -------------------------------------------------------------------------------------------------------------- engines

#: What compiles this wheel's kernels besides Triton.
COMPILERS = (
    "k3_nvidia.kernels.skinny_cute_kernel:build",
    "k3_nvidia.kernels.attn_res_cluster_kernel:build",
    "k3_nvidia.kernels.cuda_host:compile_source",
)
WATCH: Any = None


def watch_compiler() -> None:
    """Note every kernel of this wheel that is compiled from now on."""
    global WATCH
    from k3_core.vllm.testing.compiling import Watch

    WATCH = Watch("k3_nvidia", COMPILERS)


def compiled_since() -> list[str]:
    """Kernels compiled since the last call."""
    return [] if WATCH is None else WATCH.take()


def forbid_compiling(yes: bool = True) -> None:
    """From now on a kernel that is compiled raises and ends the request (``False``: no longer)."""
    if WATCH is not None:
        WATCH.forbid(yes)


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
    ours, theirs, agree, ties, reference_ties = [], [], 0, 0, 0
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
            reference_ties += float(reference[row].max() - reference[row][int(bf16[row].argmax())]) < 0.5
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
        "within_half_a_nat_bf16_reference": reference_ties / total,
        "finite": all(x == x for x in ours),
        # Single rows may be far off on either side: with 8 experts, one that is chosen differently is half the layer.
        # The same holds for tokens: as many may be no tie as twice the bf16 reference has.
        "ok": p90 <= 2 * p90_reference + 0.02 and ties >= 2 * reference_ties - total,
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
        forbid_compiling()
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
        forbid_compiling(False)
        stop(llm)
        del llm
    from k3_nvidia import dispatch

    say(part=preset, chosen=dispatch.report())


# ----------------------------------------------------------------------------------------------------------------- main


def guarded(parts: dict[str, Callable[[Path], None]], wanted: list[str]) -> int:
    """Run the wanted parts, each in a folder of its own; 1 if one failed."""
    failed = []
    for name in wanted:
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as work:
                parts[name](Path(work))
        except BaseException:
            traceback.print_exc()
            failed.append(name)
            forbid_compiling(False)
            try:
                stop(None)
            except Exception:
                traceback.print_exc()
        say(part=name, seconds=round(time.monotonic() - began, 1), failed=name in failed)
    return 1 if failed else 0


def prepare() -> None:
    """The environment of a run: which model acts, what is said of the device, and the watch on the compiler."""
    if not torch.cuda.is_available():
        os.environ.setdefault("K3_IMPL", "nvidia")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        return
    import vllm

    say(device=torch.cuda.get_device_name(), torch=torch.__version__, vllm=vllm.__version__)
    watch_compiler()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="tiny,linear")
    parser.add_argument("--modes", default="graphs", help="eager, graphs, or both by comma")
    options = parser.parse_args()
    modes = options.modes.split(",")
    prepare()
    parts: dict[str, Callable[[Path], None]] = {
        "tiny": lambda work: tiny("k3", modes, work),
        "linear": lambda work: tiny("linear", modes, work),
    }
    return guarded(parts, options.parts.split(","))


if __name__ == "__main__":
    sys.exit(main())
