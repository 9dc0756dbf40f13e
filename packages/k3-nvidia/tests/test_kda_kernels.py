"""The KDA kernels against the fp64 oracle: in Triton's interpreter on a CPU, on the device where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import triton
import triton.language as tl

from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec, Implementation
from k3_core.operators.kda_plan import Costs, segment_length
from k3_core.testing import conformance
from k3_core.testing.triton_interpreter import round_to_nearest
from k3_nvidia.kernels import kda_checks, kda_chunk, kda_passes_cuda, kda_plan, kda_prefill, kda_segment, kda_step
from k3_nvidia.tuning import kda as tuning

if kda_checks.interpreted():
    round_to_nearest()

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
IMPLEMENTATIONS = {
    "kda_prefill": (kda_prefill.kda_prefill, kda_prefill.supports_prefill),
    "short_conv": (kda_prefill.short_conv, kda_prefill.supports_short_conv),
    "gated_norm": (kda_prefill.gated_norm, kda_prefill.supports_gated_norm),
    "kda_decode": (kda_step.kda_decode, kda_step.supports_step),
    "kda_verify": (kda_step.kda_verify, kda_step.supports_step),
}
# The interpreter takes seconds a case: a few that together meet every branch. On a device everything runs.
CPU_CASES = {
    "kda_prefill": (
        "65_0_1_64.long",
        "130_20.bound.L5.previous",
        "65_17.mixed.softplus",
        "70_33_20.long.L5.nan_sequence",
    ),
    "short_conv": ("1_2_3_4_5_0_17.SD.null", "5_1_0_2_64.DS.spec7"),
    "gated_norm": ("T5", "T33", "T0"),
    "kda_decode": ("T3.spec0", "T5.spec2", "T6.spec0.long.SD.nan_row", "T4.spec0.long.SD.bf16state"),
    "kda_verify": ("2_1_2.a1_2_2", "1_1_1_1.a4", "3_3.a3_1.spec2.mixed.SD.softplus"),
}


def implementation(name: str) -> Implementation:
    function, supports = IMPLEMENTATIONS[name]
    return Implementation(name, "triton", function, supports)


def chosen(name: str):
    if CUDA:
        return None
    return lambda case: any(f":{part}" in case.id for part in CPU_CASES[name]) and "bfloat16" in case.id


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_conforms(name):
    scales = ("small", "real") if CUDA else ("small",)
    report = conformance.run(name, implementation(name), DEVICE, scales=scales, only=chosen(name))
    assert any(row.verdict == "pass" for row in report.rows)
    report.raise_if_failed()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="the choice between implementations is a device's")
def test_prefill_conforms_through_the_kernels_of_this_wheel(monkeypatch):
    """At every shape, also where the measurements favour FlashKDA; on Hopper through the CUDA kernels of the table."""
    ran = []
    output = kda_passes_cuda.output
    monkeypatch.setattr(kda_passes_cuda, "output", lambda *args, **named: (ran.append(1), output(*args, **named)))
    monkeypatch.setattr(tuning, "prefill_engine", lambda *_: kda_plan.CHUNKS)
    conformance.run("kda_prefill", implementation("kda_prefill"), DEVICE, scales=("small", "real")).raise_if_failed()
    assert ran or torch.cuda.get_device_capability()[0] != 9


@triton.jit
def _always_initial(state_ptr, init_ptr, slot, seq, state_stride, head, rows, cols, D: tl.constexpr):
    at = state_ptr + slot.to(tl.int64) * state_stride + head * (D * D) + rows[:, None] * D + cols[None, :]
    return tl.load(at, mask=rows[:, None] < tl.where(slot > 0, D, 0), other=0.0).to(tl.float32)


@triton.jit
def _no_inverse(M, UPCAST: tl.constexpr):
    i = tl.arange(0, 64)[:, None]
    return tl.where(i == tl.arange(0, 64)[None, :], 1.0, 0.0) - M


@triton.jit
def _clamped_gate(z, rate, bias, lower_bound, BOUNDED: tl.constexpr):
    return tl.maximum(-rate * 1.4426950408889634 * tl.log(1.0 + tl.exp(z + bias)), lower_bound * 1.4426950408889634)


@triton.jit
def _read_before_write(S, q, k, v, decay, beta, rq, rk, kq):
    S = S * decay[None, :]
    u = beta * (v - rk * tl.sum(S * k[None, :], axis=1)) * rk
    return S + u[:, None] * k[None, :], rq * tl.sum(S * q[None, :], axis=1)


MUTANTS = {
    "state of a new sequence read": ("kda_prefill", kda_segment, "_initial", _always_initial, "65_0_1_64.mixed"),
    "triangular system not solved": ("kda_prefill", kda_chunk, "_invert", _no_inverse, "64.long"),
    "clamp of the softplus gate": ("kda_prefill", kda_chunk, "gate_log2", _clamped_gate, "64.mixed"),
    "output read before the write": ("kda_decode", kda_step, "_block_step", _read_before_write, "T3.spec0"),
}


@pytest.mark.skipif(not kda_checks.interpreted(), reason="a compiled kernel keeps its callees")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    operator, module, attribute, wrong, case = MUTANTS[name]
    monkeypatch.setattr(module, attribute, wrong)
    if operator == "kda_decode":
        case = "T5.spec2"  # T3 is all padding
    report = conformance.run(
        operator, implementation(operator), DEVICE, scales=("small",),
        only=lambda c: f":{case}" in c.id and "bfloat16" in c.id,
    )  # fmt: skip
    assert report.rows
    assert report.failures, f"mutant survived: {name}"


FORMS = [
    dict(LATE=late, KEEP=keep, EVICT=evict) for late, keep, evict in ((1, 0, ""), (0, 1, "evict_first"), (1, 1, ""))
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(k for k, v in form.items() if v))
def test_decode_in_blocks_conforms(form, monkeypatch):
    """The forms that walk the state in blocks of value rows, whichever the tuning table uses at these sizes."""

    def launch(kernel, programs, dim):
        return {"BV": dim // 2, "STAGES": 2, "num_warps": 4} | form

    monkeypatch.setattr(tuning, "step_launch", launch)
    only = chosen("kda_decode") or (lambda case: "bfloat16" in case.id)
    report = conformance.run("kda_decode", implementation("kda_decode"), DEVICE, scales=("small",), only=only)
    assert any(row.verdict == "pass" for row in report.rows)
    report.raise_if_failed()


ASYNC = [dict(BV=32, num_warps=8), dict(BV=32, num_warps=4, EVICT="evict_first"), dict(BV=64, num_warps=8, PDL=True)]
ASYNC += [dict(BV=128, num_warps=16, PDL=True), dict(BV=128, num_warps=8, DIRECT=True)]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="explicit layouts are compiled, not interpreted")
@pytest.mark.parametrize("form", ASYNC, ids=lambda form: "-".join(f"{k}{v}" for k, v in form.items()))
def test_decode_with_the_state_in_flight_conforms(form, monkeypatch):
    calls = []

    def launch(kernel, programs, dim):
        calls.append(dim)
        return {"FORM": "async", "STAGES": 2} | form | {"BV": min(form["BV"], dim)}

    monkeypatch.setattr(tuning, "step_launch", launch)
    # Other sizes take the Triton form, and each would be compiled.
    conformance.run("kda_decode", implementation("kda_decode"), DEVICE, scales=("real",)).raise_if_failed()
    assert 128 in calls
    assert kda_step.kda_decode_async is not None


@pytest.mark.parametrize("overlap", [False, True])
def test_verification_in_blocks_conforms(overlap, monkeypatch):
    """Whichever form the tuning table uses at these sizes."""

    def launch(kernel, programs, dim):
        return {"BV": max(dim // 2, 16), "num_warps": 4, "PDL": overlap}

    monkeypatch.setattr(tuning, "step_launch", launch)
    scales = ("real",) if CUDA else ("small",)
    only = chosen("kda_verify")
    report = conformance.run("kda_verify", implementation("kda_verify"), DEVICE, scales=scales, only=only)
    assert any(row.verdict == "pass" for row in report.rows)
    report.raise_if_failed()


def prefill_inputs(heads: int, lengths: list[int], dim: int = 32):
    generator = torch.Generator().manual_seed(len(lengths))

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    tokens = sum(lengths)
    q, k, v, z = (normal(tokens, heads, dim).bfloat16() for _ in range(4))
    state = normal(len(lengths) + 1, heads, dim, dim)
    first = torch.ones(len(lengths), dtype=torch.bool, device=DEVICE)
    slots = torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    rest = (torch.sigmoid(normal(tokens, heads)), normal(heads) * 0.3, normal(heads, dim) - 6.0, -5.0)
    return (q, k, v, z, *rest), state, slots, cu, first


@pytest.mark.parametrize("segment", [1, 2, 3])
def test_segments_change_nothing_but_rounding(segment):
    """Cut into segments (with the scan over more than two) equals uncut, long memory: transitions carry the state."""
    args, state, slots, cu, first = prefill_inputs(1, [330])
    results = []
    for chunks in (0, segment):
        pool = state.clone()
        plan = kda_plan.plan_prefill(cu, 1, DEVICE, dim=32, segment_chunks=chunks)
        out = kda_prefill.kda_prefill(*args, pool, slots, cu.to(DEVICE), first, plan=plan)
        results.append((out.double(), pool[1].double()))
    (o, s), (o_cut, s_cut) = results
    # Both are within a few 1e-3 of fp64; two roundings of the operands apart from each other.
    assert (o - o_cut).norm() / o.norm() < 5e-3
    assert (s - s_cut).norm() / s.norm() < 5e-3


@pytest.mark.parametrize("segment", [0, 1, 2, 5])
def test_plan_covers_every_token_once(segment):
    lengths = [65, 0, 1, 64, 700, 0]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    plan = kda_plan.plan_prefill(bounds, 6, "cpu", segment_chunks=segment)
    rows = [t for token, count, *_ in plan.chunks.tolist() for t in range(token, token + count)]
    assert rows == list(range(bounds[-1]))
    walked = [c for first, count, *_ in plan.segments.tolist() for c in range(first, first + count)]
    assert walked == list(range(plan.num_chunks))
    for index, (first, _, seq, flags) in enumerate(plan.segments.tolist()):
        assert plan.chunks[first, 2] == seq
        assert bool(flags & kda_plan.LAST) == (index not in plan.order.tolist())
    for table in (plan.chunks, plan.segments, plan.order, plan.scans):
        # A pointer of another alignment would be another kernel variant, compiled while a request waits.
        assert table.numel() == 0 or (table.data_ptr() - plan.chunks.data_ptr()) % 16 == 0


def test_plan_refuses_bad_boundaries():
    with pytest.raises(ValueError, match="not decrease"):
        kda_plan.plan_prefill([0, 5, 3], 6, "cpu")


def test_cost_model_cuts_long_sequences_of_few_heads_only():
    assert tuning.segment_length([1], 6, 128, 132) == 0
    assert tuning.segment_length([128], 96, 128, 132) == 0
    assert 4 <= tuning.segment_length([128], 6, 128, 132) <= 40


def test_cost_model_counts_the_start_of_a_wave():
    """8192 tokens, 132 units, steps of the CUDA passes, a cheap scan: as measured, 6 heads 11 segments, 12 heads 5."""
    steps = {"local": 1.18, "scan": 0.7, "output": 1.9, "cut": 4.0, "rows_local": 2, "rows_output": 2}
    costs = Costs(units=132, **steps, concurrent_local=1, concurrent_output=1, wave=3.0)
    assert [segment_length([128], heads, costs) for heads in (6, 12)] == [12, 26]
    assert segment_length([128], 12, replace(costs, wave=0.0)) == 12  # two waves


def test_step_launch_is_defined_for_every_size():
    for kernel in ("decode", "verify"):
        for heads in kda_checks.TESTED_HEADS:
            for rows in (1, 7, 64, 1024):
                assert 16 <= tuning.step_launch(kernel, rows * heads, 128)["BV"] <= 128


def test_step_launch_is_the_first_entry_that_reaches(monkeypatch):
    entries = [{"up_to": 6, "BV": 32, "maxnreg": None}, {"up_to": None, "BV": 128}]
    monkeypatch.setitem(tuning.table(), "decode", entries)
    monkeypatch.setitem(tuning.table(), "verify", entries[:1])
    assert [tuning.step_launch("decode", n, 64) for n in (1, 6, 7, 10**9)] == [{"BV": 32}] * 2 + [{"BV": 64}] * 2
    assert tuning.step_rows(2, 100) == [1, 3, 4, 100]
    with pytest.raises(ValueError, match="tuning of verify has no open-ended entry: none reaches 7"):
        tuning.step_launch("verify", 7, 64)


REFUSED = [
    (dict(dtype=torch.float16), "bfloat16"),
    (dict(sizes={"N": 6, "D": 96}), "head dimension"),
    (dict(sizes={"N": 6, "K": 64, "V": 32}), "equal"),
    (dict(device="npu"), "cuda"),
    (dict(arch="sm_75"), "sm_80"),
    (dict(options={"state_dtype": torch.float16}), "recurrent state"),
    (dict(options={"lower_bound": 1.0}), "negative"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED)
def test_capability_query_says_why(change, says):
    spec = CallSpec("kda_prefill", "cuda", torch.bfloat16, "sm_90", {"N": 6, "D": 128})
    assert kda_prefill.supports_prefill(spec)[0]
    ok, reason = kda_prefill.supports_prefill(replace(spec, **change))
    assert not ok
    assert says in reason


@pytest.mark.parametrize(("device", "dim", "ok"), [("cuda", 16, False), ("cuda", 32, True), ("cpu", 16, True)])
def test_prefill_of_few_channels_is_refused_where_it_would_be_compiled(device, dim, ok):
    sizes = {"T": 9, "B": 1, "N": 2, "K": dim, "V": dim, "S": 2}
    spec = CallSpec("kda_prefill", device, torch.bfloat16, "sm_90", sizes, {"lower_bound": -5.0})
    assert kda_prefill.supports_prefill(spec)[0] is ok


def test_launcher_refuses_before_launch():
    args, state, slots, cu, first = prefill_inputs(2, [40])
    cu = cu.to(DEVICE)
    with pytest.raises(UnsupportedError, match="strides"):
        kda_prefill.kda_prefill(
            args[0].transpose(0, 1).contiguous().transpose(0, 1), *args[1:], state, slots, cu, first
        )
    with pytest.raises(UnsupportedError, match="recurrent_state"):
        kda_prefill.kda_prefill(*args, state.transpose(2, 3), slots, cu, first)
    with pytest.raises(ValueError, match="plan is for"):
        kda_prefill.kda_prefill(*args, state, slots, cu, first, plan=kda_plan.plan_prefill([0, 10, 40], 2, DEVICE))
    with pytest.raises(UnsupportedError, match="float64"):
        kda_prefill.kda_prefill(args[0].double(), *args[1:], state, slots, cu, first)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100, 120])
def test_compiles_within_budget(arch):
    """Registers without spills that matter, shared memory of the architecture, matrix units in use on Hopper."""
    script = Path(__file__).with_name("kda_kernels_aot.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, str(arch)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {row["kernel"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(found) >= 12
    for row in found.values():
        assert row["shared"] <= row["limit"], row
        assert row["registers"] <= 255, row
        assert row["stack"] <= 64 or arch != 90, row
    if arch == 90:
        assert found["chunk"]["wgmma"] >= 60
        assert found["output"]["wgmma"] == 24
        assert found["output"]["async_copies"] > 0
        assert found["decode 1000000000"]["async_copies"] > 0
