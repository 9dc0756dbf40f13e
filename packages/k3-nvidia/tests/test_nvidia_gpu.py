"""The whole model on a GPU: vLLM with this plugin against the reference on the same device, eager and with graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_smoke.py"


@pytest.fixture(scope="module", params=["tiny", "linear"])
def lines(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the smoke script says about one model, in both modes."""
    pytest.importorskip("vllm")
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--parts", request.param, "--modes", "eager,graphs"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def test_log_probabilities_are_as_near_to_fp32_as_the_bf16_reference(lines: list[dict[str, Any]]) -> None:
    checks = [line for line in lines if "check" in line]
    assert {line["mode"] for line in checks} == {"eager", "graphs"}
    assert [line for line in checks if not line["ok"]] == []


def test_cached_prefixes_are_used(lines: list[dict[str, Any]]) -> None:
    assert all(line["cached"][-1] > 0 for line in lines if line.get("check") == "prefixes")


def test_nothing_is_compiled_after_the_start(lines: list[dict[str, Any]]) -> None:
    late = [line["compiled_while_serving"] for line in lines if "compiled_while_serving" in line]
    assert late
    assert all(names == [] for names in late)


def test_every_operator_runs_as_a_kernel(lines: list[dict[str, Any]]) -> None:
    (chosen,) = [line["chosen"] for line in lines if "chosen" in line]
    assert all("-> contract" not in line for line in chosen)
