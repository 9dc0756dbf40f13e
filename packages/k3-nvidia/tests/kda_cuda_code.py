"""Machine code of the CUDA kernels of KDA, to be compared between two states of the sources: a script.

``python kda_cuda_code.py FOLDER [--nvrtc libnvrtc.so.13]`` compiles every form that a table, a warm-up or a test
selects, with the options and the text that NVRTC is given in service, and writes FOLDER/<form>.sass (instructions) and
FOLDER/binaries.txt (a SHA-256 of each whole binary, in which the layout of the parameters is). ``diff -r`` of two such
folders is empty where nothing has changed for the device. --nvrtc: the library, where this PyTorch brings none.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import triton

from k3_nvidia.kernels import cuda_host, kda_chunk_cuda, kda_passes_cuda, kda_step_cuda

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
HOPPER = ("sm_90a",)
Form = tuple[str, cuda_host.CudaKernel, tuple[str, ...]]  # name, kernel, architectures


def prefill() -> Iterator[Form]:
    """Chunk kernel, passes and scan: those of tuning/kda.json and of the tests."""
    for blocks, tiled in ((3, True), (3, False), (2, False)):
        archs = ("sm_90a", "sm_80", "sm_89", "sm_100", "sm_120") if blocks == 3 else HOPPER
        yield f"chunk-{blocks}-tiled{int(tiled)}", kda_chunk_cuda.kernel(blocks, tiled), archs
    for groups, stages, wide in itertools.product((1, 2), (2, 4), (True, False)):
        name = f"local-{groups}x{stages}-wide{int(wide)}"
        yield name, kda_passes_cuda.kernel(False, groups, stages, wide), HOPPER
    for groups, stages, wide in itertools.product((1, 2), (2, 3), (True, False)):
        yield f"output-{groups}x{stages}-wide{int(wide)}", kda_passes_cuda.kernel(True, groups, stages, wide), HOPPER
    for rows, stages in ((16, 3), (16, 2), (32, 2), (32, 3)):
        yield f"scan-{rows}x{stages}", kda_passes_cuda.scan_kernel(rows, stages), HOPPER


#: Blocks of a cluster, warps, bulk copies, overlap, blocks a multiprocessor: of tuning/kda.json, then of the tests and
#: of benchmarks/sweep_kda.py.
DECODE_TABLE, VERIFY_TABLE = [(4, 8, 0, 1, 3)], [(4, 8, 0, 1, 1), (2, 8, 0, 1, 1), (2, 8, 0, 1, 3)]
SHAPES = [(4, 4, 0), (4, 8, 0), (2, 8, 0), (1, 8, 1), (1, 16, 0), (2, 4, 1)]
OTHERS = [(*shape, overlap, 1) for shape in SHAPES for overlap in (0, 1)] + [(4, 4, 0, 1, 5)]


def steps() -> Iterator[Form]:
    """Decode (no tokens) and verification. The table's forms in every gate, slot, norm type and number of tokens."""
    kinds = list(itertools.product((1, 0), (0, 1), (0, 1)))
    wanted = [(form, 0, kind) for form in DECODE_TABLE for kind in kinds]
    wanted += [(form, tokens, kind) for form in VERIFY_TABLE for tokens in (1, 2, 4, 8, 16) for kind in kinds]
    for form in OTHERS:
        most = (0,) if form[2] else (0, 4, 8)
        wanted += [(form, tokens, kind) for tokens in most for kind in ((1, 0, 0), (0, 0, 1))]
    for form, tokens, kind in dict.fromkeys(wanted):
        split, warps, bulk, overlap, blocks = form
        kernel = kda_step_cuda.kernel(split, warps, bool(bulk), bool(overlap), blocks, tokens, *map(bool, kind))
        table = form in DECODE_TABLE or (form in VERIFY_TABLE and tokens == 8)
        archs = ("sm_90a", "sm_100", "sm_120") if table and kind == kinds[0] else HOPPER
        yield "step-" + "-".join(map(str, (*form, f"tokens{tokens}", *kind))), kernel, archs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nvrtc", default="")
    parser.add_argument("--only", default="", help="forms whose name starts so")
    args = parser.parse_args()
    if args.nvrtc:
        library = ctypes.CDLL(args.nvrtc)
        cuda_host.nvrtc = lambda: library
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, kernel, archs in itertools.chain(prefill(), steps()):
        if not name.startswith(args.only):
            continue
        for arch in archs:
            binary = cuda_host.compile_source(cuda_host.source(kernel.name), arch, kernel.definitions)
            path = args.folder / f"{name}-{arch}.cubin"
            path.write_bytes(binary)
            code = subprocess.run([CUOBJDUMP, "-sass", path], capture_output=True, text=True, check=True).stdout
            path.with_suffix(".sass").write_text(code)
            path.unlink()
            lines.append(f"{name}-{arch} {hashlib.sha256(binary).hexdigest()}")
            print(lines[-1], flush=True)
    (args.folder / f"binaries{args.only}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
