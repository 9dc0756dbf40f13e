"""Compiling one variant and launching the stored object: Triton on a device, the contracts on a CPU.

A compiler is asked once a variant, with scratch tensors of the layout the variant is for, and returns a launch: an
object that needs no JIT, no cache look-up and no environment to run. Kernels: :mod:`k3_ascend.kernels.state_copy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from k3_ascend.state_copy.layout import WORDS, Layout, PlanKind
from k3_core.operators import contract

#: Elements a task of the dense kernels moves.
BLOCK = 8192
#: Programs on a CUDA device for each multiprocessor (the same sources are tried there).
_PROGRAMS_PER_SM = 8


class Direction(StrEnum):
    """Which way the states move."""

    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True)
class Variant:
    """One of the four variants of a layout."""

    kind: PlanKind
    direction: Direction
    index_dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kind} {self.direction} {str(self.index_dtype).removeprefix('torch.')}"


class Launch(Protocol):
    """A compiled variant."""

    def __call__(self, cache: Tensor, indices: Tensor, flags: Tensor | None, packed: Tensor) -> None:
        """Launch on the current stream for indices.shape[0] >= 1 rows; flags are given for a gather only."""

    def hooked(self) -> str | None:
        """What would run before the kernel that was not there when it was prepared, or None."""


class Compiler(Protocol):
    """What prepares the variants of a plan."""

    def compile(
        self, variant: Variant, layout: Layout, cache: Tensor, indices: Tensor, flags: Tensor, packed: Tensor
    ) -> Launch:
        """Compile a variant for a layout and launch it once on scratch of one row (index 0, flag true)."""

    def hooks(self) -> dict[str, Any]:
        """JIT hooks by name, as objects to compare."""

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device; raises what a launch left behind."""


class ContractCompiler:
    """The contracts of k3_core behind the plan, for tests of the model on CPU tensors: nothing is compiled."""

    def compile(
        self, variant: Variant, layout: Layout, cache: Tensor, indices: Tensor, flags: Tensor, packed: Tensor
    ) -> Launch:
        """See Compiler."""
        launch = _ContractLaunch(variant.direction)
        launch(cache, indices, flags, packed)
        return launch

    def hooks(self) -> dict[str, Any]:
        """None exist."""
        return {}

    def synchronize(self, device: torch.device) -> None:
        """Nothing runs asynchronously."""


@dataclass(frozen=True)
class _ContractLaunch:
    direction: Direction

    def __call__(self, cache: Tensor, indices: Tensor, flags: Tensor | None, packed: Tensor) -> None:
        if self.direction is Direction.GATHER:
            contract.state_gather(cache, indices, flags, out=packed)
        else:
            contract.state_scatter(cache, indices, packed)

    def hooked(self) -> str | None:
        return None


class TritonCompiler:
    """Triton (triton-ascend 3.2 on an NPU; upstream releases on other devices, where the same sources are tried).

    programs: most programs of a grid; None asks the driver for the vector cores. block: elements a task of the dense
    kernels moves, a power of two.
    """

    def __init__(self, programs: int | None = None, block: int = BLOCK) -> None:
        import triton
        from triton.runtime import driver

        self._triton, self._driver, self._programs, self._block = triton, driver, programs, block
        release = tuple(int(part) for part in triton.__version__.split(".")[:2])
        #: Launchers take the constexprs too since 3.3, before that only the other arguments.
        self._passes_constexprs = release >= (3, 3)

    def compile(
        self, variant: Variant, layout: Layout, cache: Tensor, indices: Tensor, flags: Tensor, packed: Tensor
    ) -> Launch:
        """See Compiler. RuntimeError if a JIT hook swallowed the compilation."""
        kernel, constants = _kernel(variant, layout, self._block)
        arguments = _arguments(variant, cache, indices, flags, packed)
        compiled = kernel[(1,)](*arguments, 1, **constants)
        if compiled is None:
            raise RuntimeError(f"a JIT hook prevented the compilation of {variant}")
        names = [p.name for p in kernel.params]
        if names[: len(arguments) + 1 + len(constants)] != [*names[: len(arguments) + 1], *constants]:
            raise RuntimeError(f"the parameters of {kernel.__name__} are {names}, not those of its launcher")
        return _TritonLaunch(
            variant,
            kernel,
            compiled,
            tuple(constants.values()) if self._passes_constexprs else (),
            _tasks(layout, self._block),
            self._programs or self._cores(cache.device),
            tuple(kernel.pre_run_hooks),
            self._driver,
        )

    def hooks(self) -> dict[str, Any]:
        """Every place where Triton lets others look into compilation or launch."""
        jit = self._triton.runtime.jit.JITFunction
        found = {f"JITFunction.{n}": getattr(jit, n, None) for n in ("cache_hook", "compiled_hook")}
        kernel = self._triton.compiler.CompiledKernel
        found |= {f"CompiledKernel.{n}": getattr(kernel, n, None) for n in ("launch_enter_hook", "launch_exit_hook")}
        runtime = getattr(getattr(self._triton, "knobs", None), "runtime", None)
        for name in ("jit_cache_hook", "jit_post_compile_hook", "launch_enter_hook", "launch_exit_hook"):
            hook = getattr(runtime, name, None)
            calls = getattr(hook, "calls", None)  # a chain of hooks, in newer releases: compare what it holds
            found[f"knobs.runtime.{name}"] = hook if calls is None else tuple(calls)
        return found

    def synchronize(self, device: torch.device) -> None:
        """See Compiler."""
        getattr(torch, device.type).synchronize(device)

    def _cores(self, device: torch.device) -> int:
        """Programs that fill the device: its vector cores."""
        if device.type == "cuda":
            return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_SM
        properties = self._driver.active.utils.get_device_properties(device.index)
        cores = int(properties.get("num_vectorcore", 0))
        if cores < 1:
            raise RuntimeError(f"the Triton driver does not tell the vector cores of {device}: {sorted(properties)}")
        return cores


@dataclass(frozen=True)
class _TritonLaunch:
    """A compiled kernel and the argument order it was prepared with. The stream is asked for at each call."""

    variant: Variant
    kernel: Any
    compiled: Any
    constants: tuple[int | bool, ...]
    tasks: int
    programs: int
    prepared_hooks: tuple[Any, ...]
    driver: Any

    def __call__(self, cache: Tensor, indices: Tensor, flags: Tensor | None, packed: Tensor) -> None:
        rows = indices.shape[0]
        grid = (min(rows * self.tasks, self.programs), 1, 1)
        stream = self.driver.active.get_current_stream(cache.device.index)
        arguments = _arguments(self.variant, cache, indices, flags, packed)
        self.compiled[grid](*arguments, rows, *self.constants, stream=stream)

    def hooked(self) -> str | None:
        if tuple(self.kernel.pre_run_hooks) != self.prepared_hooks:
            return f"a pre-run hook was added to the kernel {self.kernel.__name__}"
        return None


def _arguments(
    variant: Variant, cache: Tensor, indices: Tensor, flags: Tensor | None, packed: Tensor
) -> tuple[Tensor, ...]:
    """Tensor arguments in the order of the kernels; the byte-copy plan sees integers of the element's width."""
    if variant.kind is PlanKind.BYTES:
        word = WORDS[cache.element_size()]
        cache, packed = cache.view(word), packed.view(word)
    if variant.direction is Direction.SCATTER:
        return cache, indices, packed
    assert flags is not None, "a gather is launched with flags"
    return cache, indices, flags.view(torch.int8), packed


def _kernel(variant: Variant, layout: Layout, block: int = BLOCK) -> tuple[Any, dict[str, int | bool]]:
    """The kernel of a variant and its constexprs, in the order of its parameters."""
    from k3_ascend.kernels import state_copy as kernels

    slots = {"NUM_SLOTS": layout.shape[0], "PAGE": layout.stride[0]}
    if layout.dense:
        dense = {**slots, "PAYLOAD": layout.payload, "BLOCK": block}
        if variant.direction is Direction.SCATTER:
            return kernels.scatter_pages, dense
        return kernels.gather_pages, {**dense, "CLEAR": variant.kind is PlanKind.FUSED}
    (h, v, k), strides = layout.shape[1:], layout.stride[1:]
    runs = {"H": h, "V": v, "K": k, "H_STRIDE": strides[0], "V_STRIDE": strides[1], "K_STRIDE": strides[2]}
    kernel = kernels.gather_runs if variant.direction is Direction.GATHER else kernels.scatter_runs
    return kernel, {**slots, **runs, "BLOCK": 1 << (k - 1).bit_length()}


def _tasks(layout: Layout, block: int) -> int:
    """Tasks of one row."""
    return -(-layout.payload // block) if layout.dense else layout.shape[1] * layout.shape[2]


def default(device: torch.device) -> Compiler:
    """The compiler of a device: the contracts on a CPU, Triton elsewhere."""
    return ContractCompiler() if device.type == "cpu" else TritonCompiler()
