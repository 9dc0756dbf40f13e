"""The vocabulary of the operator table: arguments, operators, tolerances, and the check of a launcher's signature.

Nothing here launches anything. An operator is described as data so that the kernels of three vendors, their tests, the
dispatch at run time and the documentation read one source.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from k3_core.errors import UnsupportedError

Role = Literal["in", "inout", "out"]
Layout = Literal["scalar", "dense", "rows", "pool", "conv_pool", "any"]

#: What each layout promises to the launcher, and therefore what a launcher must accept or refuse with a reason.
LAYOUTS: Mapping[Layout, str] = {
    "scalar": "a Python number, string or object, no tensor",
    "dense": "contiguous",
    "rows": "axes after the first are contiguous; stride(0) is anything >= the row, so padded rows and slices of a "
    "fused projection are legal. Addresses and stride(0) are multiples of 16 bytes, unless the row itself is not",
    "pool": "one payload per slot, contiguous inside; stride(0) (the cache page) is anything >= the payload and may "
    "exceed 4 GiB in bytes; gaps between payloads belong to others and are neither used nor written",
    "conv_pool": "as pool, but inside a slot either axis may be the contiguous one: SD (channel contiguous, vLLM's "
    "default, handed over as a transposed view) or DS (column contiguous)",
    "any": "any strides, negative excluded",
}

#: Symbolic dtypes of the table.
DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "act": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "f32": (torch.float32,),
    "param": (torch.float32, torch.bfloat16, torch.float64),
    "state": (torch.float32, torch.bfloat16, torch.float64),
    "index": (torch.int32, torch.int64),
    "i32": (torch.int32,),
    "bool": (torch.bool,),
    "copy": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}


class Verdict(NamedTuple):
    """Yes or no, and why. The reason is a sentence for a person and is never empty."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Arg:
    """One parameter of an operator.

    name: the parameter's name. shape: symbols and literals, () for a scalar. dtype: a key of :data:`DTYPES`, or the
    Python type of a scalar. role: ``inout`` is mutated in place, ``out`` is written completely. optional: may be None
    (positional parameters are still required to be passed). keyword: keyword-only. note: meaning and conventions.
    """

    name: str
    shape: tuple[str, ...] = ()
    dtype: str = "act"
    role: Role = "in"
    layout: Layout = "dense"
    optional: bool = False
    keyword: bool = False
    default: Any = inspect.Parameter.empty
    note: str = ""

    def render(self) -> str:
        """``name [T, H] act inout rows`` for tables and messages."""
        shape = f" [{', '.join(self.shape)}]" if self.shape else ""
        extra = "".join((f" {self.role}" if self.role != "in" else "", " optional" if self.optional else ""))
        return f"{self.name}{shape} {self.dtype}{extra} {self.layout}"


@dataclass(frozen=True)
class Bound:
    """How far one result may be from the fp64 oracle.

    norm: ||x - ref|| / ||scale|| over the whole tensor. rtol, atol: every element obeys
    ``|x - ref| <= rtol * |ref| + atol * scale + floor``. scale is the rms of the reference over the element's row (the
    last axis, the last two of a state), so that ||scale|| = ||ref||; where the terms of a sum cancel, the oracle gives
    the size of the terms instead. floor: absolute, where small values mean nothing. exact: same bits, nothing else is
    looked at.
    """

    norm: float = 0.0
    rtol: float = 0.0
    atol: float = 0.0
    floor: float = 0.0
    exact: bool = False
    reason: str = ""


EXACT = Bound(exact=True, reason="moves or copies values, or is defined by one rounding; arithmetic leaves no choice")


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    results: what is compared (``out`` plus every mutated argument). contract: dotted name of the mathematics it is
    compared with. bounds: {dtype name: {result: Bound}}. rules: the conventions that every implementation obeys.
    why: why the operator is cut here.
    """

    name: str
    summary: str
    args: tuple[Arg, ...]
    returns: tuple[str, ...]
    contract: str
    bounds: Mapping[str, Mapping[str, Bound]]
    rules: tuple[str, ...] = ()
    why: str = ""
    results: tuple[str, ...] = field(default=())

    def signature(self) -> inspect.Signature:
        """The signature as Python sees it; annotations are left out on purpose."""
        kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
        return inspect.Signature([inspect.Parameter(a.name, kinds[a.keyword], default=a.default) for a in self.args])

    def arg(self, name: str) -> Arg:
        """The parameter called name; KeyError otherwise."""
        for a in self.args:
            if a.name == name:
                return a
        raise KeyError(f"operator {self.name} has no parameter {name}")

    def contract_function(self) -> Callable[..., Any]:
        """The function of :mod:`k3_core.contracts` that holds the formula."""
        module, _, name = self.contract.rpartition(".")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def bound(self, result: str, dtype: torch.dtype) -> Bound:
        """The tolerance of one result for an activation dtype.

        Raises UnsupportedError where the table has none: a dtype without a derived tolerance is not comparable.
        """
        table = self.bounds.get(str(dtype).removeprefix("torch."), {})
        if result not in table:
            raise UnsupportedError(
                f"operator {self.name}: no tolerance for result {result!r} in {dtype}; the table in "
                f"k3_core.operators.table has {sorted(self.bounds)}"
            )
        return table[result]


def check_signature(operator: Operator, function: Callable[..., Any]) -> Verdict:
    """Whether a launcher's parameters are the table's: names, order, kinds and defaults.

    Further parameters are legal only if they are keyword-only with a default (tuning, a prepared plan, a workspace):
    they may change speed, never results. ``*args`` and ``**kwargs`` are refused because they hide spelling mistakes.
    """
    try:
        actual = inspect.signature(function)
    except (TypeError, ValueError) as error:
        return Verdict(False, f"{operator.name}: the signature cannot be read ({error})")
    wanted = operator.signature()
    for p in actual.parameters.values():
        if p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            return Verdict(False, f"{operator.name}: *{p.name} hides the parameters; spell them out")
    for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        want = [p for p in wanted.parameters.values() if p.kind is kind]
        have = [p for p in actual.parameters.values() if p.kind is kind]
        if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and [p.name for p in have] != [p.name for p in want]:
            return Verdict(
                False, f"{operator.name}: parameters are {[p.name for p in have]}, must be {[p.name for p in want]}"
            )
        by_name = {p.name: p for p in have}
        for p in want:
            if p.name not in by_name:
                return Verdict(False, f"{operator.name}: keyword-only parameter {p.name!r} is missing")
            if by_name[p.name].default != p.default and by_name[p.name].default is not p.default:
                return Verdict(
                    False,
                    f"{operator.name}: default of {p.name!r} is {_text(by_name[p.name].default)}, "
                    f"must be {_text(p.default)}",
                )
        for p in have:
            if p.name not in {q.name for q in want} and p.default is inspect.Parameter.empty:
                return Verdict(
                    False, f"{operator.name}: {p.name!r} is not in the table; an extra parameter needs a default"
                )
    return Verdict(True, f"{operator.name}: signature is the table's")


def _text(default: Any) -> str:
    return "absent" if default is inspect.Parameter.empty else repr(default)
