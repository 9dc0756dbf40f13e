"""Compile gate without the hardware: registers, spills, shared memory and the instructions that the design rests on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sass_hazards

from k3_nvidia.tuning import experts as tuning

SCRIPT = Path(__file__).with_name("expert_kernels_aot.py")
SHARED_PER_MULTIPROCESSOR = 227 * 1024
REGISTERS_PER_MULTIPROCESSOR = 65536
# Decode is latency and issue bound: at least three programs of four warps must fit beside each other.
DECODE = tuple(f"{kernel} {width} plan{i}" for kernel in ("w13", "w2") for width in (192, 384, 3072) for i in range(4))
LONG = tuple(f"{kernel} {width} plan6" for kernel in ("w13", "w2") for width in (192, 384, 3072))
MIDDLE = tuple(f"{kernel} 384 plan{i}" for kernel in ("w13", "w2") for i in (4, 5))
#: Everything around the products.
AROUND = (
    "logits 16", "route 0", "route 1", "route 2", "route 3", "list few", "list small", "mark", "count", "place",
    "combine", "combine every", "situ", "repack",
)  # fmt: skip
ONE = tuple(f"{kernel} one {width}" for kernel in ("w13", "w2") for width in (192, 384))
GATE = (*DECODE, *ONE, *MIDDLE, *LONG, "w13 wide scales", *AROUND)
#: Bytes of shared memory that one program may have on the architectures that were not measured.
SHARED = {100: 232448, 120: 101376}


def compiled(arch: int, *names: str) -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(arch), *names], capture_output=True, text=True, env=env, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert {r["name"] for r in rows} >= set(names) - {"sweep-widths"}
    return {r["name"]: r for r in rows}


def programs_that_fit(row: dict[str, Any]) -> int:
    by_registers = REGISTERS_PER_MULTIPROCESSOR // (-(-row["registers"] // 8) * 8 * 32 * row["warps"])
    return min(by_registers, SHARED_PER_MULTIPROCESSOR // (row["shared"] + 1024))


@pytest.mark.slow
def test_sm_90_budgets() -> None:
    rows = compiled(90, *GATE)
    for name, row in rows.items():
        assert row["stack"] == 0, f"{name} spills: {row}"
        assert row["local_memory_ops"] == 0, f"{name} spills: {row}"
        assert row["hazards"] == [], f"{name}: {row['hazards'][:5]}"
    for name in (*DECODE, *ONE, "route 2", "route 3", "list few", "combine", "combine every", "situ"):
        # launched before its predecessor is done: what that writes may not be touched before the wait
        assert (rows[name]["waits"], rows[name]["before_wait"]) == (1, 0), f"{name}: {rows[name]}"
    for name in ("w2 one 192", "w2 one 384", "combine", "combine every"):
        assert rows[name]["launches_first"], f"{name}: the products behind it cannot ask for their weights meanwhile"
    assert rows["combine every"]["loads_first"] >= 16, f"a row waits for another: {rows['combine every']}"
    for name in DECODE:
        row = rows[name]
        assert row["hmma"] + row["hgmma"] > 0, f"{name} does not use the tensor cores"
        assert programs_that_fit(row) >= 3, f"{name}: {row}"
        # a weight goes from its load to the tensor core without passing through another lane
        assert row["loop_shared_stores"] <= 4, f"{name} moves operands through shared memory: {row}"


@pytest.mark.slow
def test_no_tile_of_the_sweep_touches_registers_of_products_in_flight() -> None:
    rows = compiled(90, "sweep-widths")
    assert len(rows) > 8
    for name, row in rows.items():
        assert row["hgmma"] > 0, name
        assert row["hazards"] == [], f"{name}: {row['hazards'][:5]}"


def listing(*lines: str) -> str:
    return "\n".join(line if line.startswith(".") else f"  /*{i:04x}*/ {line} ;" for i, line in enumerate(lines))


PRODUCT = "HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR12], R24, gsb0"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "LDS.128 R40, [R8]", "EXIT"), 0),
        ((PRODUCT, "LDS.128 R40, [R8]", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "EXIT"), 1),  # operand written
        ((PRODUCT, "LDS.64 R44, [R8]", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "EXIT"), 0),  # beside it
        ((PRODUCT, "FADD R1, R2, R40", "FADD R1, R2, R39", "EXIT"), 1),  # sum read (16 registers from R24)
        ((PRODUCT, "STS [R8], R40", "EXIT"), 0),  # reading the operand is harmless
        ((PRODUCT, PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R40, R1", "EXIT"), 1),  # the younger one is out
        # around a loop: what the last turn left in flight
        ((".L_x_1:", "MOV R40, R1", PRODUCT, "@P0 BRA `(.L_x_1)", "EXIT"), 1),
        ((".L_x_1:", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R40, R1", PRODUCT, "@P0 BRA `(.L_x_1)", "EXIT"), 0),
        ((PRODUCT, "EXIT", "MOV R40, R1"), 0),  # not reached
    ],
)
def test_hazards_are_seen(lines: tuple[str, ...], found: int) -> None:
    assert len(sass_hazards.hazards(listing(*lines))) == found


@pytest.mark.slow
def test_prefill_uses_the_warpgroup_instruction() -> None:
    for name, row in compiled(90, "w13 192 plan5", *LONG).items():
        assert row["hgmma"] > 0, name
        # A quarter of an item of 32 tokens is 8 columns, for which there is mma.sync only.
        _, width, plan = name.split()
        narrow = tuning.plans(tuning.HOPPER, int(width))[int(plan.removeprefix("plan"))].item_n // 4 < 16
        assert row["hmma"] == 0 or narrow, f"{name}: wgmma takes every width from 16 columns on"
        assert row["stack"] == 0, name
        assert row["loop_shared_stores"] <= (4 if narrow else 0), f"{name}: {row}"  # 4: as in decoding


@pytest.mark.slow
@pytest.mark.parametrize("arch", [100, 120])
def test_newer_architectures_compile(arch: int) -> None:
    for name, row in compiled(arch, "w13 384 plan1", "w2 384 plan1", "w2 3072 plan1", *AROUND).items():
        assert row["stack"] == 0, f"{name} spills on sm_{arch}: {row}"
        assert row["shared"] <= SHARED[arch], f"{name} does not fit sm_{arch}: {row}"
