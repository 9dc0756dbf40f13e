"""Running the NVIDIA model on a CPU: an engine in this process, and ranks emulated by threads."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "K3_IMPL": "nvidia",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def random_prompts(lengths: Sequence[int], seed: int, vocabulary: int = 512) -> list[list[int]]:
    """Prompts of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def our_model() -> Iterator[None]:
    """This wheel's model is the one that vLLM loads, in this process; afterwards the wheels decide anew."""
    import vllm.plugins

    from k3_core.vllm import registration
    from k3_nvidia import plugin

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    registration.unregister()
    plugin.register()
    active = registration.active()
    assert active is not None
    assert active.vendor == "nvidia"
    try:
        yield
    finally:
        registration.unregister()
        vllm.plugins.plugins_loaded = False  # the next engine of this process asks the entry points again
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def settle(checkpoint: Path, **options: Any) -> Any:
    """vLLM's configuration for ``checkpoint``, as the server makes it before it starts anything."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 512}
    return EngineArgs(**{**defaults, **options}).create_engine_config()


# --------------------------------------------------------------------------------------------------------------- engine


@dataclass
class Engine:
    """vLLM in this process; ``steps`` records (computed, scheduled, prompt tokens) of each row of each step."""

    llm: Any
    steps: list[list[tuple[int, int, int]]] = field(default_factory=list)

    @classmethod
    def start(cls, checkpoint: Path, **options: Any) -> Engine:
        """Start on ``checkpoint``; ``options`` go to ``vllm.LLM``."""
        from vllm import LLM

        defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "seed": 0}
        engine = cls(LLM(str(checkpoint), **{**defaults, **options}))
        engine._watch()
        return engine

    @property
    def model(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.model

    @property
    def config(self) -> Any:
        return self.llm.llm_engine.vllm_config

    def generate(self, prompts: Sequence[Sequence[int]], count: int, images: Sequence[Any] | None = None) -> list[Any]:
        """Greedy outputs of all prompts at once; ids hold one pad an image, at most one image a prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        requests: list[dict[str, Any]] = [{"prompt_token_ids": list(p)} for p in prompts]
        for request, image in zip(requests, images or [None] * len(prompts), strict=True):
            if image is not None:
                request["multi_modal_data"] = {"image": [image]}
        return self.llm.generate(requests, sampling, use_tqdm=False)

    def tokens(self, prompts: Sequence[Sequence[int]], count: int, images: Sequence[Any] | None = None) -> list[Any]:
        return [list(output.outputs[0].token_ids) for output in self.generate(prompts, count, images)]

    def forget(self) -> None:
        self.llm.reset_prefix_cache()
        self.steps.clear()

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def _watch(self) -> None:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            old = output.scheduled_cached_reqs
            computed |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
            rows = [
                (computed[name], count, scheduler.requests[name].num_prompt_tokens)
                for name, count in output.num_scheduled_tokens.items()
            ]
            self.steps += [rows] if rows else []
            return output

        scheduler.schedule = watched


# ---------------------------------------------------------------------------------------------------------------- ranks


class Group:
    """What the layers ask of a process group, for ranks that are threads of this process."""

    def __init__(self, world_size: int = 1, rank: int | None = None) -> None:
        self.world_size, self._fixed = world_size, rank
        self._local = threading.local()
        self._barrier = threading.Barrier(world_size)
        self._given: list[Any] = [None] * world_size
        # Ranks are processes in earnest; as threads they take turns, since not all that they call is thread-safe.
        self._turn = threading.Lock()
        self.reduced: list[int] = []

    @property
    def rank_in_group(self) -> int:
        return self._fixed if self._fixed is not None else getattr(self._local, "rank", 0)

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def join(self, rank: int) -> None:
        """This thread is ``rank`` from now on."""
        self._local.rank = rank

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.rank_in_group] = x.clone()
        self._wait()
        everyone = list(self._given)
        self._wait()
        return everyone

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait(60)
        finally:
            self._turn.acquire()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank_in_group == 0:
            self.reduced.append(x.shape[-1])
        return torch.stack(self._exchange(x)).sum(0) if self.world_size > 1 else x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim) if self.world_size > 1 else x

    def turn(self) -> threading.Lock:
        """Held by the rank that computes."""
        return self._turn

    def abort(self) -> None:
        self._barrier.abort()


def run_ranks(group: Group, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` of every rank at once; the first exception is raised."""
    results: list[Any] = [None] * group.world_size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        group.join(rank)
        try:
            with group.turn():
                results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(group.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


@contextmanager
def groups(tp: Group, pp: Group) -> Iterator[None]:
    """Tensor and pipeline parallel groups for everything in this process."""
    from vllm.distributed import parallel_state

    before = parallel_state._TP, parallel_state._PP
    parallel_state._TP, parallel_state._PP = tp, pp
    try:
        yield
    finally:
        parallel_state._TP, parallel_state._PP = before


def build(vllm_config: Any, config: Any) -> Any:
    """The text model of the rank and stage that the current groups say, not loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    from k3_nvidia.model import KimiLinearForCausalLM

    with set_current_vllm_config(vllm_config), set_default_torch_dtype(vllm_config.model_config.dtype):
        return KimiLinearForCausalLM(vllm_config=vllm_config, config=config)


def fill(model: Any) -> None:
    """Load the checkpoint's text tensors and settle the weights as vLLM's loader does."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from k3_core.vllm.serving.outer import load

    load(model, model, iter(()), {})
    process_weights_after_loading(model, model.model_config, torch.device("cpu"))


def bind_caches(model: Any, slots: int = 4, block: int = 64) -> None:
    """Caches full of NaN for every layer: what is read before it is written shows."""
    from k3_core.vllm.serving.mla_cpu import LatentAttentionOnCpu
    from k3_nvidia.kda import KimiDeltaAttention

    for module in model.modules():
        if isinstance(module, KimiDeltaAttention):
            shapes = zip(module.get_state_shape(), module.get_state_dtype(), strict=True)
            module.kv_cache = tuple(torch.full((slots, *s), float("nan"), dtype=d) for s, d in shapes)
        elif isinstance(module, LatentAttentionOnCpu):
            width = module.text.kv_lora_rank + module.text.qk_rope_head_dim
            module.kv_cache = torch.full((slots, block, width), float("nan"))


def one_prompt(model: Any, length: int, block: int = 64) -> dict[str, Any]:
    """Metadata of a step that reads one prompt of ``length`` tokens into slot 1 and blocks 1, 2, ..."""
    from k3_core.vllm.serving.kda_metadata import KdaMetadata, Prefill
    from k3_core.vllm.serving.mla_cpu import LatentAttentionOnCpu, LatentStep
    from k3_nvidia.kda import KimiDeltaAttention

    kda = KdaMetadata(
        0,
        length,
        prefill=Prefill(
            torch.tensor([1], dtype=torch.int32),
            torch.tensor([0, length], dtype=torch.int32),
            torch.tensor([False]),
        ),
    )
    blocks = -(-length // block)
    table = torch.arange(1, blocks + 1, dtype=torch.int32).unsqueeze(0)
    mla = LatentStep([0, length], [length], table, torch.arange(length) + block)
    result: dict[str, Any] = {}
    for module in model.modules():
        if isinstance(module, KimiDeltaAttention):
            result[module.prefix] = kda
        elif isinstance(module, LatentAttentionOnCpu):
            result[module.prefix] = mla
    return result
