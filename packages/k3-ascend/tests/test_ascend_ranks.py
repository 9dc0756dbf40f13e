"""Two ranks in two processes over gloo compute what one computes: tensor and expert parallelism, real collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ascend_support as support
import pytest
import torch

if not support.has_vllm_ascend():
    pytest.skip("needs torch_npu and vllm-ascend (environment 'ascend')", allow_module_level=True)

import ascend_modelslim as writer

from k3_core.checkpoint import write_tiny

SCRIPT = Path(__file__).with_name("ascend_rank.py")
#: The rms of hidden states of ModelSlim's int4 products, relative to theirs: cutting a row gives its parts other int8
#: steps, which changes their roundings (0.8 % of a row's rms). Derived in test_ascend_modelslim.py.
INT4_CLOSE = 0.035
#: fp32 sums over ranks in another order; hidden states are of size 1 to 10.
CLOSE = 1e-4


def run(checkpoint: Path, size: int, expert_parallel: bool, folder: Path) -> list[torch.Tensor]:
    """Outputs of all ranks."""
    port = support.free_port()
    folder.mkdir()
    files = [folder / f"{rank}.pt" for rank in range(size)]
    commands = [
        [
            *(sys.executable, "-W", "ignore", str(SCRIPT), str(checkpoint), str(rank), str(size), str(port)),
            *("1" if expert_parallel else "0", str(file)),
        ]
        for rank, file in enumerate(files)
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 0, text[-3000:]
    return [torch.load(file) for file in files]


@pytest.mark.slow
def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "k3", "k3", seed=3)
    (alone,) = run(checkpoint, 1, False, tmp_path / "one")
    for name, expert_parallel in (("tp2", False), ("ep2", True)):
        first, second = run(checkpoint, 2, expert_parallel, tmp_path / name)
        assert torch.equal(first, second), name
        assert float((first - alone).abs().max()) < CLOSE, name


@pytest.mark.slow
def test_two_ranks_compute_with_modelslims_experts_what_one_computes(tmp_path: Path) -> None:
    """Routed experts cut and whole, shared experts cut: a wrong slice of codes, scales or bias would show as noise."""
    checkpoint = writer.write(tmp_path / "w", packed=True, group=256, shared=True).folder
    (alone,) = run(checkpoint, 1, False, tmp_path / "one")
    for name, expert_parallel in (("tp2", False), ("ep2", True)):
        first, second = run(checkpoint, 2, expert_parallel, tmp_path / name)
        assert torch.equal(first, second), name
        error = float((first.float() - alone.float()).norm() / alone.float().norm())
        print(f"\n{name}: relative rms of the hidden states {error:.4f}")
        assert error < INT4_CLOSE, name
