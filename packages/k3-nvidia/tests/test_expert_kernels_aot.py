"""Compile gate without the hardware: registers, spills, shared memory and the instructions that the design rests on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3_nvidia.tuning import experts as tuning

SCRIPT = Path(__file__).with_name("expert_kernels_aot.py")
SHARED_PER_MULTIPROCESSOR = 227 * 1024
REGISTERS_PER_MULTIPROCESSOR = 65536
# Decode is latency and issue bound: at least three programs of four warps must fit beside each other.
DECODE = tuple(f"{kernel} {width} plan{i}" for kernel in ("w13", "w2") for width in (192, 384, 3072) for i in range(4))
LONG = tuple(f"{kernel} {width} plan6" for kernel in ("w13", "w2") for width in (192, 384, 3072))
GATE = (*DECODE, *LONG, "w13 wide scales", "logits 16", "route 0", "route 2", "route 3", "combine", "repack")


def compiled(arch: int, *names: str) -> dict[str, dict[str, int]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(arch), *names], capture_output=True, text=True, env=env, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert {r["name"] for r in rows} >= set(names)
    return {r["name"]: r for r in rows}


def programs_that_fit(row: dict[str, int]) -> int:
    by_registers = REGISTERS_PER_MULTIPROCESSOR // (-(-row["registers"] // 8) * 8 * 32 * row["warps"])
    return min(by_registers, SHARED_PER_MULTIPROCESSOR // (row["shared"] + 1024))


@pytest.mark.slow
def test_sm_90_budgets() -> None:
    rows = compiled(90, *GATE)
    for name, row in rows.items():
        assert row["stack"] == 0, f"{name} spills: {row}"
        assert row["local_memory_ops"] == 0, f"{name} spills: {row}"
    for name in DECODE:
        row = rows[name]
        assert row["hmma"] + row["hgmma"] > 0, f"{name} does not use the tensor cores"
        assert programs_that_fit(row) >= 3, f"{name}: {row}"
        # a weight goes from its load to the tensor core without passing through another lane
        assert row["loop_shared_stores"] <= 4, f"{name} moves operands through shared memory: {row}"


@pytest.mark.slow
def test_prefill_uses_the_warpgroup_instruction() -> None:
    for name, row in compiled(90, "w13 192 plan5", *LONG).items():
        assert row["hgmma"] > 0, name
        # A quarter of an item of 32 tokens is 8 columns, for which there is mma.sync only.
        _, width, plan = name.split()
        narrow = tuning.plans("default", int(width))[int(plan.removeprefix("plan"))].item_n // 4 < 16
        assert row["hmma"] == 0 or narrow, f"{name}: wgmma takes every width from 16 columns on"
        assert row["stack"] == 0, name
        assert row["loop_shared_stores"] <= (4 if narrow else 0), f"{name}: {row}"  # 4: as in decoding


@pytest.mark.slow
@pytest.mark.parametrize("arch", [100, 120])
def test_newer_architectures_compile(arch: int) -> None:
    for name, row in compiled(arch, "w13 384 plan1", "w2 384 plan1", "route 2", "combine").items():
        assert row["stack"] == 0, f"{name} spills on sm_{arch}: {row}"
