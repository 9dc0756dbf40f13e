"""The AMD model in vLLM's real engine on a CPU: the suite that every vendor runs."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from amd_support import VENDOR

from k3_core.vllm.testing.suite_serve import ServeSuite


class TestServe(ServeSuite):
    vendor = VENDOR
