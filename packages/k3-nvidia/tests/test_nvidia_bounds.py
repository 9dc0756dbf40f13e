"""No kernel reads or writes outside its tensors, not even what it then throws away (interpreter)."""

from __future__ import annotations

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the interpreter's addresses; on a GPU compute-sanitizer says it", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import triton
import triton.language as tl

from k3_core.operators import Implementation
from k3_core.testing import bounds
from k3_nvidia.kernels import attn_res, experts, kda_prefill, kda_step, router, situ

KERNELS = {
    name: Implementation(name, "triton", function)
    for name, function in (
        ("attn_res", attn_res.attn_res),
        ("short_conv", kda_prefill.short_conv),
        ("kda_prefill", kda_prefill.kda_prefill),
        ("gated_norm", kda_prefill.gated_norm),
        ("kda_decode", kda_step.kda_decode),
        ("kda_verify", kda_step.kda_verify),
        ("route", router.route),
        ("situ", situ.situ_and_mul),
    )
}
KERNELS["experts"] = Implementation("experts", "triton", experts.experts, prepare=experts.prepare)
#: Few of each operator's cases, short ones among them: where tiles hang over the ends.
PARTS = {
    "attn_res": ("n8.delta.strided", "n2.delta.norm.strided.write2.T1"),
    "short_conv": ("1_2_3_4_5_0_17.SD", "7.DS"),
    "kda_prefill": (":1.long", "1_1_1_33"),
    "gated_norm": ("T5", "T1."),
    "kda_decode": ("T1.spec0", "T5.spec7"),
    "kda_verify": ("2_1_2.a1_2_2", "8_3_0"),
    "route": (":T1.", "plain"),
    "experts": (":T1.", ":T5."),
    "situ": ("T1.", "T3."),
}
CASES = bounds.some(PARTS)


@pytest.mark.parametrize("name", CASES)
def test_every_address_lies_in_a_tensor(name: str) -> None:
    bounds.check(CASES[name], KERNELS[CASES[name].operator])


def test_every_kernel_has_cases() -> None:
    assert {case.operator for case in CASES.values()} == set(KERNELS)


@triton.jit
def _copy(x_ptr, out_ptr, n, BACK: tl.constexpr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i - BACK, mask=i < n, other=0.0)
    tl.store(out_ptr + i, x, mask=(i < n) & (i >= BACK))


def test_a_read_before_the_first_element_is_an_error_though_nothing_comes_of_it() -> None:
    x, out = torch.arange(5.0), torch.zeros(5)
    with bounds.watched():
        _copy[(1,)](x, out, 5, BACK=0)
        with pytest.raises(Exception, match="outside every tensor"):
            _copy[(1,)](x, out, 5, BACK=1)
