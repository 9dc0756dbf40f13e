"""Building the Ascend model on the fake device: vLLM and vllm-ascend are real, CANN is a set of stand-ins.

torch_npu believes in one Ascend910B3 (ci/ascend). Tensors on ``npu:0`` exist as FakeTensors only; real tensors live on
the CPU. One model a process: vllm-ascend keeps process-wide state.
"""

from __future__ import annotations

import collections
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def has_vllm_ascend() -> bool:
    """Whether this environment has torch_npu and vllm-ascend."""
    import importlib.util

    return all(importlib.util.find_spec(name) for name in ("torch_npu", "vllm_ascend"))


def has_npu() -> bool:
    """Whether a real NPU is here: a computation gives its result."""
    if not has_vllm_ascend():
        return False
    try:
        import torch_npu  # noqa: F401

        return float((torch.ones(4, device="npu") + 1).sum().cpu()) == 8.0
    except Exception:
        return False


def fake_device() -> None:
    """Let torch_npu's Python half answer without asking the stand-ins; idempotent."""
    import torch_npu

    os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
    for module in (torch.npu, torch_npu.npu):
        module.current_device = lambda: 0
        module.set_device = lambda *_: None
        module.is_available = lambda: True
        module.device_count = lambda: 1
        module.synchronize = lambda *_: None


def plugins() -> None:
    """vllm-ascend's patches as its workers apply them, and our registration."""
    from vllm.platforms import current_platform

    assert current_platform.device_type == "npu"
    from vllm_ascend.utils import adapt_patch

    adapt_patch(True)
    adapt_patch()
    from k3_ascend import plugin
    from k3_core.vllm import registration

    plugin.register()
    active = registration.active()
    assert active is not None
    assert active.name == "k3-ascend"


def settle(checkpoint: Path, **options: Any) -> Any:
    """vLLM's configuration, as the server makes it before it starts anything."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {"model": str(checkpoint), "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8}
    return EngineArgs(**{**defaults, **options}).create_engine_config()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def worker(vllm_config: Any) -> Iterator[None]:
    """What vllm-ascend's worker sets up before it builds a model, for one rank over gloo."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm_ascend.ascend_config import get_ascend_config, init_ascend_config
    from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel
    from vllm_ascend.utils import register_ascend_customop, set_weight_prefetch_method

    with set_current_vllm_config(vllm_config):
        register_ascend_customop(vllm_config)
        if not parallel_state.model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{_free_port()}", 0, "gloo")
            initialize_model_parallel(1, 1, backend="gloo")
            init_ascend_config(vllm_config)
            init_ascend_model_parallel(vllm_config.parallel_config)
        set_weight_prefetch_method(get_ascend_config().weight_prefetch_config)
        yield


def build(vllm_config: Any, device: str = "cpu") -> Any:
    """The model that vLLM resolves for this configuration, with its dtype as default."""
    from vllm.model_executor.models.registry import ModelRegistry

    kind, _ = ModelRegistry.resolve_model_cls(vllm_config.model_config.architectures, vllm_config.model_config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        with torch.device(device):
            return kind(vllm_config=vllm_config)
    finally:
        torch.set_default_dtype(before)


def to_fake(model: torch.nn.Module) -> None:
    """Replace parameters and buffers by FakeTensors on ``npu:0`` (inside a FakeTensorMode)."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="npu:0")
                replacement = torch.nn.Parameter(fake, requires_grad=False)
                replacement.__dict__.update(parameter.__dict__)
                module._parameters[name] = replacement
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                fake = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="npu:0")
                module._buffers[name] = fake
                if hasattr(module, "store"):
                    setattr(module.store, name, fake)  # experts compute on their store's tensors


@dataclass
class Census(TorchDispatchMode):
    """Counts and keeps the calls of operators outside aten."""

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.name.startswith(("aten::", "prim::", "prims::")):
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    def counts(self) -> collections.Counter[str]:
        """Calls by ``namespace::name``."""
        return collections.Counter(func._schema.name for func, _, _ in self.calls)


@contextmanager
def forward_context(vllm_config: Any, tokens: int, metadata: Any = None, *, profile: bool = False) -> Iterator[None]:
    """vllm-ascend's forward context of a step."""
    from vllm_ascend.ascend_forward_context import set_ascend_forward_context

    with set_ascend_forward_context(metadata, vllm_config, num_tokens=tokens, in_profile_run=profile), nullcontext():
        yield
