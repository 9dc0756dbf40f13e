"""What the layers hand to this wheel's kernels passes the kernels' own checks, as chosen for both architectures."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
pytest.importorskip("triton", reason="the launchers import it")

from amd_support import VENDOR

from k3_core.vllm.testing.suite_launch import LaunchSuite


class TestGfx942(LaunchSuite):
    vendor, arch = VENDOR, "gfx942"
    prompt_parts = ("attn_res", "conv", "kda", "norm", "route", "w13", "w2", "combine", "situ")
    step_kernels = frozenset({"kda_decode_kernel"})
    verify_kernels = frozenset({"kda_verify_kernel"})


class TestGfx950(TestGfx942):
    arch = "gfx950"
