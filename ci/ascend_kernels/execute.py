"""Execute on the CPU the linalg that triton-ascend made of a kernel: Debian's MLIR 19 and LLVM 19, then ctypes.

    with launch.executing_with(Executor(folder)): situ(x, 4.0, 25.0)     # x is a CPU tensor

What it shows: the semantics of the vendor's lowering (indexing, masks, order, rounding of casts) with IEEE arithmetic.
What it does not: what hivmc makes of it, the vector unit's own functions, races between cores (programs run in turn).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ascend_kernels.lower import Variant, to_linalg, variant_of

_TO_LLVM = (
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=bufferize-function-boundaries=false allow-return-allocs-from-loops=true",
    "--buffer-hoisting",
    "--buffer-loop-hoisting",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--arith-expand=include-bf16=true",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm=use-generic-functions=true",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
TOOLS = ("mlir-opt", "mlir-translate", "opt", "llc")


def tool(name: str) -> str | None:
    """Path of an MLIR/LLVM 19 program: $K3_LLVM19, then this environment's (its bin folder), then ``name-19``."""
    for folder in (os.environ.get("K3_LLVM19"), f"{sys.prefix}/llvm-19"):
        found = shutil.which(name, path=f"{folder}/bin") if folder else None
        if found:
            return found
    return shutil.which(f"{name}-19")


def missing() -> str:
    """What is not installed here, in one sentence; empty if everything is."""
    gone = [name for name in TOOLS if tool(name) is None]
    gone += [name for name in ("cc",) if shutil.which(name) is None]
    try:
        import triton.backends.ascend  # noqa: F401
    except ImportError:
        gone.append("triton-ascend")
    if not gone:
        return ""
    return f"missing: {', '.join(gone)} (environment `ascend-kernels` of ci/envs.py has them; K3_LLVM19 names LLVM 19)"


def build(linalg: str, folder: Path) -> Path:
    """Shared object of a linalg module; the same text is built once.

    Raises RuntimeError with the message of the program that failed.
    """
    runtime = build_runtime(folder)
    stem = folder / hashlib.sha256((linalg + repr(_TO_LLVM) + runtime.name).encode()).hexdigest()[:16]
    library = stem.with_suffix(".so")
    if library.exists():
        return library
    source = stem.with_suffix(f".{os.getpid()}.mlir")
    steps = [source.with_suffix(s) for s in (".llvm.mlir", ".ll", ".opt.ll", ".o", ".so")]
    source.write_text(linalg)
    _run([tool("mlir-opt"), source, *_TO_LLVM, "-o", steps[0]])
    _run([tool("mlir-translate"), steps[0], "--mlir-to-llvmir", "-o", steps[1]])
    _run([tool("opt"), "-O2", "-S", steps[1], "-o", steps[2]])
    _run([tool("llc"), "-O2", "-relocation-model=pic", "-filetype=obj", steps[2], "-o", steps[3]])
    _run(["cc", "-shared", "-o", steps[4], steps[3], runtime, "-lm", "-lgcc"])
    steps[4].rename(library)
    for file in (source, *steps[:4]):
        file.unlink()
    return library


def build_runtime(folder: Path) -> Path:
    """Shared object of runtime.c."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("runtime.c")
    library = folder / f"runtime-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}.so")
        _run(["cc", "-O2", "-shared", "-fPIC", "-o", part, source])
        part.rename(library)
    return library


def _run(command: list[Any]) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(str(command[0])).name} failed:\n{done.stderr[:3000]}")


class Executor:
    """Launches on CPU tensors: compiles each variant once, then calls it for every program of the grid.

    programs: if given, launches use that many programs whatever the launcher asked for (results must not depend on it).
    """

    def __init__(self, folder: Path, programs: int | None = None) -> None:
        self.folder = folder
        self.programs = programs
        self.runtime = ctypes.CDLL(str(build_runtime(folder)), mode=ctypes.RTLD_GLOBAL)
        self.variants: dict[tuple[str, Variant], Any] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Run one launch to its end."""
        variant = variant_of(kernel, args, constants)
        function = self.variants.get((kernel.__name__, variant))
        if function is None:
            function = self._load(kernel, variant)
            self.variants[(kernel.__name__, variant)] = function
        call: list[Any] = [*_memref(_NOTHING), *_memref(_NOTHING)]  # the runtime's lock and workspace: unused here
        for (_, kind), value in zip(variant.signature, args, strict=True):
            call += _memref(value) if isinstance(value, torch.Tensor) else [_SCALARS[kind](value)]
        programs = self.programs or grid[0]
        for program in range(programs):
            self.runtime.k3_reset()
            function(*call, *(ctypes.c_int32(n) for n in (programs, 1, 1, program, 0, 0)))

    def _load(self, kernel: Any, variant: Variant) -> Any:
        library = build(to_linalg(kernel, variant), self.folder)
        function = getattr(ctypes.CDLL(str(library)), kernel.__name__)
        function.restype = None
        return function


_NOTHING = torch.zeros(64, dtype=torch.int8)
_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def _memref(x: torch.Tensor) -> list[Any]:
    """Descriptor of a one-dimensional memref: allocated and aligned pointer, offset, size, stride."""
    pointer = ctypes.c_void_p(x.data_ptr())
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(2**40), ctypes.c_int64(1)]
