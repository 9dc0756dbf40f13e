"""Ahead-of-time compilation of the expert kernels for sm_90a: a script, because Triton decides at import whether it
interprets.

``python expert_kernels_aot.py [arch [name ...]]`` prints one JSON line a variant: registers, spills, shared memory,
matrix instructions, and what touches registers of products in flight (``sass_hazards``). The names: ``variants``, and
with ``sweep`` every tile of the products that ``benchmarks/sweep_experts.py`` may put into the tables (minutes), with
``sweep-widths`` the first of each width that runs ``wgmma``.
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

import sass_hazards
import triton

from k3_core.testing import triton_aot
from k3_nvidia.kernels import experts_gemm, experts_one, moe_combine, moe_repack, moe_worklist, router, situ
from k3_nvidia.tuning import experts as tuning

TYPES = {
    "x_ptr": "*bf16", "y_ptr": "*bf16", "d_ptr": "*bf16", "out_ptr": "*bf16", "weights_ptr": "*fp32",
    "bias_ptr": "*fp32", "logits_ptr": "*fp32", "beta": "fp32", "linear_beta": "fp32", "factor": "fp32",
}  # fmt: skip
DIVISIBLE = ("hidden", "latent", "num_experts", "width", "L")  # multiples of 16 in every K3 shape
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


def compile_kernel(
    fn: Any, constants: dict[str, Any], warps: int, stages: int, types: dict[str, str] | None = None, arch: int = 90
) -> dict[str, Any]:
    """Compile and disassemble one variant."""
    kinds = TYPES | (types or {})
    if fn.fn.__module__.endswith(("experts_gemm", "experts_one")):
        kinds |= {"w_ptr": "*i16", "w2_ptr": "*i16"}
    options = {"num_warps": warps, "num_stages": stages}
    constants = dict(constants)
    if most := constants.pop("REGISTERS", 0):
        options["maxnreg"] = most
    if "WGMMA" in fn.arg_names:
        constants = constants | {"WGMMA": arch == 90}
    if constants.get("PDL"):
        options["launch_pdl"] = True
    kernel = triton_aot.compile_kernel(fn, constants, options, ("cuda", arch, 32), kinds, DIVISIBLE)
    with tempfile.TemporaryDirectory() as tmp:
        cubin = Path(tmp) / "k.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [BIN / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run([BIN / "nvdisasm", cubin], capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert used is not None, usage
    stores = max((body.count("STS") for body in _loops(sass)), default=0)
    return {
        "loop_shared_stores": stores,
        "registers": int(used[1]),
        "stack": int(used[2]),
        "local": int(used[4]),
        "shared": int(kernel.metadata.shared),
        "hgmma": len(re.findall(r"HGMMA", sass)),
        "hmma": len(re.findall(r"HMMA", sass)),
        "hazards": sass_hazards.hazards(sass),
        "loads_first": len(re.findall(r"\bLDG", re.split(r"\bF(?:FMA|MUL|ADD)\b", sass, maxsplit=1)[0])),
        "local_memory_ops": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "waits": len(re.findall(r"\bACQBULK", sass)),
        "before_wait": len(re.findall(r"\b(?:LDG|STG|ATOM|ATOMG|RED|REDG)\b", sass.partition("ACQBULK")[0])),
        "launches_first": "PREEXIT" in sass.partition("ACQBULK")[0],
        "warps": warps,
    }


def _loops(sass: str) -> list[list[str]]:
    """Opcodes of the innermost loops that hold a matrix instruction."""
    lines: list[tuple[str, str]] = []
    for text in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", text):
            lines.append(("label", label[1]))
        elif op := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*?);", text):
            lines.append((op[1], op[2]))
    at = {name: i for i, (kind, name) in enumerate(lines) if kind == "label"}
    bodies = []
    for i, (op_name, rest) in enumerate(lines):
        target = re.search(r"(\.L_x_\d+)", rest) if op_name == "BRA" else None
        if target and at.get(target[1], i) < i:
            body = [name for name, _ in lines[at[target[1]] : i]]
            if any("MMA" in name for name in body):
                bodies.append(body)
    return bodies


def variants(device: str) -> list[tuple[str, Any, dict[str, Any], int, int, dict[str, str]]]:
    """Every variant that a device's plans of a K3 rank meet: widths 192, 384 and 3072, few pairs first."""
    out: list[tuple[str, Any, dict[str, Any], int, int, dict[str, str]]] = []
    for width in (192, 384, 3072):
        for i, p in enumerate(tuning.plans(device, width)):
            common = {"BN": p.block_n, "BX": p.extra_n, "WIDE": False, "PDL": p.pdl, "INTERPRET": False}
            out.append((f"w13 {width} plan{i}", experts_gemm.w13_kernel,
                        {**common, "MT": p.mt13, "KT": p.kt13, "ACT": 1, "NEXT": p.next_quarters,
                         "REGISTERS": p.regs13}, p.warps13, p.stages13, {}))  # fmt: skip
            if p.rows2 > 0 and width < 3072:
                k1, k2 = (2, 1) if width == 192 else (4, 2)
                kernel, tile = (
                    experts_gemm.w2_kernel,
                    {"MT": p.mt2, "K1": k1, "K2": k2, "HAS2": True, "STAGES": p.stages2},
                )
            else:
                kernel, tile = experts_gemm.w2_wide_kernel, {"MT": p.wide_mt, "KT": p.kt2}
            common |= dict(zip(("BN", "BX"), p.down_n, strict=True))
            out.append((f"w2 {width} plan{i}", kernel, {**common, **tile}, p.warps2, p.stages2, {}))
    for width, (k1, k2) in ((192, (2, 1)), (384, (4, 2))):
        p = tuning.plans(device, width)[0]
        common = {"WIDE": False, "PDL": True, "INTERPRET": False}
        out.append((f"w13 one {width}", experts_one.w13_one_kernel,
                    {**common, "MT": p.one13 or 2, "KT": 2, "ACT": 1, "NEXT": p.next_quarters}, 4, p.one_stages,
                    {}))  # fmt: skip
        out.append((f"w2 one {width}", experts_one.w2_one_kernel,
                    {**common, "MT": p.one2 or 1, "K1": k1, "K2": k2, "HAS2": True, "SLOTS": 16,
                     "STAGES": p.one_rows + 1}, 4, 3, {}))  # fmt: skip
    wide = {"BN": 16, "NEXT": 0, "WIDE": True, "PDL": False, "INTERPRET": False, "MT": 4, "KT": 4, "BX": 0, "ACT": 1}
    out.append(("w13 wide scales", experts_gemm.w13_kernel, wide, 4, 4, {}))
    for tokens in (16, 128):
        out.append((f"logits {tokens}", router.logits_kernel,
                    {"BE": 64, "BT": tokens, "BK": 128, "ZB": 1024, "PDL": True, "INTERPRET": False}, 4,
                    4 if tokens <= 64 else 3, {"w_ptr": "*bf16", "out_ptr": "*fp32"}))  # fmt: skip
    for mode in (0, 1, 2, 3):
        out.append((f"route {mode}", router.route_kernel,
                    {"EB": 1024, "TK": 16, "SPLITS": 14 if mode >= 2 else 1, "HAS_BIAS": True, "RENORM": True,
                     "LIST": mode, "LB": 1024, "WORDS": 4, "BN": 16, "HAS_MAP": False,
                     "CHUNK": 16 if mode == 3 else 512, "PDL": mode >= 2},
                    8 if mode >= 2 else 1, 3, {}))  # fmt: skip
    out.append(("list small", moe_worklist.small_kernel,
                {"TK": 16, "EB": 1024, "WORDS": 4, "BN": 16, "HAS_MAP": True, "CHUNK": 1024, "PDL": False},
                8, 3, {}))  # fmt: skip
    out.append(("list few", moe_worklist.few_kernel, {"PAIRS": 64, "HAS_MAP": True, "PDL": True}, 4, 3, {}))
    out.append(("mark", moe_worklist.mark_kernel, {"TK": 16, "EB": 1024, "HAS_MAP": False, "ROWS": 16}, 4, 3, {}))
    out.append(("count", moe_worklist.count_kernel, {"EB": 1024, "EC": 16, "WC": 32, "BN": 128}, 4, 3, {}))
    out.append(("place", moe_worklist.place_kernel, {"EB": 1024, "HAS_MAP": False, "CHUNK": 1024, "BN2": 96}, 4, 3, {}))
    for every, block in ((False, 1024), (True, 512)):
        out.append(("combine" + " every" * every, moe_combine.combine_kernel,
                    {"TK": 16, "BLOCK": block, "HAS_MAP": False, "EVERY": every, "PDL": True}, 4, 3, {}))  # fmt: skip
    out.append(("situ", situ.situ_kernel, {"ACT": 1, "BR": 16, "BC": 128, "INTERPRET": False, "PDL": True}, 4, 3, {}))
    names = ("low_ptr", "high_ptr", "low_scale_ptr", "high_scale_ptr")
    out.append(("repack", moe_repack.repack_kernel, {"KC": 4}, 4, 3, dict.fromkeys(names, "*u8")))
    return out


def swept() -> Iterator[tuple[str, Any, dict[str, Any], int, int, dict[str, str]]]:
    """Every product that the tuning sweep may choose, as ``variants``."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import experts_case as case
    import sweep_experts as sweep

    for shape in case.SHAPES.values():
        for tokens in sweep.TOKENS:
            for product, n, tile, narrow in sweep.variants(shape, tokens):
                common = {"BN": n[0], "BX": n[1], "WIDE": False, "PDL": False, "INTERPRET": False}
                name = "-".join(map(str, (*n, *tile)))
                if product == "w13":
                    mt, kt, warps, stages, *most = tile
                    yield (
                        f"sweep w13 {name}",
                        experts_gemm.w13_kernel,
                        {**common, "MT": mt, "KT": kt, "ACT": 1, "NEXT": 0, "REGISTERS": sum(most)},
                        warps,
                        stages,
                        {},
                    )
                elif narrow:
                    mt, warps, stages, _ = tile
                    k1, k2 = (2, 1) if shape.width == 192 else (4, 2)
                    blocks = {"K1": k1, "K2": k2, "HAS2": True, "STAGES": stages}
                    yield (
                        f"sweep w2 {shape.width} {name}",
                        experts_gemm.w2_kernel,
                        {**common, "MT": mt, **blocks},
                        warps,
                        stages,
                        {},
                    )
                else:
                    mt, kt, warps, stages = tile
                    yield (
                        f"sweep wide {name}",
                        experts_gemm.w2_wide_kernel,
                        {**common, "MT": mt, "KT": kt},
                        warps,
                        stages,
                        {},
                    )


def main() -> None:
    """``expert_kernels_aot.py [arch [name ...]]``; variants that differ in nothing are compiled once."""
    arch = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    only = sys.argv[2:]
    done: dict[Any, dict[str, Any]] = {}
    sweeping = only in (["sweep"], ["sweep-widths"])
    widths = set()
    for name, fn, constants, warps, stages, types in (
        swept() if sweeping else variants(tuning.HOPPER if arch == 90 else "default")
    ):
        if only and name not in only and not sweeping:
            continue
        if only == ["sweep-widths"]:
            width = (fn.__name__, constants["BN"], constants["BX"])
            if constants["BN"] < 16 or width in widths:
                continue
            widths.add(width)
        key = (fn.__name__, tuple(sorted(constants.items())), warps, stages)
        if key not in done:
            done[key] = compile_kernel(fn, constants, warps, stages, types, arch)
        print(json.dumps({"name": name, **done[key]}), flush=True)


if __name__ == "__main__":
    main()
