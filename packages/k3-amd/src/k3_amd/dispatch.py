"""Which implementation of each operator runs here, and why: this wheel's registry.

How it is asked and when contracts stand in for kernels: :mod:`k3_core.vllm.serving.dispatch`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from k3_amd import platform
from k3_core.operators import CallSpec, Implementation, Registry
from k3_core.vllm.serving import library
from k3_core.vllm.serving.dispatch import Dispatch

logger = logging.getLogger("vllm.plugins.k3")

KERNEL = "triton"
LIBRARY = library.LIBRARY


def registry() -> Registry:
    """All implementations of this wheel. Kernels whose compiler is not installed are left out."""
    return _dispatch.registry


def device() -> tuple[str, str]:
    """(device type, architecture) of this process: ("cuda", "gfx942") or ("cpu", ""). ROCm's torch says "cuda", too."""
    return ("cuda", platform.architecture()) if platform.on_rocm() else ("cpu", "")


def choose(
    name: str,
    dtype: torch.dtype,
    sizes: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
    want: str | None = None,
) -> Implementation:
    """The implementation of ``name`` on this device; see :meth:`k3_core.vllm.serving.dispatch.Dispatch.choose`."""
    return _dispatch.choose(name, dtype, sizes, options, want)


def report() -> list[str]:
    """What was chosen in this process so far, one line an operator."""
    return _dispatch.report()


def warmup_profiles(config: Any, limits: Any) -> dict[str, list[Any]]:
    """Every kernel variant that serving can meet, by ``operator/implementation``."""
    return _dispatch.warmup_profiles(config, limits)


# ------------------------------------------------------------------------------------------------------ this wheel's


def _implementations() -> Iterable[Implementation]:
    from k3_amd import kernels

    try:
        own = kernels.implementations()
    except ImportError as error:
        logger.info("Kimi K3: no Triton kernels (%s)", error)
        own = {}
    for implementation in own.values():
        yield dataclasses.replace(implementation, supports=_on_gpu(implementation.supports))
    yield library.EXPERTS


def _on_gpu(supports: Callable[[CallSpec], tuple[bool, str]]) -> Callable[[CallSpec], tuple[bool, str]]:
    """Also where Triton interprets: its interpreter is for the kernels' own tests, not for a model."""

    def asked(spec: CallSpec) -> tuple[bool, str]:
        if spec.device != "cuda":
            return False, f"{spec.operator}: Triton kernels run on a GPU's tensors, not on {spec.device}"
        return supports(spec)

    return asked


_dispatch = Dispatch(_implementations, lambda: device())
