"""What k3-amd cannot serve: the suite that every vendor runs. GPUs it is not made for: test_amd_platform.py."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from amd_support import VENDOR

from k3_core.vllm.testing.suite_refuse import RefuseSuite


class TestRefuse(RefuseSuite):
    vendor = VENDOR
