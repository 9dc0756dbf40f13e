"""What this wheel does not serve beyond what none does: GPUs that its kernels are not built for."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from k3_amd import platform
from k3_core.config import K3Config
from k3_core.vllm.serving.limits import ServingHook


class AmdHook(ServingHook):
    """vLLM's configuration hook for this wheel's models."""

    wheel = "k3-amd"

    @classmethod
    def device_reasons(cls, vllm_config: Any, config: K3Config) -> Iterator[str]:
        """Another platform or architecture, or no Triton. The first of them is enough: the rest follows from it."""
        refused = platform.refusal()
        if refused is not None:
            yield refused
        elif find_spec("triton") is None:
            yield "Triton is not installed, and every kernel needs it; use the image's own build of PyTorch and Triton"
