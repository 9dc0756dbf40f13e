"""Every address that a Triton kernel reads or writes, in the interpreter: in a tensor that it was given, or an error.

A compiled kernel that reads past the end of a tensor and does not use the value passes every comparison, until the
allocation ends where mapped memory does; then the process dies. Masks that do not cover such reads show here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from k3_core.operators import Implementation
from k3_core.testing import conformance, far, triton_interpreter
from k3_core.testing.case import Case


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Within it a launch raises AssertionError at the first element outside the storages of its tensors."""
    from triton.runtime import interpreter

    triton_interpreter.hasten()
    builder: Any = interpreter.InterpreterBuilder
    executor: Any = interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__
    ranges: list[tuple[int, int]] = []

    def check(what: str, ptrs: Any, mask: Any) -> None:
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        at = np.asarray(ptrs.data)[np.broadcast_to(np.asarray(mask.data, dtype=bool), np.shape(ptrs.data))]
        inside = np.zeros(at.shape, dtype=bool)
        for begin, end in ranges:
            inside |= (at >= begin) & (at + np.uint64(size) <= end)
        if not inside.all():
            raise AssertionError(f"a {what} outside every tensor of the launch: {int((~inside).sum())} of {at.size}")

    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        check("read", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("write", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def checked_launch(self: Any, *args: Any, **named: Any) -> Any:
        ranges.clear()
        for value in (*args, *named.values()):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return launch(self, *args, **named)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor.__call__ = checked_launch
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store, executor.__call__ = load, store, launch


def some(parts: Mapping[str, Sequence[str]]) -> dict[str, Case]:
    """The small cases, by id, whose ids hold one of their operator's parts; one dtype each."""
    found = {}
    for name, wanted in parts.items():
        for case in conformance.cases(name, ("small",), [torch.float32 if name == "route" else torch.bfloat16]):
            if any(part in case.id for part in wanted):
                found[case.id] = case
    return found


def check(case: Case, implementation: Implementation) -> None:
    """Run a case on tensors whose storages end with them; AssertionError where an access leaves them."""
    inputs = case.inputs(torch.device("cpu"))
    with watched():
        far.call(case, inputs, implementation, {})
