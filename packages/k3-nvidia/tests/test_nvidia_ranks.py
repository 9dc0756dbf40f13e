"""Several ranks and stages of the NVIDIA model: the suite that every vendor runs."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from nvidia_support import VENDOR

from k3_core.vllm.testing.suite_ranks import RankSuite


class TestRanks(RankSuite):
    vendor = VENDOR
