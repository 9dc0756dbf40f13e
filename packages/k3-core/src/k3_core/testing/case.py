"""Cases: what an operator is called with, made from a name alone, and what must come out.

A :class:`Case` is data; ``inputs`` draws its tensors from a generator seeded by the case's name, so that a case means
the same everywhere. :class:`Problem` places the tensors in an arena with the strides that the case asks for.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from k3_core.operators import TABLE, Arg, CallSpec, ExpertWeights, Implementation, Operator
from k3_core.testing.compare import Expected, Outcome
from k3_core.testing.poison import Arena

Sizes = Literal["small", "real", "huge"]


class Draw:
    """Random tensors of a case. Drawn on the CPU in fp32 (so every device sees the same), moved afterwards."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self.seed = zlib.crc32(name.encode())
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Gaussian fp32."""
        return (torch.randn(shape, generator=self.generator) * scale + mean).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniform fp32."""
        return (torch.rand(shape, generator=self.generator) * (high - low) + low).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def permutation(self, n: int) -> Tensor:
        """A permutation of 0..n-1, int64."""
        return torch.randperm(n, generator=self.generator).to(self.device)

    def bytes(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform uint8 in [low, high). Weights of real size (a billion bytes) are drawn on the device itself."""
        if math.prod(shape) < 1 << 24:
            return torch.randint(low, high, shape, generator=self.generator, dtype=torch.uint8).to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8, device=self.device)


@dataclass
class Inputs:
    """Logical arguments of one call, dense: tensors and scalars by parameter name, and wanted strides."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Any] = field(default_factory=dict)
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    free_rows: Tensor | None = None  # token rows whose result is not judged (their inputs are NaN)
    free_slots: tuple[int, ...] = ()  # slots whose state is not judged, for the same reason


@dataclass(frozen=True)
class Case:
    """One call of an operator. sizes: the symbols of the table; options: everything else, also told to supports()."""

    operator: str
    name: str
    dtype: torch.dtype
    make: Callable[[Case, Draw], Inputs]
    expect: Callable[[Case, Inputs], dict[str, Expected]]
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: Sizes = "small"
    check: Callable[[Case, Inputs, dict[str, Tensor]], list[Outcome]] | None = None

    @property
    def id(self) -> str:
        """Unique and readable: operator, name, dtype."""
        return f"{self.operator}:{self.name}:{str(self.dtype).removeprefix('torch.')}"

    def spec(self, device: torch.device) -> CallSpec:
        """The capability query for this case on a device."""
        arch = ""
        if device.type == "cuda" and torch.version.hip is None:
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        elif device.type == "cuda":
            arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return CallSpec(self.operator, device.type, self.dtype, arch, dict(self.sizes), dict(self.options))

    def inputs(self, device: torch.device) -> Inputs:
        """Draws the tensors."""
        return self.make(self, Draw(self.id, device))


@dataclass
class Problem:
    """A case in memory: an arena with every argument, the expected results, and the call."""

    case: Case
    inputs: Inputs
    operator: Operator
    arena: Arena
    expected: dict[str, Expected]
    weights: Any = None

    @classmethod
    def build(cls, case: Case, inputs: Inputs, device: torch.device, implementation: Implementation) -> Problem:
        """Computes the oracle and lays out the memory; an `out` parameter gets a poisoned buffer."""
        op = TABLE[case.operator]
        expected = case.expect(case, inputs)
        arena = Arena(device)
        for name, value in inputs.tensors.items():
            arena.add(name, value, inputs.strides.get(name))
        if _has_out(op):
            want = expected["out"].value
            nothing = torch.full(want.shape, float("nan"), dtype=out_dtype(case, inputs), device=device)
            arena.add("out", nothing, inputs.strides.get("out"))
        arena.build()
        weights = inputs.scalars.get("weights")
        if isinstance(weights, ExpertWeights):
            weights = implementation.prepare(weights)
        return cls(case, inputs, op, arena, expected, weights)

    def call(self, function: Callable[..., Any], with_out: bool) -> dict[str, Tensor]:
        """Runs the operator; returns its results by name (views of the arena for mutated arguments)."""
        positional = [self._value(a) for a in self.operator.args if not a.keyword]
        keywords = {a.name: self._value(a) for a in self.operator.args if a.keyword and a.name != "out"}
        if with_out:
            keywords["out"] = self.arena.views["out"]
        returned = function(*positional, **keywords)
        results = {a.name: self.arena.views[a.name] for a in self.operator.args if a.name in self.operator.results}
        names = self.operator.returns
        if len(names) == 1:
            results[names[0]] = returned
        elif names:
            results.update(zip(names, returned, strict=True))
        return results

    def _value(self, a: Arg) -> Any:
        if a.name == "weights":
            return self.weights
        if a.name in self.arena.views:
            return self.arena.views[a.name]
        if a.name in self.inputs.scalars:
            return self.inputs.scalars[a.name]
        if a.optional:
            return None
        raise KeyError(f"{self.case.id}: no value for {a.name}")

    def allowed(self) -> dict[str, Tensor | bool]:
        """Elements that the call may change, for Arena.violations."""
        allowed: dict[str, Tensor | bool] = {"out": True} if _has_out(self.operator) else {}
        for a in self.operator.args:
            if a.role != "inout" or a.name not in self.expected:
                continue
            e = self.expected[a.name]
            masks = [m for m in (e.mask, e.free) if m is not None]
            allowed[a.name] = True if e.mask is None else torch.stack([m.expand(e.value.shape) for m in masks]).any(0)
        return allowed


def _has_out(op: Operator) -> bool:
    return any(a.name == "out" for a in op.args)


def out_dtype(case: Case, inputs: Inputs) -> torch.dtype:
    """Dtype of `out`: the activation's, or the cache's for the state copies."""
    return inputs.tensors["cache"].dtype if "cache" in inputs.tensors else case.dtype


def alone(case: Case, inputs: Inputs, sequence: int) -> tuple[Inputs, slice]:
    """The same call with one sequence (or one row, where the operator has no sequences), and that sequence's rows."""
    op, rows = TABLE[case.operator], slice(sequence, sequence + 1)
    tensors = dict(inputs.tensors)
    if "cu_seqlens" in tensors:
        begin, end = (int(x) for x in tensors["cu_seqlens"][sequence : sequence + 2])
        rows = slice(begin, end)
        tensors["cu_seqlens"] = torch.tensor([0, end - begin], dtype=torch.int32, device=tensors["cu_seqlens"].device)
    for a in op.args:
        if a.name in tensors and a.name != "cu_seqlens" and a.shape:
            if a.shape[0] in ("T", "R"):
                tensors[a.name] = tensors[a.name][rows]
            elif a.shape[0] == "B":
                tensors[a.name] = tensors[a.name][sequence : sequence + 1]
    free = None if inputs.free_rows is None else inputs.free_rows[rows]
    # A pool keeps its layout: an implementation may have claimed one of SD and DS only.
    strides = {n: s for n, s in inputs.strides.items() if n == "conv_state"}
    return replace(inputs, tensors=tensors, strides=strides, free_rows=free), rows


#: Elements between the first and the last row (or slot) of an argument that is far in a "huge" case.
FAR = 1 << 31


def far(value: Tensor) -> tuple[int, ...]:
    """Strides of a tensor whose last row lies FAR elements behind its first; axes after the first stay contiguous.

    With R rows a row is FAR / (R - 1) from the next: that offset, and that of a few rows in a tile, fits 32 bits, as
    those of a model's activations do; a row's number times the stride does not.
    """
    step = -(-FAR // (value.shape[0] - 1))
    return (-(-step // 64) * 64, *torch.empty(value.shape[1:], device="meta").stride())


def far_strides(case: Case, **values: Tensor) -> dict[str, tuple[int, ...]]:
    """Strides of the arguments that a "huge" case places far."""
    return {name: far(values[name]) for name in case.options["far"] if name in values}


def far_name(options: Mapping[str, Any]) -> str:
    """What a case's name says of them."""
    return "".join(f".far_{name}" for name in options.get("far", ()))


def padded(value: Tensor, gap_bytes: int = 16) -> tuple[int, ...]:
    """Row strides with a gap: axes after the first stay contiguous."""
    inner = math.prod(value.shape[1:])
    gap = max(1, gap_bytes // value.element_size())
    return (inner + gap, *torch.empty(value.shape[1:], device="meta").stride())


def strided_out(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Padded strides for an `out` buffer that does not exist yet."""
    return padded(torch.empty(tuple(shape), dtype=dtype, device="meta"), 32)
