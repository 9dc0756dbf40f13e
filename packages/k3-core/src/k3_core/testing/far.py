"""The suite's "huge" cases without its oracle and poison: a far argument gives the bits that a dense one gives.

Nothing is allocated but the memory a call touches (on a CPU untouched pages cost nothing), so the cases also run in
Triton's interpreter, and several of them fit a device at a time. The conformance suite has the oracle for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3_core.operators import TABLE, Implementation
from k3_core.operators.triton_host import interpreting
from k3_core.testing import conformance, triton_interpreter
from k3_core.testing.case import Case, Inputs
from k3_core.testing.poison import bits


def cases(operator: str, dtype: torch.dtype) -> list[Case]:
    """The "huge" cases of an operator but that of large expert weights, whose bytes are all needed."""
    found = conformance.cases(operator, ("huge",), [torch.float32 if operator == "route" else dtype])
    return [case for case in found if case.options["far"] != ("weights",)]


def params(found: Mapping[str, Case]) -> list[Any]:
    """Test parameters. The interpreter takes up to minutes a case: there only the quick ones run unless all are asked
    for (the marker "long"); on a device all run."""
    import pytest

    quick = {"route", "situ", "gated_norm", "state_gather", "state_scatter"}
    return [
        pytest.param(name, marks=pytest.mark.long)
        if interpreting() and case.operator not in quick and case.options["far"] != ("conv_state",)
        else name
        for name, case in found.items()
    ]


def placed(value: Tensor, stride: tuple[int, ...] | None = None) -> Tensor:
    """A copy of value with these strides, or dense; what lies between is not touched."""
    if stride is None or not value.numel():
        return value.clone(memory_format=torch.contiguous_format)
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, stride, strict=True))
    view = torch.empty(extent, dtype=value.dtype, device=value.device).as_strided(value.shape, stride)
    view.copy_(value)
    return view


def call(
    case: Case, inputs: Inputs, implementation: Implementation, strides: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The operator with its arguments placed so; what it returns and changes, by name."""
    op = TABLE[case.operator]
    tensors = {name: placed(value, strides.get(name)) for name, value in inputs.tensors.items()}
    known: dict[str, Any] = {**tensors, **inputs.scalars}
    if "weights" in known:
        known["weights"] = implementation.prepare(known["weights"])
    if "out" in strides:
        expected = case.expect(case, inputs)["out"].value
        known["out"] = placed(torch.zeros(expected.shape, dtype=case.dtype, device=expected.device), strides["out"])
    positional = [known.get(a.name) for a in op.args if not a.keyword]
    keywords = {a.name: known[a.name] for a in op.args if a.keyword and a.name in known}
    returned = implementation(*positional, **keywords)
    results = {a.name: tensors[a.name] for a in op.args if a.role == "inout"}
    if not op.returns:
        return results
    parts = (returned,) if len(op.returns) == 1 else returned
    return results | dict(zip(op.returns, parts, strict=True))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """AssertionError unless all results have equal bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(bits(a[name].contiguous()), bits(b[name].contiguous())), f"{name} differs"


def check(case: Case, implementation: Implementation, device: torch.device) -> None:
    """AssertionError unless far and dense give equal bits."""
    if interpreting():
        triton_interpreter.hasten()
    inputs = case.inputs(device)
    near = {name: stride for name, stride in inputs.strides.items() if name not in case.options["far"]}
    same(call(case, inputs, implementation, inputs.strides), call(case, inputs, implementation, near))
