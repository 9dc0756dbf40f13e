"""Ahead-of-time compilation of the AttnRes and glue kernels: a script, because Triton decides at import whether it
interprets. ``python glue_kernels_aot.py [90|100|120] [sweep]`` prints one JSON line a variant.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from k3_core.testing import triton_aot
from k3_nvidia.kernels import attn_res, attn_res_ring, glue, latent_check
from k3_nvidia.tuning import attn_res as tuning

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
ROWS = ("out_ptr", "prefix_ptr", "delta_ptr", "bank_ptr", "norm_ptr", "proj_ptr", "out_norm_ptr")
ROWS += ("z_ptr", "f_ptr", "b_ptr", "weight_ptr", "x_ptr", "gate_ptr", "q_ptr", "latent_ptr", "zero_ptr")
ROWS += ("o_ptr", "x_q_ptr", "x_latent_ptr", "weight_q_ptr", "weight_latent_ptr", "x_shared_ptr", "mark_ptr")
TYPES = dict.fromkeys(ROWS, "*bf16") | {"beta_ptr": "*fp32", "eps": "fp32", "out_eps": "fp32", "bounds_ptr": "*i32"}
TYPES |= {"pages_ptr": "*i16", "table_ptr": "*i32", "lengths_ptr": "*i32"}
HIDDEN = 7168

Variant = tuple[str, Any, dict[str, Any], int, int | None]


def variants() -> Iterator[Variant]:
    """(name, kernel, constants, warps, register cap): AttnRes as the table has it at 1 and 8 blocks, then the rest.

    Its cluster kernel is another compiler's: skinny_kernels_aot.py.
    """
    for max_tokens, max_blocks, config in tuning._table():
        if config.cluster:
            continue
        for blocks in {1, min(max_blocks, 8)}:
            constants = {
                "NUM_BLOCKS": blocks, "HAS_DELTA": True, "HAS_WRITE": False, "HAS_NORM": True, "H": HIDDEN, "PDL": True,
                "CHUNK": config.chunk, "KC": -(-HIDDEN // config.chunk),
            }  # fmt: skip
            kernel: Any = attn_res_ring.attn_res_ring_kernel
            if config.ring:
                constants["STAGES"] = config.ring
            else:
                kernel = attn_res._attn_res_kernel
                constants |= {"GROUP": min(config.group, blocks + 1), "PREFETCH": config.prefetch}
            yield f"attn_res {max_tokens} {max_blocks} n{blocks}", kernel, constants, config.warps, config.maxnreg
    ring = {
        "NUM_BLOCKS": 8, "HAS_DELTA": True, "HAS_WRITE": True, "HAS_NORM": True, "H": HIDDEN, "PDL": True,
        "CHUNK": 1024, "KC": 7, "STAGES": 4,
    }  # fmt: skip
    yield "ring", attn_res_ring.attn_res_ring_kernel, ring, 8, None
    product = {"BM": 16, "BN": 32, "K": 128, "KB": 128, "HB": 8, "TILES": 24, "PDL": True, "INTERPRET": False}
    yield "kda_inputs", glue.kda_inputs_kernel, product, 2, None
    yield "rms_norm", glue.rms_norm_kernel, {"BLOCK": 4096, "PDL": True}, 8, None
    for whole in (False, True):
        norms = {"BQ": 2048, "BL": 512, "BS": 64, "BZ": 1024, "HAS_Q": True, "MARKS": True, "WHOLE": whole, "PDL": True}
        yield "low_rank_norms" + " whole" * whole, glue.low_rank_norms_kernel, norms, 4, None
    pages = {"MASK": 0x7F80, "BR": latent_check.ROWS, "BC": latent_check.COLUMNS, "TILES": 9}
    yield "latent_check", latent_check.latent_check_kernel, pages, 4, None
    yield "sigmoid_mul", glue.sigmoid_mul_kernel, {"BLOCK": 1024, "PDL": True, "INTERPRET": False}, 4, None
    yield from small_tiles()


def small_tiles() -> Iterator[Variant]:
    """The kernels whose tiles sweep_glue.py varies, as the tables have them and, with the argument ``sweep``, with all
    tiles it tries. The weighted sum and the choice of experts are in expert_kernels_aot.py."""
    import sweep_glue

    from k3_nvidia.kernels import kda_conv, situ
    from k3_nvidia.tuning import glue as small
    from k3_nvidia.tuning import kda

    sweeping = "sweep" in sys.argv
    situ_names: dict[tuple[int, ...], str] = {}
    for rows in (1, 128, 8192):
        situ_names.setdefault(situ.blocks(rows, 2112), f"situ {rows}")
    for tile in {*situ_names, *(t for tiles in sweep_glue.SITU.values() for t in tiles if sweeping)}:
        constants = {"ACT": 1, "BR": tile[0], "BC": tile[1], "INTERPRET": False, "PDL": True}
        yield situ_names.get(tile, f"situ {tile}"), situ.situ_kernel, constants, tile[2], None
    for elements, warps in {small.sigmoid(), *sweep_glue.SIGMOID[: 99 * sweeping]}:
        name = "sigmoid_fp32" if (elements, warps) == small.sigmoid() else f"sigmoid_fp32 {elements} {warps}"
        yield name, glue.sigmoid_fp32_kernel, {"BR": elements // 8, "BC": 8, "PDL": True}, warps, None
    norm = kda.launch("norm")
    for rows, warps in {(norm["ROWS"], norm["num_warps"]), *sweep_glue.NORM[: 99 * sweeping]}:
        name = "gated_norm" if (rows, warps) == (norm["ROWS"], norm["num_warps"]) else f"gated_norm {rows} {warps}"
        yield name, kda_conv.gated_norm_kernel, {"ROWS": rows, "D": 128, "PDL": True}, warps, None


def main() -> None:
    """One line a variant: registers, stack, spills, asynchronous copies, waits for the kernel before."""
    arch = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    seen = set()
    for name, kernel, constants, warps, registers in variants():
        key = (kernel.__name__, tuple(constants.items()), warps, registers)
        if key in seen:
            continue
        seen.add(key)
        types = TYPES | ({"out_ptr": "*fp32"} if kernel is glue.sigmoid_fp32_kernel else {})
        types |= dict.fromkeys(("beta", "linear_beta", "per_beta", "per_linear"), "fp32")
        options: dict[str, Any] = {"num_warps": warps}
        if registers:
            options["maxnreg"] = registers
        if constants.get("PDL"):
            options["launch_pdl"] = True
        binary = triton_aot.compile_kernel(kernel, constants, options, ("cuda", arch, 32), types)
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(binary.asm["cubin"])
            usage, sass = (
                subprocess.run([BIN / tool, *flags, cubin], capture_output=True, text=True, check=True).stdout
                for tool, flags in (("cuobjdump", ["-res-usage"]), ("nvdisasm", []))
            )
        used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert used is not None, usage
        counts = {
            "spills": r"\b(?:LDL|STL)\b", "copies": r"\bLDGSTS", "wait": r"\bACQBULK", "tensor_core": r"\bHG?MMA",
        }  # fmt: skip
        found = {what: len(re.findall(pattern, sass)) for what, pattern in counts.items()}
        facts = {"registers": int(used[1]), "stack": int(used[2]), "shared": int(binary.metadata.shared)}
        print(json.dumps({"name": name, "warps": warps, **facts, **found}), flush=True)


if __name__ == "__main__":
    main()
