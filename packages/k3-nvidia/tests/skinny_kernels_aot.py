"""Ahead-of-time compilation of the low-latency kernels: a script, because Triton decides at import whether it
interprets. ``python skinny_kernels_aot.py triton|cute|cluster [90|100|120]`` prints one JSON line a variant; cluster:
AttnRes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import sass_hazards

BLOCK_OPTIONS = {"EVEN_N": False, "RESIDUAL": True, "PDL": True}
#: name -> (kernel, constants, warps, stages): the shapes of decode at batch 1, 4, 8, 16 and 32.
TRITON: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "vector 1": ("vector", {"M": 1, "BN": 8, "BK": 1024, "SPLITS": 1}, 4, 1),
    "vector 1 holds 2": ("vector", {"M": 1, "BN": 8, "BK": 1024, "SPLITS": 1, "HOLD": 2}, 4, 1),
    "vector 1 cut holds 2": ("vector", {"M": 1, "BN": 8, "BK": 512, "SPLITS": 7, "HOLD": 2}, 2, 1),
    "vector 4 holds 1": ("vector", {"M": 4, "BN": 4, "BK": 1024, "SPLITS": 1, "HOLD": 1}, 4, 1),
    "dot 8 holds 1": ("dot", {"BM": 8, "BN": 64, "BK": 128, "SPLITS": 2, "HOLD": 1}, 4, 5),
    "dot 8 holds 2": ("dot", {"BM": 8, "BN": 64, "BK": 128, "SPLITS": 2, "HOLD": 2}, 4, 5),
    "dot 16 holds 1": ("dot", {"BM": 16, "BN": 64, "BK": 128, "SPLITS": 1, "HOLD": 1}, 4, 5),
    "dot 16 holds 2": ("dot", {"BM": 16, "BN": 64, "BK": 128, "SPLITS": 1, "HOLD": 2}, 4, 5),
    "dot 32 holds 1": ("dot", {"BM": 32, "BN": 64, "BK": 128, "SPLITS": 1, "HOLD": 1}, 4, 6),
    "dot 32 holds 2": ("dot", {"BM": 32, "BN": 64, "BK": 128, "SPLITS": 1, "HOLD": 2}, 4, 6),
    "vector 1 cut": ("vector", {"M": 1, "BN": 8, "BK": 512, "SPLITS": 7}, 2, 1),
    "vector 4": ("vector", {"M": 4, "BN": 4, "BK": 1024, "SPLITS": 1}, 4, 1),
    "dot 8": ("dot", {"BM": 8, "BN": 64, "BK": 128, "SPLITS": 2}, 4, 5),
    "dot 16": ("dot", {"BM": 16, "BN": 64, "BK": 128, "SPLITS": 1}, 4, 5),
    "dot 32": ("dot", {"BM": 32, "BN": 64, "BK": 128, "SPLITS": 2}, 4, 4),
    "dot 32 wide": ("dot", {"BM": 32, "BN": 128, "BK": 64, "SPLITS": 1}, 4, 4),
}
#: tiles, unroll, warps, cluster, 8-row tiles of x
CUTE = [(1, 4, 8, 1, 1), (1, 4, 8, 4, 2), (2, 2, 8, 2, 2)]


def disassemble(cubin: Path) -> dict[str, Any]:
    """Registers and stack of a binary, and how often the instructions occur that the design rests on."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"

    def run(*command: Any) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    used = re.search(r"REG:(\d+) STACK:(\d+)", run(tools / "cuobjdump", "-res-usage", cubin))
    assert used is not None
    sass = run(tools / "nvdisasm", cubin)
    counts = {
        "evict_first": r"LDG\.E\.EF\.128", "not_kept": r"LDG\.E\.NA\.128", "copies": r"LDGSTS[.A-Z]*128",
        "tensor_core": r"H[G]?MMA", "spills": r"\b(?:LDL|STL)\b", "prefetch": r"CCTL\.E\.PF2",
        "wait": r"ACQBULK",
        "narrow_copies": r"LDGSTS\.E(?!\.BYPASS\.128|\.128|\.BYPASS\.LTC128B\.128)",
    }  # fmt: skip
    found = {name: len(re.findall(pattern, sass)) for name, pattern in counts.items()}
    # loads of weights that are asked for before the kernel waits for the one before it
    found["held"] = len(re.findall(r"LDG\.E\.EF\.128|LDGSTS[.A-Z]*128", sass.partition("ACQBULK")[0]))
    hazards = sass_hazards.hazards(sass)
    return {"registers": int(used[1]), "stack": int(used[2]), "hazards": hazards, **found}


def triton_rows(arch: int) -> None:
    """Every variant of ``TRITON``."""
    from k3_core.testing.triton_aot import compile_kernel
    from k3_nvidia.kernels import skinny_gemm

    types = dict.fromkeys(("out_ptr", "x_ptr", "w_ptr", "residual_ptr"), "*bf16") | {"partial_ptr": "*fp32"}
    for name, (kind, constants, warps, stages) in TRITON.items():
        constants = {"HOLD": 0, **constants, **BLOCK_OPTIONS}
        if kind == "dot":
            constants |= {"EVEN_K": True, "INTERPRET": False}
        kernel = skinny_gemm.vector_kernel if kind == "vector" else skinny_gemm.dot_kernel
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
        binary = compile_kernel(kernel, constants, options, ("cuda", arch, 32), types, ("N", "K"))
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(binary.asm["cubin"])
            facts = disassemble(cubin)
        print(json.dumps({"name": name, "warps": warps, "shared": int(binary.metadata.shared), **facts}), flush=True)


def cute_rows(arch: int) -> None:
    """Every variant of ``CUTE``, with and without residual, both dtypes."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUTE_DSL_DUMP_DIR"] = folder
        from k3_nvidia.kernels import skinny_cute_kernel
        from k3_nvidia.kernels.skinny_cute import Config

        for number, (*config, columns) in enumerate(CUTE):
            for file in Path(folder).iterdir():
                file.unlink()
            bf16 = number % 2 == 0
            skinny_cute_kernel.build(Config(*config), columns, bf16, bf16, f"sm_{arch}a")
            (cubin,) = Path(folder).glob("*.cubin")
            name = f"{Config(*config).name} {columns}"
            print(json.dumps({"name": name, "warps": config[2], **disassemble(cubin)}), flush=True)


def cluster_rows(arch: int) -> None:
    """AttnRes over clusters at the released width: the largest row bound on every cluster, the smallest on one."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUTE_DSL_DUMP_DIR"] = folder
        from k3_nvidia.kernels import attn_res_cluster, attn_res_cluster_kernel

        for cluster, rows in ((1, 9), (2, 9), (4, 9), (8, 9), (4, 3)):
            for file in Path(folder).iterdir():
                file.unlink()
            threads, lanes, resident = attn_res_cluster.geometry(7168, cluster)
            sizes = attn_res_cluster.halvings(2 * rows)
            attn_res_cluster_kernel.build(
                cluster, rows, sizes, 7168, threads, lanes, resident, True, True, f"sm_{arch}a"
            )
            (cubin,) = Path(folder).glob("*.cubin")
            facts = disassemble(cubin)
            print(json.dumps({"name": f"{cluster} {rows}", "threads": threads * resident, **facts}), flush=True)


if __name__ == "__main__":
    {"triton": triton_rows, "cute": cute_rows, "cluster": cluster_rows}[sys.argv[1]](
        int(sys.argv[2]) if len(sys.argv) > 2 else 90
    )
