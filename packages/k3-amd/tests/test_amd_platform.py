"""Gates and dispatch on a faked ROCm platform: both architectures, others, with aiter and without.

Rung 5 of the support matrix: the right branch is taken. That the code behind it works on such a GPU is not shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

KERNELS = {
    "attn_res", "short_conv", "kda_prefill", "gated_norm", "kda_decode", "kda_verify", "route", "experts", "situ",
}  # fmt: skip


@cache
def on_rocm(arch: str, aiter: str) -> dict[str, Any]:
    """What this wheel would do on a GPU of ``arch``, asked in a process of its own."""
    script = Path(__file__).with_name("rocm_fake.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_ROCM", "K3_"))}
    run = subprocess.run(
        [sys.executable, str(script), arch, aiter],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(("arch", "aiter"), [("gfx942", "with"), ("gfx950", "without")])
def test_it_acts_on_rocm_where_the_release_of_vllm_fits(arch: str, aiter: str) -> None:
    there = on_rocm(arch, aiter)
    assert there["vendor"] == "amd"
    assert there["refused_older_vllm"], "the range in the wheel was not held against the vLLM that runs"
    assert there["acts"] == "k3-amd"
    assert "chosen by platform" in there["served"]
    assert there["device"] == ["cuda", arch]
    assert there["reasons"] == []


@pytest.mark.parametrize(("arch", "aiter"), [("gfx942", "with"), ("gfx950", "without")])
def test_every_operator_of_the_released_shapes_has_a_kernel(arch: str, aiter: str) -> None:
    pytest.importorskip("triton")
    assert on_rocm(arch, aiter)["operators"] == dict.fromkeys(KERNELS, "triton")


def test_without_aiter_vllms_triton_backend_takes_the_heads_as_they_are() -> None:
    there = on_rocm("gfx950", "without")
    assert there["aiter"] is None
    assert {int(heads): count for heads, (count, _) in there["mla"].items()} == {n: n for n in (6, 12, 16, 24, 96)}
    assert all("Triton" in why for _, why in there["mla"].values())
    assert "PyTorch" in there["vision"]
    assert there["lines"][0] == "aiter is not installed: a normal state"


def test_with_aiter_uneven_heads_are_padded_by_whoever_does_it_right() -> None:
    """vLLM's helper, tried on numbered heads, gives each back; so the layer leaves the padding to it."""
    there = on_rocm("gfx942", "with")
    assert there["faults"] == {"6": None, "12": None, "24": None}
    for heads in (6, 12, 24):
        count, why = there["mla"][str(heads)]
        assert count == heads
        assert "vLLM's aiter backend" in why
    assert "multiples of 16" in there["mla"]["16"][1]
    assert "all images at once" in there["vision"]


@pytest.mark.parametrize(("arch", "aiter", "refused"), [
    ("gfx942", "with", ("scaled", "mxfp8", "fp8")), ("gfx950", "without", ("fp8",)),
])  # fmt: skip
def test_a_form_of_experts_that_the_gpu_lacks_is_refused_with_those_it_has(
    arch: str, aiter: str, refused: tuple[str, ...]
) -> None:
    forms = on_rocm(arch, aiter)["forms"]
    assert tuple(form for form, reasons in forms.items() if reasons) == refused
    (unknown,) = forms["fp8"]
    assert "is none of unpacked, scaled, mxfp8" in unknown
    for form in refused:
        assert f"on {arch} possible: unpacked" in forms[form][0]


@pytest.mark.parametrize("arch", ["gfx90a"])
def test_another_gpu_is_refused_in_one_message_that_says_what_to_do(arch: str) -> None:
    there = on_rocm(arch, "without")
    (reason,) = there["reasons"]
    for word in (arch, "gfx942", "gfx950", "K3_IMPL=upstream"):
        assert word in reason
    assert all("no implementation" in said and arch in said for said in there["operators"].values())


class Helper:
    """Stands for vLLM's helper: pads by repeating heads; ``wrong`` cuts other heads off than it should."""

    wrong = False

    @staticmethod
    def check_num_heads_validity(heads: int) -> None:
        assert heads != 24, "24 heads are not supported"

    @staticmethod
    def get_mla_padded_q(heads: int, q: Any) -> Any:
        return q.repeat(1, -(-16 // heads), 1)[:, :16]

    @classmethod
    def get_mla_unpadded_o(cls, heads: int, o: Any) -> Any:
        return o[:, -heads:] if cls.wrong else o[:, :heads]


@pytest.mark.parametrize(
    ("heads", "wrong", "given", "why"),
    [
        (12, False, 12, "padded by vLLM"),
        (12, True, 16, "other heads back"),
        (6, True, 16, "other heads back"),
        (24, False, 32, "24 heads are not supported"),
        (48, True, 48, "multiples of 16"),
    ],
)
def test_a_backend_that_pads_wrongly_is_not_trusted(
    heads: int, wrong: bool, given: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.mla import rocm_aiter_mla

    from k3_amd import aiter, mla, platform

    monkeypatch.setattr(rocm_aiter_mla, "AiterMLAHelper", type("Other", (Helper,), {"wrong": wrong}))
    monkeypatch.setattr(platform, "on_rocm", lambda: True)
    monkeypatch.setattr(aiter, "enabled", lambda switch: True)
    count, said = mla.choose_heads(heads)
    assert count == given
    assert why in said


def test_k3_impl_on_another_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    from k3_amd import limits, platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    platform.on_rocm.cache_clear()
    (reason,) = limits.AmdHook.device_reasons(None, None)  # type: ignore[arg-type]
    assert "not ROCm" in reason
    assert "K3_IMPL" in reason
