"""What a start-up spends on compiling, and compiling with several threads.

Triton compiles in the thread that launches. Most of that is MLIR, LLVM and ptxas, which hold no lock of Python's, so a
start-up first names every variant it will launch and lets a pool compile them (``triton.AsyncCompileMode``, public
in Triton 3.6, 3.7 and 3.9, is made for this), then launches. No process is forked: a worker of an engine holds a
device.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

#: Threads that compile, at most; an engine's workers share the machine, and beyond eight Python's lock is what is busy.
MOST_THREADS = 8


class Spent:
    """Seconds by part, and compilations by compiler: how many, their seconds (of all threads), how many from a cache.

    Compilations are inside the parts: the two do not add up.
    """

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.compilers: dict[str, tuple[int, float, int]] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time of what happens inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - began

    def compiled(self, compiler: str, seconds: float, cached: bool) -> None:
        """One more compilation, or one less that was found in a cache on disk."""
        with self._lock:
            count, total, hits = self.compilers.get(compiler, (0, 0.0, 0))
            self.compilers[compiler] = (count + (not cached), total + seconds, hits + cached)

    def told(self) -> str:
        """One line: all seconds, the parts, the compilers."""
        said = [f"{name} {seconds:.1f} s" for name, seconds in self.parts.items()]
        for name, (count, seconds, hits) in sorted(self.compilers.items()):
            said.append(f"{name}: {count} compiled and {hits} loaded in {seconds:.1f} s")
        return f"{time.monotonic() - self._began:.1f} s ({'; '.join(said)})"


_spent: Spent | None = None


def _knobs() -> Any:
    """Triton's settings, or None where there is no Triton or an older one without them."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs if hasattr(getattr(knobs, "compilation", None), "listener") else None


@contextlib.contextmanager
def timed() -> Iterator[Spent]:
    """Within it every compilation is noted: Triton's by its listener, others by :func:`timing`."""
    global _spent
    before, spent, knobs = _spent, Spent(), _knobs()
    _spent = spent
    listener = None if knobs is None else knobs.compilation.listener

    def heard(**named: Any) -> None:
        spent.compiled("Triton", named["times"].total / 1e6, named["cache_hit"])
        if listener is not None:
            listener(**named)

    if knobs is not None:
        knobs.compilation.listener = heard
    try:
        yield spent
    finally:
        _spent = before
        if knobs is not None:
            knobs.compilation.listener = listener


class Timing:
    """One compilation; cached: it was only read."""

    cached = False


@contextlib.contextmanager
def timing(compiler: str) -> Iterator[Timing]:
    """One compilation by another compiler than Triton."""
    began, one = time.monotonic(), Timing()
    yield one
    if _spent is not None:
        _spent.compiled(compiler, time.monotonic() - began, one.cached)


#: Whether launches only name their variant: compiled in the background, nothing runs.
naming = False
_pool: Executor | None = None


def later(compile_it: Callable[[], object]) -> None:
    """Inside :func:`ahead`: let the pool call this, whose result (or failure) a first launch will find for itself."""
    assert _pool is not None
    _pool.submit(compile_it)


def threads() -> int:
    """How many threads compile: ``K3_COMPILE_THREADS``, else half of this process's cores, at most MOST_THREADS."""
    asked = os.environ.get("K3_COMPILE_THREADS", "")
    return int(asked) if asked else min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))


def possible() -> bool:
    """Whether :func:`ahead` can: several threads, and a Triton that compiles without launching."""
    try:
        from triton import AsyncCompileMode  # noqa: F401
    except ImportError:
        return False
    return threads() >= 2


@contextlib.contextmanager
def ahead() -> Iterator[bool]:
    """Within it this project's kernels are compiled by a pool and not launched; at the end all have been compiled.

    Gives False, and changes nothing, with one thread or a Triton that cannot. What a kernel would have written is
    uninitialised inside: no index that one writes may be read by anything that is launched. A kernel that does not
    compile is left for its first launch, which says why.
    """
    global naming, _pool
    if naming or not possible():
        yield False
        return
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def named(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    naming, JITFunction.run = True, named
    try:
        with ThreadPoolExecutor(threads(), "k3-compile") as pool, AsyncCompileMode(pool, ignore_errors=True):
            _pool = pool
            yield True
    finally:
        naming, _pool, JITFunction.run = False, None, run
