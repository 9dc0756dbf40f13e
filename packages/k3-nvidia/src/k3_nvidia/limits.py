"""What this wheel does not serve beyond what none does: GPUs without bfloat16 matrix units, odd latent caches, switches
for measurements that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from k3_core.config import K3Config
from k3_core.vllm.serving.limits import ServingHook

MIN_CAPABILITY = 80
#: Dtypes of the latent cache that vLLM's MLA backends for NVIDIA GPUs read (the packed ones are for sparse attention).
LATENT_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")


class NvidiaHook(ServingHook):
    """vLLM's configuration hook for this wheel's models."""

    wheel = "k3-nvidia"
    isolates = True

    @classmethod
    def device_reasons(cls, vllm_config: Any, config: K3Config) -> Iterator[str]:
        """A GPU older than Ampere, a latent cache that no backend reads, or a switch that cannot be read."""
        from vllm.platforms import current_platform

        capability = current_platform.get_device_capability()
        if capability is not None and capability.to_int() < MIN_CAPABILITY:
            yield (
                f"this GPU has compute capability {capability.major}.{capability.minor}; bfloat16 matrix units begin "
                "with 8.0"
            )
        dtype = str(vllm_config.cache_config.cache_dtype)
        if dtype not in LATENT_DTYPES:
            yield f"--kv-cache-dtype {dtype}: latent attention has no such cache; use one of {', '.join(LATENT_DTYPES)}"
        yield from _switches()


def _switches() -> Iterator[str]:
    """What is wrong with the variables that override tables: layers would say it in a worker, with a traceback."""
    from k3_nvidia.tuning import moe_step

    overrides: dict[str, Callable[[str], Any]] = {moe_step.VARIABLE: moe_step.override}
    if "K3_HOLD" in os.environ:  # its kernels' module needs Triton
        from k3_nvidia.tuning import skinny

        overrides[skinny.VARIABLE] = skinny.override
    for name, read in overrides.items():
        try:
            read(os.environ.get(name, ""))
        except ValueError as error:
            yield str(error)
