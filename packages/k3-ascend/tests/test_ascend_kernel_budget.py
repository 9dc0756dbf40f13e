"""Every kernel variant through Huawei's back end for 910B3, 910_93 and 950: unified buffer, element loops, overflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_kernel_support import tools

triton = pytest.importorskip("triton", reason="the kernels need Triton")
tools("bishengir")
import triton.language as tl  # noqa: E402


@triton.jit
def gather_kernel(x_ptr, index_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.arange(0, BLOCK)
    tl.store(out_ptr + c, tl.load(x_ptr + tl.load(index_ptr + c)))


@triton.jit
def wide_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.arange(0, BLOCK)
    tl.store(out_ptr + c, tl.load(x_ptr + c) * 2.0)


def test_the_table_holds() -> None:
    """No variant overflows, takes more than 85 % or loops over elements; use as written down."""
    budget = tools("budget")
    found = list(budget.rows())
    wrong = budget.differences(found, json.loads(budget.TABLE.read_text()))
    assert not wrong, "\n".join(wrong)
    assert {row.generation for row in found} == {"910B3", "910_93", "950"}


@pytest.mark.parametrize("generation", ["910B3", "950"])
def test_element_loops_and_overflow_are_seen(generation: str, tmp_path: Path) -> None:
    """Controls: a gather is a loop over elements, a tile of 1 MiB does not fit."""
    x, index = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    gathered = _measure(generation, gather_kernel, (x, index, x), 256, tmp_path)
    assert any("by elements" in fault for fault in gathered.faults), gathered
    assert any("no structure" in fault for fault in gathered.faults), gathered
    wide = _measure(generation, wide_kernel, (x, x), 1 << 18, tmp_path)
    assert any("overflow" in fault for fault in wide.faults), wide
    fits = _measure(generation, wide_kernel, (x, x), 1024, tmp_path)
    assert not fits.faults, fits


def test_differences_are_reported() -> None:
    budget = tools("budget")
    row = budget.Row("k", "950", 0.5, 0, ())
    assert budget.differences([row], {"k": {"950": [0.51, 0]}}) == []
    assert "the table says 40.0%" in budget.differences([row], {"k": {"950": [0.4, 0]}})[0]
    assert "not in the table" in budget.differences([row], {})[0]
    assert "no launcher starts it" in budget.differences([], {"k": {}})[0]
    assert "fault" in budget.differences([budget.Row("k", "950", 0.5, 0, ("fault",))], {"k": {"950": [0.5, 0]}})[0]


def _measure(generation: str, kernel: Any, args: tuple[Any, ...], block: int, folder: Path) -> Any:
    lower, budget = tools("lower"), tools("budget")
    variant = lower.variant_of(kernel, args, {"BLOCK": block})
    return budget.measure(generation, kernel, variant, lower.to_linalg(kernel, variant), folder)
