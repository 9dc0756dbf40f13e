"""Ahead-of-time compilation of the KDA kernels: a script, because Triton decides at import whether it interprets.

``python kda_kernels_aot.py [90|100|120 ...]`` prints one JSON line a variant: registers, spills, shared memory, matrix
instructions. The variants are those of tuning/kda.json at K3's head dimension.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton

from k3_core.testing import triton_aot
from k3_nvidia.kernels import kda_chunk, kda_conv, kda_decode_async, kda_flash, kda_segment, kda_step, kda_verify
from k3_nvidia.tuning import kda as tuning

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
BF16 = {"q_ptr", "k_ptr", "v_ptr", "z_ptr", "qkv_ptr", "gate_ptr", "out_ptr", "w_ptr", "ut_ptr", "qg_ptr", "kg_ptr",
        "a_ptr", "hi_ptr", "lo_ptr", "x_ptr", "conv_ptr", "raw_ptr", "saved_ptr"}  # fmt: skip
INT32 = {"chunk_ptr", "segment_ptr", "order_ptr", "scan_ptr", "slot_ptr", "accepted_ptr", "cu_ptr", "flag_ptr"}
DIM = 128
#: Keys of the tuning table that neither a kernel nor Triton knows.
NOT_OPTIONS = {
    "FORM", "SPLIT", "BULK", "BLOCKS", "STAGES", "PREFETCH", "LATE", "KEEP", "EVICT", "PDL", "DIRECT", "QP", "BV",
    "H", "D", "BOUNDED", "channel_stride", "W",
}  # fmt: skip
SHARED = {90: 232448, 100: 232448, 120: 101376}


def kind(name: str, module: str) -> str:
    if name == "state_ptr" and module == "kda_conv":
        return "*bf16"
    if name == "o_ptr" and module == "kda_conv":
        return "*bf16"
    if name.endswith("_ptr"):
        return "*bf16" if name in BF16 else "*i32" if name in INT32 else "*i1" if name == "init_ptr" else "*fp32"
    return "fp32" if name in ("lower_bound", "eps") else "i32"


def measure(label: str, fn: Any, constants: dict[str, Any], options: dict[str, Any], arch: int) -> dict[str, Any]:
    """Compile one variant and read its resources."""
    module = fn.fn.__module__.split(".")[-1]
    types = {name: kind(name, module) for name in fn.arg_names}
    compiled = triton_aot.compile_kernel(fn, constants, options, ("cuda", arch, 32), types)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "k.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([BIN / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups())
    return {
        "kernel": label, "arch": arch, "registers": registers, "stack": stack, "shared": compiled.metadata.shared,
        "limit": SHARED[arch], "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]", compiled.asm["ptx"])),
    }  # fmt: skip


def variants(arch: int) -> list[tuple[str, Any, dict[str, Any]]]:
    """(label, kernel, constants and options)."""
    fit = {"shared": SHARED[arch]}
    gate = {"BOUNDED": True, "SPLIT": True, "D": DIM}
    plain = {"D": DIM, "UPCAST": False}
    step = {"BOUNDED": True, "H": 12, "D": DIM, "channel_stride": 1}
    flash = {"D": DIM, "BR": kda_flash.BR, "REACH": kda_flash.REACH, "num_warps": 4}
    found = [
        ("prepare", kda_chunk.kda_prepare_kernel, gate | tuning.launch("prepare")),
        ("chunk", kda_chunk.kda_chunk_kernel, gate | {"UPCAST": False} | tuning.launch("chunk")),
        ("local", kda_segment.kda_local_kernel, plain | tuning.launch("local", **fit)),
        ("scan", kda_segment.kda_scan_kernel, plain | tuning.launch("scan", **fit)),
        ("output", kda_segment.kda_output_kernel, plain | tuning.launch("output", **fit)),
        ("before", kda_flash.flash_before_kernel, flash | {"BT": kda_flash.BT}),
        ("after", kda_flash.flash_after_kernel, flash),
        ("conv", kda_conv.short_conv_kernel, {"channel_stride": 1} | tuning.launch("conv")),
        ("norm", kda_conv.gated_norm_kernel, {"D": DIM, "PDL": True, "launch_pdl": True} | tuning.launch("norm")),
    ]
    for entry in tuning.table()["decode"]:
        programs = entry["up_to"] or 10**9
        options = kda_step.DECODE_DEFAULTS | tuning.step_launch("decode", programs, DIM)
        options |= {"launch_pdl": True} if options["PDL"] else {}
        found.append((f"decode {programs}", kda_step.kda_decode_kernel, step | options))
        if options["FORM"] == "async":
            options["W"] = options["num_warps"]
            found.append((f"decode async {programs}", kda_decode_async.kda_decode_async_kernel, step | options))
    for entry in tuning.table()["verify"]:
        programs = entry["up_to"] or 10**9
        options = kda_step.VERIFY_DEFAULTS | {"QP": 8} | tuning.step_launch("verify", programs, DIM)
        found.append((f"verify {programs}", kda_verify.kda_verify_kernel, step | options))
        overlap = {"launch_pdl": True, "PDL": True}
        found.append((f"finish {programs}", kda_verify.kda_verify_finish_kernel, step | {"QP": 8, **overlap}))
    return found


def main() -> None:
    for arch in map(int, sys.argv[1:] or ["90"]):
        for label, kernel, named in variants(arch):
            constants = {k: v for k, v in named.items() if k in kernel.arg_names}
            options = {k: v for k, v in named.items() if k not in kernel.arg_names and k not in NOT_OPTIONS}
            print(json.dumps(measure(label, kernel, constants, options, arch)), flush=True)


if __name__ == "__main__":
    main()
