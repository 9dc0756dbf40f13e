"""Two real processes over gloo, with vLLM's own groups: tensor parallel, and expert parallel."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from amd_support import VENDOR

from k3_core.checkpoint import write_tiny
from k3_core.vllm.testing.gloo import hidden_states
from k3_core.vllm.testing.ranks import Whole
from k3_core.vllm.testing.suite_ranks import CLOSE
from k3_core.vllm.testing.vendor import random_prompts

pytestmark = [pytest.mark.serve, pytest.mark.slow]


def test_two_processes_equal_the_reference(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "k3", "k3", seed=3, long_memory=True)
    whole = Whole(folder)
    ids = random_prompts((50,), seed=2)[0]
    for hidden in hidden_states(VENDOR, folder, ids):
        torch.testing.assert_close(whole.head(hidden), whole.logits(torch.tensor(ids)), **CLOSE)
