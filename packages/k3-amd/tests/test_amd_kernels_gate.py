"""The compile gate itself: that it bites. The gate runs as a script, once a Triton version (`nox -s test-amd`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
TABLE = json.loads((HERE / "amd_kernels_table.json").read_text())

#: Compiled in a process of its own, since Triton decides at import whether it interprets.
CHECK = """
import sys
sys.path.insert(0, {here!r})
import dataclasses, json
import amd_kernels_gate as gate
from k3_amd.kernels import build, catalogue
found = {{}}
plain = catalogue.variants("gfx942")["norm"]
binary = build.build(plain, "gfx942")
found["arguments"] = binary.arguments
found["elf"] = binary.code[:4] == b"\\x7fELF"
found["metadata"] = binary.metadata
found["fine"] = gate.breaches(plain, "gfx942", build.resources(binary))
found["torch"] = "torch" in sys.modules
spilling = catalogue.variants("gfx942")["attn_res 8"]
spilling = dataclasses.replace(spilling, options=dict(spilling.options, waves_per_eu=6))
found["spills"] = gate.breaches(spilling, "gfx942", build.resources(build.build(spilling, "gfx942")))
large = catalogue.variants("gfx950")["scan"]
found["lds"] = gate.breaches(large, "gfx942", build.resources(build.build(large, "gfx942")))
found["lds 950"] = gate.breaches(large, "gfx950", build.resources(build.build(large, "gfx950")))
narrow = dataclasses.replace(plain, wide=99, matrix="bf16")
found["expectations"] = gate.breaches(narrow, "gfx942", build.resources(binary))
row = gate.row(build.resources(binary))
then = [row[c] for c in gate.COLUMNS]
pool = catalogue.variants("gfx942")["decode fp32, large pool"]
forms = catalogue.forms(dataclasses.replace(pool, narrow=()))
found["forms"] = [sorted(set(f.narrow) & set(("state_ptr", "qkv_ptr"))) for f in forms]
small = build.build(catalogue.variants("gfx942")["norm, small"], "gfx942")
found["buffers"] = [b.assembly.count("buffer_load") for b in (binary, small)]
found["known"] = [list(gate.KNOWN_SPILLS), sum(map(len, gate.KNOWN_SPILLS.values()))]
found["same"] = gate.regressions("x", row, then)
found["worse"] = gate.regressions("x", dict(row, vgpr=row["vgpr"] + 1, occupancy=row["occupancy"] - 1), then)
found["unknown"] = gate.regressions("x", row, None)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK.format(here=str(HERE))],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_build_has_code_metadata_and_argument_order(found: dict) -> None:
    assert found["elf"]
    assert not found["torch"]
    names = [a[0] for a in found["arguments"]]
    assert names[:5] == ["o_ptr", "gate_ptr", "weight_ptr", "out_ptr", "o_stride"]
    offsets = [a[2] for a in found["arguments"]]
    assert offsets == sorted(offsets)
    assert found["arguments"][-1][2] + found["arguments"][-1][3] <= found["metadata"]["kernarg"]
    assert found["metadata"]["wave"] == 64


def test_storages_on_both_sides_of_two_gib_are_built(found: dict) -> None:
    """Triton takes buffer instructions for small ones, which need other registers: each form has its row."""
    assert found["forms"] == [[], ["qkv_ptr", "state_ptr"], ["qkv_ptr"]]
    assert found["buffers"][0] < found["buffers"][1]


def test_limits_are_enforced(found: dict) -> None:
    assert found["fine"] == []
    assert any("spills" in p or "scratch" in p for p in found["spills"])
    assert found["known"] == [["3.9.0"], 7], "no exception for the version that serves, none added unseen"
    assert any("LDS" in p for p in found["lds"])
    assert found["lds 950"] == []
    assert any("16 bytes" in p for p in found["expectations"])
    assert any("matrix" in p for p in found["expectations"])


def test_a_worse_row_is_a_regression(found: dict) -> None:
    assert found["same"] == []
    assert len(found["worse"]) == 2
    assert "not in the table" in found["unknown"][0]


def test_table_has_both_versions_and_architectures() -> None:
    assert set(TABLE["triton"]) == {"3.6.0", "3.9.0"}
    for archs in TABLE["triton"].values():
        assert set(archs) == {"gfx942", "gfx950"}
        for rows in archs.values():
            assert {"attn_res 8", "decode fp32", "verify fp32", "chunk", "local", "scan", "output", "route"} <= set(
                rows
            )
            assert {"decode fp32, small", "decode fp32, large pool", "chunk, small", "combine, small"} <= set(rows)
    names = set(TABLE["triton"]["3.6.0"]["gfx950"])
    assert {"w13 scaled 0", "w13 mxfp8 0"} <= names
    assert "w13 unpacked 0" in TABLE["triton"]["3.6.0"]["gfx942"]
