"""Offsets beyond 2^31 elements in every kernel: the same bits as from the same values side by side.

Operators of the table: the conformance suite's "huge" cases without its oracle and poison, one argument far at a time,
so that they also run in Triton's interpreter on a CPU (memory that nobody touches costs nothing there). The kernels
outside the table have their cases here.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_core.operators import TABLE, Implementation
from k3_core.testing import bounds, far
from k3_core.testing.case import far as far_stride
from k3_nvidia.kernels import attn_res, experts, glue, kda_prefill, kda_step, router, situ, skinny_cute, skinny_gemm

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16
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
CASES = {case.id: case for name in KERNELS for case in far.cases(name, DTYPE)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CUDA and torch.cuda.mem_get_info()[0] < 12 << 30, reason="needs 12 GiB of device memory"),
]
if CUDA:
    pytestmark.append(pytest.mark.gpu)


@pytest.mark.parametrize("name", far.params(CASES))
def test_operators_of_the_table(name: str) -> None:
    case = CASES[name]
    far.check(case, KERNELS[case.operator], DEVICE)


def test_every_operator_with_a_kernel_has_a_case() -> None:
    assert set(KERNELS) == set(TABLE) - {"state_gather", "state_scatter"}  # copies of vLLM's runner, not kernels here
    assert {case.operator for case in CASES.values()} == set(KERNELS)


def test_a_narrow_offset_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison is worth: a kernel that reads the last row from the offset cut to 32 bits."""

    def narrow(x: Tensor, beta: float, linear_beta: float | None, *, out: Tensor | None = None) -> Tensor:
        if x.stride(0) > 1 << 20:
            x = torch.stack([x[0], x[1], x[0]])  # 2 * 2^30 elements of 2 bytes are 0 in 32 bits
        return situ.situ_and_mul(x, beta, linear_beta, out=out)

    case = next(case for name, case in CASES.items() if name.startswith("situ") and "far_x" in name)
    with pytest.raises(AssertionError, match="out differs"):
        far.check(case, Implementation("situ", "narrow", narrow), DEVICE)


# ------------------------------------------------------------------------------------------- kernels outside the table


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).to(DEVICE, DTYPE)


def marked_norms(x: Tensor, q: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The norms and marks of rows of which the first has an infinite value and marks the second; marks are far too."""
    x[0, 2000] = float("inf")
    marks = x[:, :1]
    bounds = torch.tensor([0, 2, 3], dtype=torch.int32, device=x.device)
    low, normed, _ = glue.low_rank_norms(
        x[:, :1536], x[:, 1536:1984], q, w, 1e-6, 768, shared=x[:, 1984:], marks=marks, bounds=bounds
    )
    assert low is not None
    return low, normed, marks.isnan()


Call = Callable[..., Any]
OUTSIDE: dict[str, tuple[Call, list[Tensor], int]] = {
    # name: (call of its tensors, tensors, the one that is far)
    "sigmoid_fp32": (glue.sigmoid_fp32, [rows(3, 96)], 0),
    "rms_norm": (lambda x, w: glue.rms_norm(x, w, 1e-5), [rows(3, 1536), rows(1, 1536, 1)[0]], 0),
    "sigmoid_mul.x": (glue.sigmoid_mul, [rows(3, 768), rows(3, 768, 1)], 0),
    "sigmoid_mul.gate": (glue.sigmoid_mul, [rows(3, 768), rows(3, 768, 1)], 1),
    "low_rank_norms": (
        lambda x, q, w: glue.low_rank_norms(x[:, :1536], x[:, 1536:], q, w, 1e-6, 768),
        [rows(3, 2048), rows(1, 1536, 1)[0], rows(1, 512, 2)[0]],
        0,
    ),
    "low_rank_norms.marks": (marked_norms, [rows(3, 2048), rows(1, 1536, 1)[0], rows(1, 448, 2)[0]], 0),
    "kda_inputs.weight": (
        lambda f, b, w: glue.kda_inputs(f, b, w),
        [rows(4, 128), rows(4, 6, 1), rows(6 * 128, 128, 2)],
        2,
    ),
    "router_logits.weight": (router.router_logits, [rows(5, 512), rows(96, 512, 1)], 1),
    "router_logits.x": (router.router_logits, [rows(5, 512), rows(96, 512, 1)], 0),
    **{
        f"skinny_gemm.{kind}": (
            lambda x, w, kind=kind: skinny_gemm.skinny_gemm(x, w, skinny_gemm.Config(kind, 16, 128, 2, 4)),
            [rows(4, 512), rows(96, 512, 1)],
            1,
        )
        for kind in ("vector", "dot")
    },
}


def compare_placed(function: Call, tensors: list[Tensor], which: int) -> None:
    def named(result: Any) -> dict[str, Tensor]:
        parts = result if isinstance(result, tuple) else (result,)
        return {str(i): part for i, part in enumerate(parts)}

    apart = [far.placed(x, far_stride(x) if i == which else None) for i, x in enumerate(tensors)]
    with contextlib.nullcontext() if CUDA else bounds.watched():
        dense = named(function(*map(far.placed, tensors)))
    far.same(named(function(*apart)), dense)


@pytest.mark.parametrize("name", OUTSIDE)
def test_kernels_outside_the_table(name: str) -> None:
    compare_placed(*OUTSIDE[name])


def test_few_rows_that_are_too_far_apart_are_refused() -> None:
    """Up to 16 rows: their offsets are 32-bit products, and nothing that a model hands over comes near."""
    apart = torch.empty(1, dtype=DTYPE, device="meta").as_strided((4, 512), (1 << 27, 1))
    weight = torch.empty(96, 512, dtype=DTYPE, device="meta")
    assert skinny_gemm.supports(weight[:4], weight)[0]
    assert "elements apart" in skinny_gemm.supports(apart, weight)[1]
    with pytest.raises(ValueError, match="too far"):
        glue.kda_inputs(apart[:, :128], weight[:4, :6], weight[:, :128])


@pytest.mark.skipif(not CUDA, reason="the CuTe kernel runs on a GPU only")
def test_the_cute_product() -> None:
    ok, why = skinny_cute.available()
    if not ok:
        pytest.skip(why)
    x, weight = rows(4, 512), rows(128, 512, 1)
    config = next(iter(skinny_cute.candidates(4, 128, 512)))
    compare_placed(lambda x, w: skinny_cute.skinny_cute(x, w, config), [x, weight], 1)


@pytest.mark.long
@pytest.mark.parametrize("which", ["prefix", "delta", "bank"])
def test_the_ring_of_attn_res(which: str) -> None:
    """The form that the tuning table does not choose yet."""
    case = next(case for name, case in CASES.items() if name.startswith("attn_res:") and f"far_{which}." in name)
    ring = attn_res.Config(chunk=1024, warps=4, group=1, prefetch=False, programs=1, ring=3)
    function = functools.partial(attn_res.attn_res, config=ring)
    far.check(case, Implementation("attn_res", "ring", function), DEVICE)
