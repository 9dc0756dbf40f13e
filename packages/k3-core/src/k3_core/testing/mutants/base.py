"""How a fault is planted: the contract with one argument, one step or one result changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3_core.operators import Implementation
from k3_core.operators.contract import IMPLEMENTATIONS

Arguments = dict[str, Any]
Run = Callable[..., Any]
Body = Callable[[Arguments, Run], Any]


@dataclass(frozen=True)
class Mutant:
    """A faulty implementation of an operator. what: the fault; caught_by: the case that must fail."""

    name: str
    operator: str
    what: str
    caught_by: str
    body: Body

    def implementation(self) -> Implementation:
        """The mutant with the operator's own signature."""
        original = IMPLEMENTATIONS[self.operator].function
        signature = inspect.signature(original)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            a = dict(bound.arguments)
            return self.body(a, lambda **changes: original(**{**a, **changes}))

        return Implementation(self.operator, f"mutant:{self.name}", function)


MUTANTS: dict[str, Mutant] = {}


def plant(operator: str, what: str, caught_by: str, name: str = "") -> Callable[[Body], Body]:
    """Registers a fault under ``operator.name``; the name is the function's unless given."""

    def register(body: Body) -> Body:
        full = f"{operator}.{name or body.__name__.strip('_')}"
        if full in MUTANTS:
            raise ValueError(f"two mutants are called {full}")
        MUTANTS[full] = Mutant(full, operator, what, caught_by, body)
        return body

    return register


def identity(operator: str) -> Implementation:
    """The contract behind the same wrapper: whatever it fails is a false alarm of the suite."""
    return Mutant("identity", operator, "nothing", "", lambda _, run: run()).implementation()


def put(result: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Deliver a result as the table says."""
    return result.to(dtype).contiguous() if out is None else out.copy_(result)


def dense_view(x: Tensor) -> Tensor:
    """The same address read as if contiguous: what a kernel sees that ignores strides."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def unwritten(result: Tensor, rows: slice) -> Tensor:
    """The kernel never wrote these rows: whatever the buffer held is still there (NaN in the suite)."""
    result[rows] = float("nan")
    return result
