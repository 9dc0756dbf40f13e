"""The one place where kernels are launched, and how many programs a device gets.

A program of a vector kernel occupies one vector core, and starting more programs than cores costs a pass through the
scheduler for each. So every kernel loops over its work items: program p takes items p, p + P, p + 2P, ...

CPU tensors have no Triton driver. Verification installs an executor that runs what the vendor's compiler made of the
same source (`ci/ascend_kernels/execute.py`); without one a CPU tensor is refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from k3_core.errors import UnsupportedError

logger = logging.getLogger("vllm.plugins.k3")

#: Vector cores where the driver does not say: 910B and 910_93 have 40 to 50.
DEFAULT_CORES = 40

#: (kernel, grid, positional arguments, constants) -> None.
Executor = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_executor: list[Executor] = []


@contextlib.contextmanager
def executing_with(executor: Executor) -> Iterator[None]:
    """Run launches on CPU tensors with an executor. For verification; the innermost one counts."""
    _executor.append(executor)
    try:
        yield
    finally:
        _executor.pop()


def has_executor() -> bool:
    """Whether CPU tensors can be launched on."""
    return bool(_executor)


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Start ``programs`` programs of a ``@triton.jit`` kernel on the device of its first argument.

    Raises UnsupportedError for CPU tensors outside :func:`executing_with`.
    """
    if args[0].device.type == "cpu":
        if not _executor:
            raise UnsupportedError(
                f"{kernel.__name__}: Triton kernels run on npu tensors; for CPU tensors use the contract implementation"
            )
        _executor[-1](kernel, (programs, 1, 1), args, constants)
        return
    if args[0].device.type == "cuda":  # a tile made for a unified buffer is large for a warp's registers
        constants["num_warps"] = 8
    kernel[(programs,)](*args, **constants)


def programs_for(items: int, device: torch.device) -> int:
    """Persistent programs for a number of work items: never more than cores."""
    return max(1, min(items, cores(device.type, device.index or 0)))


@functools.cache
def cores(kind: str, index: int) -> int:
    """Vector cores of an NPU (from triton-ascend's driver), multiprocessors of a GPU, otherwise DEFAULT_CORES."""
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(index).multi_processor_count)
    if kind == "npu":
        import triton

        properties = triton.runtime.driver.active.utils.get_device_properties(index)
        count = int(properties.get("num_vectorcore", 0))
        if count > 0:
            return count
        logger.warning("Kimi K3: the driver names no vector cores; kernels start %d programs", DEFAULT_CORES)
    return DEFAULT_CORES
