"""On GPUs: two ranks against one in every reduction form, drafts accepted in part, and a latent cache in FP8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def succeeds(script: str, folder: Path, *options: str) -> None:
    """The script's exit status says whether every check passed; its rows say which did not."""
    pytest.importorskip("vllm")
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        env={**os.environ, "OUT": str(folder)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    wrong = [line for line in run.stdout.splitlines() if '"ok": false' in line]
    assert run.returncode == 0, "\n".join([*wrong, run.stderr[-3000:]])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_say_what_one_says_in_every_form(tmp_path: Path) -> None:
    succeeds("ranks.py", tmp_path, "--parts", "engines", "--seconds", "1400")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_forms_of_the_reduction_over_two_gpus(tmp_path: Path) -> None:
    succeeds("ranks.py", tmp_path, "--parts", "reductions", "--tokens", "1,64,1024")


@pytest.mark.parametrize("part", ["drafts", "fp8kv"])
def test_drafts_and_a_coarse_cache_on_one_gpu(part: str, tmp_path: Path) -> None:
    succeeds("drafts.py", tmp_path, "--parts", part, "--seconds", "1400")
