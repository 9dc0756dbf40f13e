"""What the layers hand to this wheel's kernels passes the kernels' own checks: the suite that every vendor runs."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
pytest.importorskip("triton", reason="the launchers import it")

from nvidia_support import VENDOR

from k3_core.vllm.testing.suite_launch import LaunchSuite


class TestLaunch(LaunchSuite):
    vendor, arch = VENDOR, "sm_90"
    prompt_parts = ("attn_res", "conv", "kda_chunk", "kda_output", "norm", "route", "w13", "w2", "combine", "situ")
    step_kernels = frozenset({"kda_decode_kernel", "kda_chunk_kernel", "gated_norm_kernel"})
    verify_kernels = frozenset({"kda_verify_kernel"})
