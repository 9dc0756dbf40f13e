"""No kernel reads or writes outside its tensors, not even what it then throws away (interpreter)."""

from __future__ import annotations

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the interpreter's addresses", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_amd import kernels
from k3_core.operators import TABLE
from k3_core.testing import bounds

IMPLEMENTATIONS = kernels.implementations()
#: Few of each operator's cases, short ones among them: where tiles hang over the ends.
PARTS = {
    "attn_res": ("n2.delta.norm.strided.write2.T1",),
    "short_conv": ("1_2_3_4_5_0_17.SD",),
    "kda_prefill": ("1_1_1_33.long",),
    "gated_norm": ("T5", "T1."),
    "kda_decode": ("T1.spec0", "T5.spec7"),
    "kda_verify": ("2_1_2.a1_2_2", "8_3_0"),
    "route": (":T1.",),
    "experts": (":T1.", ":T5."),
    "situ": ("T1.", "T3."),
    "state_gather": ("R7.i32.strided",),
    "state_scatter": ("R7.i32",),
}
CASES = bounds.some(PARTS)


@pytest.mark.parametrize("name", CASES)
def test_every_address_lies_in_a_tensor(name: str) -> None:
    bounds.check(CASES[name], IMPLEMENTATIONS[CASES[name].operator])


def test_every_kernel_has_cases() -> None:
    assert {case.operator for case in CASES.values()} == set(TABLE)
