"""Launching a Triton kernel whose variant is known already, without Triton's argument binder.

A prefill is four or five launches and a decode step one a layer; the binder costs tens of microseconds a launch on the
host, more than some of these kernels run. The first call of a variant goes through Triton, later ones call the compiled
object. The key holds everything Triton specialises on (and a little more): dtypes and 16-byte alignment of tensors,
width, divisibility by 16 and equality to 1 of integers, constants, options, device.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


def _trait(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return type(value)


class Launcher:
    """Callable as launcher(grid, *arguments, **constants_and_options) for one @triton.jit kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """Launches on the current device and stream."""
        if args[0].device.type != "cuda":
            self.kernel[grid](*args, **named)
            return
        key = (torch.cuda.current_device(), *map(_trait, args), *named.items())
        found = self._compiled.get(key)
        if found is None:
            compiled = self.kernel[grid](*args, **named)
            names = self.kernel.arg_names[len(args) :]
            self._compiled[key] = (compiled, tuple(named[n] for n in names))
            return
        compiled, constants = found
        compiled[(*grid, 1, 1)[:3]](*args, *constants)
