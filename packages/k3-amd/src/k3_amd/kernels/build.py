"""Building a kernel ahead of time for gfx942 or gfx950: code object, metadata, argument order. No torch, no GPU.

    binary = build(catalogue.variants("gfx942")["decode fp32"], "gfx942")
    binary.code                hsaco, an ELF that hipModuleLoadData takes
    binary.metadata            entry point, lanes of a wave, waves, LDS bytes to pass at launch, kernarg bytes
    binary.arguments           (name, Triton type, offset, bytes) in the order of the kernarg segment
    resources(binary)          registers, spills, scratch, LDS, occupancy, instructions: what the compile gate compares

Triton appends scratch pointers of its own to the kernarg segment; they are named ``(scratch)`` and may be null unless
metadata says that scratch is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3_core.testing import triton_aot

WAVE = 64


@dataclass(frozen=True)
class Variant:
    """One compilation of one kernel.

    constants: compile-time arguments, a run-time integer that equals one included. options: the compiler's. types:
    Triton types of the other arguments where they are not ``*i32`` or ``i32``. divisible: integers that are multiples
    of 16 in every call. matrix: part of the name of a matrix instruction that must appear, "" if none may. wide: least
    number of 16-byte loads. narrow: pointers whose storage has at most 2 GiB, which Triton specialises on here.
    """

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    matrix: str = ""
    wide: int = 0
    narrow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binary:
    """A code object and what a launcher needs to know."""

    name: str
    arch: str
    code: bytes
    metadata: dict[str, Any]
    arguments: tuple[tuple[str, str, int, int], ...]
    assembly: str


def build(variant: Variant, arch: str) -> Binary:
    """Compile one variant for an architecture. Raises what Triton raises where it cannot."""
    compiled = triton_aot.compile_kernel(
        variant.kernel, variant.constants, variant.options, ("hip", arch, WAVE), variant.types, variant.divisible,
        variant.narrow,
    )  # fmt: skip
    assembly = compiled.asm["amdgcn"]
    names = triton_aot.argument_types(variant.kernel, variant.constants, variant.types)
    metadata = {
        "entry": compiled.metadata.name,
        "wave": WAVE,
        "waves": compiled.metadata.num_warps,
        "lds": compiled.metadata.shared,
        "kernarg": _number(assembly, "kernarg_segment_size"),
        "options": dict(variant.options),
    }
    return Binary(variant.name, arch, compiled.asm["hsaco"], metadata, _arguments(assembly, names), assembly)


def _arguments(assembly: str, names: Mapping[str, str]) -> tuple[tuple[str, str, int, int], ...]:
    """Names and types beside the offsets and sizes of the code object's own metadata."""
    block = assembly[assembly.index(".args:") : assembly.index(".group_segment_fixed_size")]
    places = [(int(offset), int(size)) for offset, size in re.findall(r"\.offset:\s*(\d+)\s+\.size:\s*(\d+)", block)]
    known = list(names.items()) + [("(scratch)", "*i8")] * (len(places) - len(names))
    return tuple((name, kind, *place) for (name, kind), place in zip(known, places, strict=True))


def _number(assembly: str, key: str) -> int:
    found = re.search(rf"\.{key}:\s*(\d+)", assembly)
    if found is None:
        raise ValueError(f"the assembly says nothing of {key}")
    return int(found[1])


def resources(binary: Binary) -> dict[str, Any]:
    """What the compiler spent: the row of the compile gate's table.

    vgpr and agpr are registers a lane, occupancy is waves a SIMD by registers alone, lds bytes a workgroup; matrix
    names the matrix instructions with their number; load16 and store16 count 16-byte global accesses; denormals:
    whether fp32 denormals are kept (the unpacked experts multiply them).
    """
    text = binary.assembly
    counts = Counter(re.findall(r"^\s+((?:v_mfma|buffer_|global_|flat_|scratch_|ds_|v_cvt_scale)\w+)", text, re.M))
    wide = [(name, n) for name, n in counts.items() if name.endswith("dwordx4")]
    occupancy = re.search(r"; Occupancy:\s*(\d+)", text)
    denormals = re.search(r"\.amdhsa_float_denorm_mode_32\s+(\d+)", text)
    return {
        "vgpr": _number(text, "vgpr_count"),
        "agpr": _number(text, "agpr_count"),
        "sgpr": _number(text, "sgpr_count"),
        "spills": _number(text, "vgpr_spill_count") + _number(text, "sgpr_spill_count"),
        "scratch": _number(text, "private_segment_fixed_size"),
        "lds": int(binary.metadata["lds"]),
        "waves": int(binary.metadata["waves"]),
        "occupancy": int(occupancy[1]) if occupancy else 0,
        "matrix": {n: c for n, c in sorted(counts.items()) if n.startswith("v_mfma")},
        "converts": sum(c for n, c in counts.items() if n.startswith("v_cvt_scale")),
        "load16": sum(c for n, c in wide if "_load_" in n),
        "store16": sum(c for n, c in wide if "_store_" in n),
        "scratch_ops": sum(c for n, c in counts.items() if n.startswith("scratch_")),
        "denormals": denormals is not None and denormals[1] == "3",
    }
