"""The compile gate: every tuned variant for both architectures, held to limits and to the checked-in table.

A script, because Triton decides at import whether it interprets. Needs Triton only: no torch, no GPU, no ROCm.

    python amd_kernels_gate.py            compile, compare with amd_kernels_table.json, exit 1 on a breach or regression
    python amd_kernels_gate.py --write    replace this Triton version's rows of the table (limits still have to hold)
    python amd_kernels_gate.py --only "w13 unpacked 0"     some variants, by the start of their names
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton

from k3_amd import tuning
from k3_amd.kernels import build, catalogue

TABLE = Path(__file__).with_name("amd_kernels_table.json")
COLUMNS = ("vgpr", "agpr", "sgpr", "lds", "occupancy", "matrix", "load16")
MORE_IS_WORSE = ("vgpr", "lds")
LESS_IS_WORSE = ("occupancy", "load16")
#: Forms that spill with one Triton version, and how much: registers are at the limit there, and the version that vLLM
#: 0.33 for ROCm has, 3.6, keeps all forms free of spills.
KNOWN_SPILLS = {
    "3.9.0": {
        "gfx942 attn_res 6, small": 4,
        "gfx942 attn_res 7, small": 3,
        "gfx942 attn_res 8, large pool": 1,
        "gfx942 chunk_softplus, small": 20,
        "gfx950 attn_res 7, small": 2,
        "gfx950 attn_res 8, small": 34,
        "gfx950 chunk_softplus, small": 22,
    }
}
#: Registers a lane of one SIMD has for all its waves, and how many waves it holds at most.
REGISTERS, MOST_WAVES = 512, 8


def measure(task: tuple[str, str]) -> dict[str, Any]:
    """One variant: its row, and the limits it breaks."""
    arch, name = task
    variant = catalogue.variants(arch)[name]
    found = build.resources(build.build(variant, arch))
    return {"arch": arch, "name": name, "problems": breaches(variant, arch, found), "row": row(found)}


def row(found: dict[str, Any]) -> dict[str, Any]:
    """What the table keeps: matrix as the number of matrix instructions."""
    return {c: sum(found["matrix"].values()) if c == "matrix" else found[c] for c in COLUMNS}


def breaches(variant: build.Variant, arch: str, found: dict[str, Any]) -> list[str]:
    """Limits that hold whatever the table says."""
    problems = []
    known = KNOWN_SPILLS.get(triton.__version__, {}).get(f"{arch} {variant.name}", 0)
    if found["spills"] > known or (not known and (found["scratch"] or found["scratch_ops"])):
        problems.append(f"{found['spills']} spills, {found['scratch']} bytes of scratch")
    if found["lds"] > tuning.LDS[arch]:
        problems.append(f"{found['lds']} bytes of LDS, {arch} has {tuning.LDS[arch]}")
    waves_a_simd = -(-found["waves"] // 4)
    if found["occupancy"] < waves_a_simd:
        problems.append(f"{found['vgpr']} registers: {found['waves']} waves do not fit a compute unit")
    if found["vgpr"] > REGISTERS:
        problems.append(f"{found['vgpr']} registers")
    if variant.matrix and not any(variant.matrix in name for name in found["matrix"]):
        problems.append(f"no matrix instruction with {variant.matrix!r}: {sorted(found['matrix'])}")
    if not variant.matrix and found["matrix"]:
        problems.append(f"unexpected matrix instructions {sorted(found['matrix'])}")
    if found["load16"] < variant.wide:
        problems.append(f"{found['load16']} loads of 16 bytes, {variant.wide} expected")
    if variant.constants.get("FORM") == 0 and not found["denormals"]:
        problems.append("fp32 denormals are flushed, which the unpacked codes rely on")
    if variant.constants.get("FORM") == 1 and not found["converts"]:
        problems.append("no v_cvt_scale instruction: codes are not converted by hardware")
    return problems


def regressions(name: str, now: dict[str, Any], then: list[int] | None) -> list[str]:
    """Where a row is worse than the table's."""
    if then is None:
        return [f"{name}: not in the table; run with --write"]
    before = dict(zip(COLUMNS, then, strict=True))
    worse = [c for c in MORE_IS_WORSE if now[c] > before[c]] + [c for c in LESS_IS_WORSE if now[c] < before[c]]
    if bool(now["matrix"]) != bool(before["matrix"]):
        worse.append("matrix")
    return [f"{name}: {c} was {before[c]}, is {now[c]}" for c in worse]


def compile_all(only: list[str]) -> list[dict[str, Any]]:
    """Every variant of both architectures, on as many processes as the machine has cores (two of a large one)."""
    tasks = [
        (arch, name)
        for arch in tuning.ARCHITECTURES
        for name in catalogue.variants(arch)
        if not only or any(name.startswith(start) for start in only)
    ]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return list(pool.map(measure, tasks))


def rows_of(found: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Rows by architecture and name, as the table stores them."""
    rows: dict[str, dict[str, list[int]]] = {arch: {} for arch in tuning.ARCHITECTURES}
    for entry in found:
        rows[entry["arch"]][entry["name"]] = [entry["row"][c] for c in COLUMNS]
    return rows


def write(found: list[dict[str, Any]]) -> None:
    """One line a variant."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"columns": list(COLUMNS), "triton": {}}
    table["triton"][triton.__version__] = rows_of(found)
    versions = []
    for version in sorted(table["triton"]):
        archs = []
        for arch, rows in table["triton"][version].items():
            lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(values)}" for name, values in rows.items())
            archs.append(f'   "{arch}": {{\n{lines}\n   }}')
        versions.append(f'  "{version}": {{\n' + ",\n".join(archs) + "\n  }")
    head = f' "columns": {json.dumps(table["columns"])},\n "triton": {{\n'
    TABLE.write_text("{\n" + head + ",\n".join(versions) + "\n }\n}\n")


def compare(found: list[dict[str, Any]], complete: bool) -> list[str]:
    """Regressions against this Triton version's rows; a version without rows is a problem of its own."""
    table = json.loads(TABLE.read_text())["triton"].get(triton.__version__)
    if table is None:
        return [f"no rows for Triton {triton.__version__}; run with --write"]
    problems = []
    for entry in found:
        label = f"{entry['arch']} {entry['name']}"
        problems += regressions(label, entry["row"], table[entry["arch"]].get(entry["name"]))
    if complete:
        now = rows_of(found)
        problems += [f"{a} {n}: in the table, no longer built" for a in table for n in table[a] if n not in now[a]]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    arguments = parser.parse_args()
    started = time.monotonic()
    found = compile_all(arguments.only)
    problems = [f"{e['arch']} {e['name']}: {p}" for e in found for p in e["problems"]]
    if arguments.write and not problems and not arguments.only:
        write(found)
    problems += [] if arguments.write else compare(found, complete=not arguments.only)
    print(f"Triton {triton.__version__}: {len(found)} variants in {time.monotonic() - started:.0f} s, torch "
          f"{'imported' if 'torch' in sys.modules else 'not imported'}")  # fmt: skip
    print("\n".join(problems) or "all within limits and no worse than the table")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
