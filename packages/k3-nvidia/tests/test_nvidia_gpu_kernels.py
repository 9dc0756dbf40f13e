"""On a GPU: every kernel through the conformance suite at small and released sizes, the rest by their own tests.

Kernels are compiled for the device here; test files that run under Triton's interpreter without one run on it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"
#: Kernels that are no operator of the suite, and what the suite does not ask of those that are.
FILES = (
    "test_nvidia_glue", "test_attn_res_kernel", "test_skinny_gemm", "test_skinny_cute", "test_expert_kernels_layout",
    "test_nvidia_few_rows",
)  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(
    "operator",
    ["kda_prefill", "kda_decode", "kda_verify", "experts", "attn_res", "route", "short_conv", "gated_norm", "situ"],
)
def test_an_operator_conforms(operator: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "conformance.py"), "--operators", operator, "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
    counts = json.loads((tmp_path / "conformance.json").read_text())["counts"]
    assert counts["pass"] > 0


@pytest.mark.parametrize("name", FILES)
def test_kernels_beside_the_suite(name: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]


def test_memcheck_finds_nothing(tmp_path: Path) -> None:
    """compute-sanitizer over two cases of every operator; a machine without it says so."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import sanitize

        sanitize.tool()
    except SystemExit as error:
        pytest.skip(str(error))
    finally:
        sys.path.remove(str(BENCHMARKS))
    command = [sys.executable, str(BENCHMARKS / "sanitize.py"), "--spread", "2", "--seconds", "800"]
    run = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
