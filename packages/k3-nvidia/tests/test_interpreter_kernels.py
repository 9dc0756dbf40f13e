"""What `k3_core.testing.triton_interpreter.hasten` puts in the place of the interpreter's own code has its results."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import interpreter

from k3_core.operators.triton_host import interpreting
from k3_core.testing import triton_interpreter

pytestmark = pytest.mark.skipif(not interpreting(), reason="is about Triton's interpreter")

CALLS = []


@triton.jit
def _add_and_max(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit
def _first_and_last(a, b, c, d):
    return a, d


def noted(function):
    """Count the calls of the function that a reduction combines by."""

    class Noted:
        @staticmethod
        def fn(*values):
            CALLS.append(values[0].shape)
            return function.fn(*values)

    return Noted


def reduced(reduce, function, data: list[np.ndarray], axis: int, keep: bool) -> list[np.ndarray]:
    parts = tuple(
        tl.tensor(interpreter.TensorHandle(x, tl.float32), tl.block_type(tl.float32, list(x.shape))) for x in data
    )
    CALLS.clear()
    scope = interpreter._patch_lang(function.fn)  # as within a kernel
    try:
        results = reduce(interpreter.ReduceOps(axis, noted(function), keep), parts)
    finally:
        scope.restore()
    return [np.asarray(result.handle.data) for result in results]


@pytest.fixture(scope="module")
def ways():
    """(the interpreter's own reduction, ours)."""
    ours = interpreter.ReduceOps.generic_reduce
    if getattr(ours, "by_halves", False):  # another module of this process has asked for it
        return ours.original, ours
    triton_interpreter.hasten()
    return ours, interpreter.ReduceOps.generic_reduce


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((16,), 0), ((1,), 0), ((4, 8), 0), ((4, 8), 1), ((2, 4, 8), 1)])
@pytest.mark.parametrize("function", [_add_and_max, _first_and_last], ids=["sum and maximum", "first and last"])
def test_a_reduction_has_the_result_of_the_interpreter(ways, function, shape, axis: int, keep: bool) -> None:
    """Whole numbers: no order of summation rounds. The order of operands shows in the first and the last."""
    rng = np.random.default_rng(0)
    data = [rng.integers(-99, 99, shape).astype(np.float32) for _ in range(2)]
    theirs = reduced(ways[0], function, data, axis, keep)
    assert len(CALLS) == data[0].size - data[0].size // shape[axis]
    ours = reduced(ways[1], function, data, axis, keep)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert len(CALLS) == shape[axis].bit_length() - 1, "the function is called once for each halving"


@triton.jit
def _sums(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    total, largest = tl.reduce((x, x), 0, _add_and_max)
    tl.store(out_ptr, total)
    tl.store(out_ptr + 1, largest)


def test_a_kernel_reduces_so(ways) -> None:
    x, out = torch.arange(32, dtype=torch.float32), torch.zeros(2)
    _sums[(1,)](x, out, N=32)
    assert out.tolist() == [32 * 31 / 2, 31]


BUILTINS = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import triton.language as tl
from triton.runtime import interpreter
from k3_core.testing import triton_interpreter

def replaced(place):
    scope = interpreter._LangPatchScope()
    before = {n: m for n in dir(place) if tl.core.is_builtin(m := getattr(place, n))}
    interpreter._patch_builtin(place, interpreter.interpreter_builder, scope)
    found = {n for n in before if getattr(place, n) is not before[n]}
    scope.restore()
    assert [n for n in before if getattr(place, n) is not before[n]] == []
    assert found == set(before)
    return found

places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
first = [replaced(place) for place in places]
triton_interpreter.hasten()
assert interpreter._patch_builtin.__module__ == triton_interpreter.__name__
assert [replaced(place) for place in places] == first
assert len(first[1]) > 50
"""


def test_builtins_are_those_of_the_language() -> None:
    """Each name that the original replaces is replaced, and comes back. In a process of its own: a device function
    leaves its names replaced in this one."""
    subprocess.run([sys.executable, "-c", BUILTINS], check=True, timeout=300)


def test_types_are_those_of_the_interpreter(ways) -> None:
    pointer = tl.pointer_type(tl.bfloat16)
    for kind in (pointer, tl.block_type(pointer, [4])):
        assert interpreter._get_np_dtype(kind) == np.uint64
    for kind, expected in ((tl.bfloat16, np.uint16), (tl.float32, np.float32), (tl.int1, bool), (tl.uint8, np.uint8)):
        assert interpreter._get_np_dtype(kind) == expected
        assert interpreter._get_np_dtype(tl.block_type(kind, [2, 2])) == expected
