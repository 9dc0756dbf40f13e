"""Compile linalg with Huawei's own back end (PyPI ``ascendnpu-ir``) as far as it goes without CANN: to HIVM.

The last step, ``hivmc``, is in no registry; a stand-in that only tells a version lets the driver finish. What can be
read: whether the kernel is legal, which buffers it has where (unified buffer, L1), and whether memory is walked element
by element.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

#: Device generations and the target name whose tables the compiler takes for each.
TARGETS = {"910B3": "Ascend910B3", "910_93": "Ascend910_9391", "950": "Ascend950PR_9589"}
#: Bytes of a vector core's unified buffer (910B, 910_93); the compiler names its own limit for 950.
UNIFIED_BUFFER = 196608

_SHIM = '#!/bin/sh\nif [ "$1" = "--version" ]; then echo "hivmc 1.2.0"; fi\nexit 0\n'


@dataclass(frozen=True)
class Result:
    """One compilation.

    ub, l1: largest extent of live buffers, bytes. limit: size of the unified buffer that the compiler assumed. scalar:
    places in the optimised HIVM where a buffer is walked element by element. error: the compiler's message, or "".
    """

    ub: int
    l1: int
    limit: int
    scalar: tuple[str, ...]
    error: str


def program(target: str) -> Path | None:
    """The compiler for a target: A5 (950) has its own. None if ascendnpu-ir is not installed."""
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None or spec.origin is None:
        return None
    name = "bishengir-compile-a5" if target.startswith("Ascend950") else "bishengir-compile"
    path = Path(spec.origin).parent / "bin" / name
    return path if path.exists() else None


def missing() -> str:
    """What is not installed here; empty if everything is."""
    gone = [t for t in TARGETS.values() if program(t) is None]
    if not gone:
        return ""
    return f"bishengir-compile for {', '.join(gone)} is missing (environment `ascend-kernels` of ci/envs.py has it)"


def compile_for(linalg: str, target: str, folder: Path) -> Result:
    """Compile a kernel's linalg for a target (a value of TARGETS) with the options that triton-ascend passes."""
    compiler = program(target)
    if compiler is None:
        raise RuntimeError(missing())
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("hivmc", "hivmc-a5"):
        shim = folder / name
        shim.write_text(_SHIM)
        shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    for old in (*folder.glob("memory_info_*.json"), *folder.glob("*.mlir")):
        old.unlink()
    source = folder / "kernel.ttadapter"
    source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg))
    a5 = compiler.name.endswith("-a5")
    options = [
        f"--target={target}",
        # triton-ascend asks for both on A2 and A3 and for neither on 950.
        f"--enable-auto-multi-buffer={not a5}",
        f"--enable-auto-bind-sub-block={not a5}",
        "--enable-hfusion-compile=true",
        "--enable-hivm-compile=true",
        "--enable-triton-kernel-compile=true",
        "--enable-print-memory-allocated-size" if a5 else "--enable-memory-display",
        f"--save-temps={folder}",
    ]
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [str(compiler), str(source), *options, "-o", str(folder / "kernel")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode < 0:
        # The compiler itself died by a signal: seen once in some hundred runs of a loaded machine, and not again on the
        # same input. A second death is the result.
        print(f"{compiler.name} {target} died by signal {-done.returncode}; once more", flush=True)
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    optimised = "".join(p.read_text() for p in sorted(folder.glob("*hivm*.mlir")))
    error = ""
    if done.returncode or not optimised:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        error = "; ".join(lines[:3]) or f"exit code {done.returncode} without a message"
    printed = re.search(r"Allocated UB size = (\d+) bits", done.stdout + done.stderr)
    limit = re.search(r'"UB_SIZE", (\d+)', optimised)
    return Result(
        ub=int(printed.group(1)) // 8 if printed else _peak(folder, "ub"),
        l1=_peak(folder, "cbuf"),
        limit=int(limit.group(1)) // 8 if limit else UNIFIED_BUFFER,
        scalar=tuple(scalar_walks(optimised)),
        error=error,
    )


def _peak(folder: Path, space: str) -> int:
    """Highest end of a buffer in an address space, bytes: offsets are bytes, extents bits."""
    top = 0
    for file in folder.glob("memory_info_*.json"):
        for record in json.loads(file.read_text())["Record"]:
            for buffer in record["memory_info_array"]:
                if f"address_space<{space}>" in buffer["buffer"]:
                    top = max(top, max(buffer["offset"], default=0) + -(-buffer["extent"] // 8))
    return top


def scalar_walks(mlir: str) -> list[str]:
    """Loads and stores of single elements whose index moves: the mark of a loop over elements.

    A scalar that lives in a buffer of one element (a running maximum, a loaded index) is read at a constant index and
    does not count.
    """
    found = []
    access = re.compile(r"memref\.(load|store) [^\n]*?(%[\w#]+)\[([^\]]*)\] : (memref<[^\n]*>)")
    for match in access.finditer(mlir):
        kind, _, index, memory = match.groups()
        if memory.startswith(("memref<1x", "memref<f", "memref<i", "memref<bf")):
            continue
        if "address_space<ub>" in memory and not re.fullmatch(r"(%c\d+(_\d+)?(, )?)*", index):
            found.append(f"{kind} [{index}] of {memory.split(',')[0]}>")
    return found
