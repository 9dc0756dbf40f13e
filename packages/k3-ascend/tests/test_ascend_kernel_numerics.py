"""Numerics of every Triton kernel: triton-ascend's own lowering to linalg, executed on the CPU, against the contracts.

The launchers are the real ones; only the launch goes to an executor (ci/ascend_kernels/execute.py). Local buffers start
as NaN, `out` and fresh tensors too. Small cases of every kind and cases of released size (hidden 7168, D 128).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend_kernel_support import executor, kernel_module, tools

from k3_core.contracts import kda, mxfp4
from k3_core.testing import conformance
from k3_core.testing.case import Case

pytest.importorskip("triton", reason="the kernels need Triton")
tools("execute")

BF16 = (torch.bfloat16,)

#: What a full run of the suite takes minutes for: real cases are chosen by what they add (words of their names).
REAL = {
    "attn_res": ("n0.delta.norm.write0.T67", "n5.delta.strided.T67", "n8.delta.norm.T67", "n8.delta.strided.special"),
    "situ": ("T5.I6144.strided:", "T33.I33792.linear"),
    "gated_norm": ("T67.N12",),
    "short_conv": ("5_1_0_2_64.SD.strided.spec7.C2304", "150.SD.C4608"),
    "kda_decode": ("T33.spec0", "T5.spec2", "T4.spec0.long.SD.bf16state", "T6.spec0.mixed.SD.softplus"),
    "kda_verify": ("8_3_0_1_5", "4_4_4_4", "3_2.a2_3.spec2.long.SD.bf16state"),
    "kda_prefill": (
        "all11.bound", "65_0_1_64.long", "65_17.mixed.softplus", "130_64.long", "1_66_30", "70_33_20", "40_20",
    ),
}  # fmt: skip


def _wanted(case: Case) -> bool:
    if case.options.get("layout", "SD") == "DS" or case.sizes.get("N", 2) not in (2, 3, 6, 12, 1):
        return False  # refused, see below; other head counts change no kernel
    if case.scale == "real":
        return case.dtype is torch.bfloat16 and any(word in case.id for word in REAL[case.operator])
    if case.sizes.get("D", case.sizes.get("K", 16)) < 16 or case.sizes.get("V", 16) != case.sizes.get("K", 16):
        return False
    if case.operator == "attn_res":  # a NaN in the prefix: its payload is the platform's, the row is checked below
        return "neighbour_nan" not in case.id and (case.dtype is torch.bfloat16 or ":n3" in case.id)
    if case.operator in ("kda_decode", "kda_verify") and case.dtype is torch.float32:
        return "strided" in case.id
    return True


def _cases() -> list[Any]:
    found = []
    for name in REAL:
        for case in conformance.cases(name, ("small", "real")):
            if _wanted(case) and (case.dtype is torch.bfloat16 or name != "kda_prefill"):  # its products are bfloat16
                found.append(pytest.param(case, id=f"{case.scale}:{case.id}"))
    return found


@pytest.fixture(scope="module")
def run() -> Any:
    """Launches go to one executor."""
    with kernel_module("launch").executing_with(executor()) as done:
        yield done


@pytest.mark.parametrize("case", _cases())
def test_conforms(case: Case, run: Any) -> None:
    implementation = kernel_module("catalogue").IMPLEMENTATIONS[case.operator]
    row = conformance.run_case(case, implementation)
    assert row.verdict == "pass", f"{row.case}: {row.reason}"


def test_every_real_choice_exists() -> None:
    """A renamed case would silently leave the list."""
    for name, words in REAL.items():
        names = [c.id for c in conformance.cases(name, ("real",), BF16)]
        for word in words:
            assert any(word in n for n in names), f"{name}: no real case is called {word}; there are {names}"


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("heads", [3, 12])
def test_gate(bound: float | None, heads: int, run: Any) -> None:
    """Relative 2e-6, the contract's; the sum of 64 of them likewise, plus fp32 addition."""
    g = torch.Generator().manual_seed(heads)
    z = (torch.randn(133, heads, 128, generator=g) * 3).bfloat16()
    a_log, dt_bias = torch.randn(heads, generator=g) * 0.3, torch.randn(heads, 128, generator=g) * 3 - 2
    want = kda.gate(z.double(), a_log.double(), dt_bias.double(), bound)
    out = torch.full(z.shape, float("nan"))
    got = kernel_module("kda_gate").kda_gate(z, a_log, dt_bias, bound, out=out)
    assert got is out
    torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=1e-12)
    plan = kernel_module("kda_plan").plan_prefill([0, 65, 65, 130], "cpu")
    sums = kernel_module("kda_gate").kda_cumulative_gate(z, a_log, dt_bias, bound, plan)
    expected = torch.zeros_like(want)
    for first, end in ((0, 64), (64, 65), (65, 129), (129, 130)):
        expected[first:end] = want[first:end].cumsum(0)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-12)
    assert not sums[130:].any()


def test_mxfp4_is_exact(run: Any) -> None:
    """Every byte under every scale, infinities, NaN and subnormals included; then a row count off the tile."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    _same_weights(packed, scale)
    g = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (3, 37, 48), dtype=torch.uint8, generator=g)
    _same_weights(packed, torch.randint(100, 150, (3, 37, 3), dtype=torch.uint8, generator=g))


def _same_weights(packed: torch.Tensor, scale: torch.Tensor) -> None:
    want = mxfp4.unpack(packed, scale, torch.bfloat16)
    got = kernel_module("mxfp4").unpack_mxfp4(packed, scale)
    assert torch.equal(got.isnan(), want.isnan())
    keep = ~want.isnan()
    assert torch.equal(got.view(torch.int16)[keep], want.view(torch.int16)[keep])


@pytest.mark.parametrize("programs", [1, 7])
def test_the_number_of_programs_changes_no_bit(programs: int) -> None:
    """Persistent loops: one core, or a count that divides nothing, gives what forty give."""
    names = ("attn_res", "kda_prefill", "kda_verify", "short_conv")
    for name in names:
        case = next(c for c in conformance.cases(name, ("small",), BF16) if _wanted(c))
        implementation = kernel_module("catalogue").IMPLEMENTATIONS[name]
        with kernel_module("launch").executing_with(executor(programs)):
            row = conformance.run_case(case, implementation)
        assert row.verdict == "pass", f"{name} with {programs} programs: {row.reason}"


def test_nan_stays_in_its_row(run: Any) -> None:
    """AttnRes with a NaN prefix in one row: that row is NaN, every other is what it is without it."""
    g = torch.Generator().manual_seed(3)
    prefix, delta = (torch.randn(5, 512, generator=g).bfloat16() for _ in range(2))
    bank = torch.randn(5, 3, 512, generator=g).bfloat16()
    weight = torch.rand(512, generator=g)
    attn_res = kernel_module("attn_res").attn_res
    clean = attn_res(prefix.clone(), delta, bank.clone(), weight, weight, 1e-5, 3)
    prefix[2] = float("nan")
    got = attn_res(prefix, delta, bank, weight, weight, 1e-5, 3)
    assert got[2].isnan().all()
    assert prefix[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], clean[others])


def test_every_kernel_is_launched_by_a_profile() -> None:
    """The warm-up meets every kernel, and both models' configurations give profiles that run."""
    calls = tools("calls")
    met = {kernel.__name__ for kernel, _ in calls.variants()}
    assert met == calls.kernels()
