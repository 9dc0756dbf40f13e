"""What is compiled while a process serves: noted, or refused at the spot.

A wheel's warm-up meets every kernel variant that serving can meet; a variant that is compiled (or read from a cache on
disk) afterwards is a request that waits for a compiler. :class:`Watch` sees each one: kernels of Triton by the only
function through which a ``JITFunction`` gets a binary, other compilers by the functions a wheel names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any


class LateCompilationError(RuntimeError):
    """A kernel was compiled that the warm-up should have met."""


class Watch:
    """Watches the compilers of a wheel's kernels from now on, in this process.

    package: only kernels of modules under this name count.
    functions: further functions that compile, as ``module:name``; left out where the module cannot be imported.
    """

    def __init__(self, package: str, functions: Iterable[str] = ()) -> None:
        self.package = package
        self.forbidden = False
        self._names: list[str] = []
        self._undo: list[Callable[[], None]] = []
        cls = _jit_function()
        if cls is not None and hasattr(cls, "_do_compile"):
            self._wrap(cls, "_do_compile", lambda kernel, *_: f"{kernel.fn.__module__}.{kernel.fn.__name__}")
        elif cls is not None:
            self._names.append("this Triton has no _do_compile to watch")
        for function in functions:
            module, name = function.split(":")
            try:
                owner = importlib.import_module(module)
            except ImportError:
                continue
            self._wrap(owner, name, lambda *_, called=f"{module}.{name}": called)

    def _wrap(self, owner: Any, attribute: str, name_of: Callable[..., str]) -> None:
        honest = getattr(owner, attribute)

        def watched(*args: Any, **kwargs: Any) -> Any:
            name = name_of(*args)
            if name.startswith(self.package):
                self._names.append(name)
                if self.forbidden:
                    raise LateCompilationError(f"{name} is compiled after the warm-up, which never met this variant")
            return honest(*args, **kwargs)

        setattr(owner, attribute, watched)
        self._undo.append(lambda: setattr(owner, attribute, honest))

    def forbid(self, yes: bool = True) -> None:
        """From now on whatever compiles raises LateCompilationError; ``False``: it is only noted again."""
        self.forbidden = yes

    def take(self) -> list[str]:
        """Kernels compiled since the last call, one name a variant, sorted."""
        names = sorted(self._names)
        self._names.clear()
        return names

    def stop(self) -> None:
        """The compilers are what they were before."""
        while self._undo:
            self._undo.pop()()


def _jit_function() -> Any:
    """Triton's class of compiled kernels; None without Triton."""
    try:
        return importlib.import_module("triton.runtime.jit").JITFunction
    except ImportError:
        return None
