"""One rank of vLLM's engine over several: ``python -m k3_core.vllm.testing.rank_engine``, a :mod:`.world` program.

A case: ``vendor`` (fields of :class:`.vendor.Vendor`), ``folder``, ``options`` of ``vllm.LLM``, ``prompts`` (ids, one
pad an image), ``images`` ([width, height, seed] or null, one a prompt), ``count`` tokens to generate, ``top`` log
probabilities a token, ``launch``:

* "external": this process is one of the ranks; every rank has an engine of its own which schedules alike. Nothing is
  started and nothing is sent but what the model's collectives send, so a rank that hangs can be seen and ended.
* "mp": this process has the engine, and vLLM starts the ranks; how a server does it.

The payload: ``outputs`` ({tokens, logprobs: [{token: log probability}] a token}), ``facts`` of the model, seconds.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from k3_core.vllm.testing import world


def noise_image(width: int, height: int, seed: int) -> Any:
    """An image of random pixels, the same everywhere."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 255, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def facts(llm: Any) -> dict[str, Any]:
    """What this rank's model is made of: reduction forms, experts held, layers of the stage, and blocks received.

    ``wide_layers``: those of which this rank holds a scale byte above 128. ``kinds``: the first layer of each kind, as
    this rank alone would warm them up.
    """
    from k3_core.vllm.serving.moe_layer import MoeLayer
    from k3_core.vllm.serving.stack import TextStack

    model = runner(llm).get_model()
    layers = [m for m in model.modules() if isinstance(m, MoeLayer)]
    stack = next(m for m in model.modules() if isinstance(m, TextStack))
    return {
        "model": type(model).__name__,
        "forms": sorted({layer.form for layer in layers}),
        "expert_parallel": any(layer.expert_parallel for layer in layers),
        "layers": [stack.start_layer, stack.end_layer],
        "wide_layers": wide_layers(stack),
        "kinds": stack.first_of_each_kind(),
        "graphs": str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode),
    }


def wide_layers(stack: Any) -> list[int]:
    """Layers of which this rank holds an expert's scale byte above 128, read back from whichever layout they lie in."""
    from k3_core.vllm.serving.experts import RoutedExperts

    def wide(layer: Any) -> bool:
        experts = [m for m in layer.modules() if isinstance(m, RoutedExperts) and m.quantised]
        tensors = [item for one in experts for item in one.store.tensors().items()]
        scales = [t for name, t in tensors if name in ("w13_scale", "w2_scale", "s13", "s2")]
        return any(int(t.view(torch.uint8).max()) > 128 for t in scales)

    return [index for index, layer in stack.own_layers() if wide(layer)]


def runner(llm: Any) -> Any:
    """The model runner in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def work(case: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, generate greedily, and stop it."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    external = case["launch"] == "external"
    options = {"distributed_executor_backend": "external_launcher" if external else "mp"} if spread(case) else {}
    if external:
        over_gloo()
    began = time.monotonic()
    llm = LLM(case["folder"], **options, **case["options"])
    started = time.monotonic()
    known: dict[str, Any] = {}
    if external or not spread(case):
        known = facts(llm)
        receive_buffers(llm)
    requests = [request(ids, image) for ids, image in zip(case["prompts"], case["images"], strict=True)]
    sampling = SamplingParams(
        temperature=0, max_tokens=case["count"], ignore_eos=True, detokenize=False, logprobs=case["top"]
    )
    outputs = [output.outputs[0] for output in llm.generate(requests, sampling, use_tqdm=False)]
    done = time.monotonic()
    result = {
        "outputs": [answer(output) for output in outputs],
        "facts": known,
        "start_s": round(started - began, 1),
        "generate_s": round(done - started, 2),
    }
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return result


def request(ids: list[int], image: list[int] | None) -> dict[str, Any]:
    """A request as ``vllm.LLM`` takes it; image: [width, height, seed] of a noise image."""
    made: dict[str, Any] = {"prompt_token_ids": ids}
    if image is not None:
        made["multi_modal_data"] = {"image": [noise_image(*image)]}
    return made


def answer(completion: Any) -> dict[str, Any]:
    """A completion's tokens and their log probabilities."""
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [{token: entry.logprob for token, entry in row.items()} for row in completion.logprobs or []],
    }


def over_gloo() -> None:
    """On a CPU: collectives of ranks that were started one by one are gloo's.

    vLLM would use shared memory under a name that all such engines of a machine have in common.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        communicator: Any = CpuCommunicator
        communicator._all_group_ranks_share_shm_group_name = lambda self: False


def spread(case: dict[str, Any]) -> bool:
    """Whether a case has more than one rank."""
    options = case["options"]
    return int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1)) > 1


def receive_buffers(llm: Any) -> None:
    """On a CPU: give a later pipeline stage the tensors it receives into.

    vLLM makes them while it profiles the model's memory, which it does not do on a CPU for a model that isn't compiled.
    """
    from vllm.distributed import get_pp_group

    run = runner(llm)
    if run.device.type == "cpu" and not get_pp_group().is_first_rank and run.intermediate_tensors is None:
        run.intermediate_tensors = run.model.make_empty_intermediate_tensors(
            batch_size=run.max_num_tokens, dtype=run.model_config.dtype, device=run.device
        )


if __name__ == "__main__":
    world.serve_engines(work)
