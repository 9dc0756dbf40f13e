"""Ranks and pipeline stages emulated by threads of one process, and layers' caches without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from k3_core.checkpoint import CheckpointReader
from k3_core.contracts.norm import rms_norm
from k3_core.reference import load_model
from k3_core.vllm.testing.vendor import Vendor, settle


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


@contextmanager
def nothing_left_over() -> Iterator[None]:
    """Within it memory that a tensor is made of without values is NaN, not what an earlier test left there."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def build(vendor: Vendor, vllm_config: Any, config: Any) -> Any:
    """The text model of the rank and stage that the current groups say, not loaded: its weights are NaN."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = set_default_torch_dtype(vllm_config.model_config.dtype)
    with set_current_vllm_config(vllm_config), dtype, nothing_left_over():
        return vendor.module("model").KimiLinearForCausalLM(vllm_config=vllm_config, config=config)


def fill(model: Any) -> None:
    """Load the checkpoint's text tensors and settle the weights as vLLM's loader does."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from k3_core.vllm.serving.outer import load

    load(model, model, iter(()), {})
    process_weights_after_loading(model, model.model_config, torch.device("cpu"))


def bind_caches(model: Any, slots: int = 4, block: int = 64) -> None:
    """Caches full of NaN for every layer: what is read before it is written shows."""
    from k3_core.vllm.serving.kda_layer import KdaLayer
    from k3_core.vllm.serving.mla_cpu import LatentAttentionOnCpu

    for module in model.modules():
        if isinstance(module, KdaLayer):
            shapes = zip(module.get_state_shape(), module.get_state_dtype(), strict=True)
            module.kv_cache = tuple(torch.full((slots, *s), float("nan"), dtype=d) for s, d in shapes)
        elif isinstance(module, LatentAttentionOnCpu):
            width = module.text.kv_lora_rank + module.text.qk_rope_head_dim
            module.kv_cache = torch.full((slots, block, width), float("nan"))


def one_prompt(model: Any, length: int, block: int = 64) -> dict[str, Any]:
    """Metadata of a step that reads one prompt of ``length`` tokens into slot 1 and blocks 1, 2, ..."""
    from k3_core.vllm.serving.kda_layer import KdaLayer
    from k3_core.vllm.serving.kda_metadata import KdaMetadata, Prefill
    from k3_core.vllm.serving.mla_cpu import LatentAttentionOnCpu, LatentStep

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
        if isinstance(module, KdaLayer):
            result[module.prefix] = kda
        elif isinstance(module, LatentAttentionOnCpu):
            result[module.prefix] = mla
    return result


def settled(folder: Path, size: int = 1, **options: Any) -> Any:
    """A configuration for ``size`` ranks; the engine itself would need as many processes."""
    config = settle(folder, **options)
    config.parallel_config.tensor_parallel_size = size
    return config


class Whole:
    """The reference of a checkpoint, and its embedding, final norm and head."""

    def __init__(self, folder: Path) -> None:
        self.reader = CheckpointReader(folder)
        self.config = self.reader.config
        self.prefix = "" if self.config.is_kimi_linear else "language_model."
        self.logits = load_model(folder, torch.float32).logits

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint in fp32."""
        return self.reader.read(self.prefix + name).float()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]."""
        return self.read("model.embed_tokens.weight")[ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [T, H] -> [T, vocab]."""
        normed = rms_norm(hidden, self.read("model.norm.weight"), self.config.text.rms_norm_eps)
        return functional.linear(normed, self.read("lm_head.weight"))


def forward(model: Any, hidden: torch.Tensor, received: Any = None) -> Any:
    """One prompt through a stage's layers, from caches full of NaN."""
    from vllm.forward_context import set_forward_context

    bind_caches(model, slots=4 + hidden.shape[0] // 64)
    metadata = one_prompt(model, hidden.shape[0])
    with torch.no_grad(), set_forward_context(metadata, model.vllm_config, slot_mapping={}):
        return model.model(hidden, received)


_LOCK = threading.Lock()  # vLLM's current configuration is global


def run(
    vendor: Vendor, folder: Path, size: int, hidden: torch.Tensor, *, expert_parallel: bool = False, form: str = ""
) -> tuple[list[torch.Tensor], Group]:
    """Hidden states of every rank of a tensor parallel run; ``form`` is the MoE reduction, or the model's choice."""
    from vllm.forward_context import set_forward_context

    group = Group(size)
    with groups(group, Group()):
        configs = [settled(folder, size) for _ in range(size)]
        for config in configs:
            config.parallel_config.enable_expert_parallel = expert_parallel
            config.additional_config = {"k3_moe_reduction": form} if form else {}

        def work(rank: int) -> Any:
            with _LOCK:
                model = build(vendor, configs[rank], CheckpointReader(folder).config)
                fill(model)
            return model

        models = run_ranks(group, work)
        group.reduced.clear()
        for model in models:
            bind_caches(model)
        metadata = one_prompt(models[0], hidden.shape[0])
        with set_forward_context(metadata, configs[0], slot_mapping={}):

            def compute(rank: int) -> torch.Tensor:
                with torch.no_grad():
                    result: torch.Tensor = models[rank].model(hidden.clone(), None)
                    return result

            return run_ranks(group, compute), group
