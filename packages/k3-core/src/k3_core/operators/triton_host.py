"""Host side of Triton kernels, the same for every vendor: whether Triton interprets here, and launching without binder.

Launcher: a prefill is four or five launches and a decode step one a layer; Triton's argument binder costs tens of
microseconds a launch on the host, more than some of these kernels run. The first call of a variant goes through Triton,
later ones call the compiled object. The key holds everything Triton specialises on (and a little more): dtypes and
16-byte alignment of tensors, width, divisibility by 16 and equality to 1 of integers, constants, options, device; on
AMD also whether the storage behind a tensor has at most 2 GiB, for which offsets are cut to 32 bits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from k3_core.operators import compiling

HIP = torch.version.hip is not None
#: Bytes of storage up to which AMD's compiler is told that offsets fit 32 bits. A warm-up's pool is smaller, a served
#: pool may be larger: their variants must not be mixed up.
NARROW = 2**31 - 1


def interpreting() -> bool:
    """True under Triton's interpreter (TRITON_INTERPRET=1), where inline assembly and launch options do not exist."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _let_scalars_be_indices() -> None:
    """NumPy 2.4 refuses int() of a one-element array, which Triton 3.6's interpreter needs for loop bounds."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        setter = scope[0].set_attr if scope else setattr
        setter(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if interpreting():
    with contextlib.suppress(ImportError):
        _let_scalars_be_indices()


def as_if_wide(pool: torch.Tensor) -> torch.Tensor:
    """The same memory behind a storage that claims more than NARROW bytes, as a served pool's does.

    Kernels launched on it are compiled for wide storage, without allocating any. Views claim the same. ``pool`` must
    outlive the result, which does not own the memory.
    """
    construct: Any = torch._C._construct_storage_from_data_pointer
    start = pool.data_ptr() - pool.storage_offset() * pool.element_size()
    storage = construct(start, pool.device, NARROW + 1)
    empty = torch.empty(0, dtype=pool.dtype, device=pool.device)
    return empty.set_(storage, pool.storage_offset(), pool.shape, pool.stride())


#: Bytes behind each tensor that a kernel was given, while somebody notes them.
_noted: dict[tuple[Any, int], int] | None = None


@contextlib.contextmanager
def noting_storages() -> Iterator[dict[tuple[Any, int], int]]:
    """Within it, the largest storage behind each argument of each launched kernel: {(kernel, position): bytes}."""
    global _noted
    found: dict[tuple[Any, int], int] = {}
    _noted = found
    try:
        yield found
    finally:
        _noted = None


def _note(kernel: Any, args: tuple[Any, ...]) -> None:
    assert _noted is not None
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            size = value.untyped_storage().size()
            _noted[kernel, position] = max(size, _noted.get((kernel, position), 0))


def _trait(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0, HIP and value.untyped_storage().size() <= NARROW
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
        if _noted is not None:
            _note(self.kernel, args)
        if args[0].device.type != "cuda" or compiling.naming:
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
