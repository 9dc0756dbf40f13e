"""Which wheel a suite tests, and making its model the one that vLLM loads in this process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Vendor:
    """A wheel under test.

    Attributes:
        name: the value of ``K3_IMPL``.
        package: its import name, with ``plugin``, ``model``, ``kda`` and ``warmup`` modules.
        vllm: releases to accept in the place of the wheel's own, where a test has another one; None keeps them.
    """

    name: str
    package: str
    vllm: str | None = None

    def module(self, name: str) -> Any:
        """One of its modules."""
        return importlib.import_module(f"{self.package}.{name}")

    @contextmanager
    def acting(self) -> Iterator[None]:
        """This wheel's model is the one that vLLM loads; afterwards the wheels decide anew."""
        import vllm.plugins

        from k3_core.vllm import registration

        wanted = ENVIRONMENT | {"K3_IMPL": self.name}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        registration.unregister()
        original = registration.register
        registration.register = lambda wheel: original(replace(wheel, vllm=self.vllm or wheel.vllm))
        try:
            self.module("plugin").register()
            active = registration.active()
            assert active is not None, f"{self.package} did not register"
            assert active.vendor == self.name
            yield
        finally:
            registration.register = original
            registration.unregister()
            vllm.plugins.plugins_loaded = False  # the next engine of this process asks the entry points again
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def random_prompts(lengths: Sequence[int], seed: int, vocabulary: int = 512) -> list[list[int]]:
    """Prompts of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def settle(checkpoint: Path, **options: Any) -> Any:
    """vLLM's configuration for ``checkpoint``, as the server makes it before it starts anything."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 512}
    return EngineArgs(**{**defaults, **options}).create_engine_config()
