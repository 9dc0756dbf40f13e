"""What this wheel does not serve beyond what none does: GPUs without bfloat16 matrix units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from k3_core.config import K3Config
from k3_core.vllm.serving.limits import ServingHook

MIN_CAPABILITY = 80


class NvidiaHook(ServingHook):
    """vLLM's configuration hook for this wheel's models."""

    wheel = "k3-nvidia"
    isolates = True

    @classmethod
    def device_reasons(cls, vllm_config: Any, config: K3Config) -> Iterator[str]:
        """A GPU older than Ampere."""
        from vllm.platforms import current_platform

        capability = current_platform.get_device_capability()
        if capability is not None and capability.to_int() < MIN_CAPABILITY:
            yield (
                f"this GPU has compute capability {capability.major}.{capability.minor}; bfloat16 matrix units begin "
                "with 8.0"
            )
