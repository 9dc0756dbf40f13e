"""experts.cu compiled ahead of time for sm_90a at real tiles: registers, spills, shared memory, products in flight.

Needs a CUDA compiler (nvcc) and, for the listing, the disassembler that Triton brings; the wheel itself uses NVRTC,
which is the same front end.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import sass_hazards

from k3_nvidia.kernels import experts_cuda
from k3_nvidia.tuning.experts import CudaTile

NVCC = shutil.which("nvcc")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None, reason="no nvcc")]
#: name: down product, column blocks of resident tokens, tiles, bytes of stack that epilogues may take.
VARIANTS = {
    "gate/up, 8192 tokens": (False, 0, CudaTile(2, 2, 176, 7), 256),
    "gate/up of 192 rows": (False, 0, CudaTile(3, 1, 160, 8), 128),
    "gate/up, 1024 tokens": (False, 0, CudaTile(2, 2, 32, 8, 2), 0),
    "down of TP8, 8192 tokens": (True, 6, CudaTile(2, 2, 176, 20, 1, 2), 64),
    "down of TP16, 8192 tokens": (True, 3, CudaTile(2, 2, 176, 24, 1, 2), 64),
    "down of TP8, 1024 tokens": (True, 6, CudaTile(2, 2, 32, 16, 2, 2), 0),
}


def listing(cubin: Path) -> str:
    """The machine code, or "" where there is no disassembler."""
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm" if spec and spec.origin else None
    if tool is None or not tool.exists():
        return ""
    return subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout


def product_loops(sass: str) -> list[list[str]]:
    """Opcodes of every loop with products in which no other such loop lies."""
    code, labels = sass_hazards.parse(sass)
    spans = []
    for i, (_, predicate, opcode, operands) in enumerate(code):
        target = re.search(r"(\.L_x_\d+)", operands)
        # without a predicate: back from the second try of a wait, which stands behind everything
        if opcode.startswith("BRA") and predicate and target and labels.get(target[1], i) < i:
            spans.append((labels[target[1]], i))
    bodies = {span: [c[2] for c in code[span[0] : span[1] + 1]] for span in spans}
    loops = {s: ops for s, ops in bodies.items() if any(o.startswith("HGMMA") for o in ops)}
    return [ops for s, ops in loops.items() if not any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in loops)]


@pytest.mark.parametrize("name", VARIANTS)
def test_fits_the_multiprocessor(name: str, tmp_path: Path) -> None:
    down, columns, tile, stack = VARIANTS[name]
    assert experts_cuda.tile_refusal(tile, columns or 56, down) == ""
    kernel = experts_cuda.kernel(down, columns, tile, 0 if down else 1)
    source = resources.files("k3_nvidia.kernels.cuda").joinpath("experts.cu")
    defined = [f"-D{k}={v}" for k, v in kernel.definitions.items()]
    cubin = tmp_path / "kernel.cubin"
    command = [str(NVCC), "-arch=sm_90a", *defined, "-Xptxas", "-v", "-cubin", str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])  # type: ignore[index]
    used = int(re.search(r"(\d+) bytes stack frame", done.stderr)[1])  # type: ignore[index]
    assert "C75" not in done.stderr, "the assembler serialises products"
    assert used <= stack
    assert tile.blocks * kernel.threads * -(-registers // 8) * 8 <= 65536
    producer, consumer = experts_cuda.registers(tile)
    assert producer + tile.groups * consumer <= (tile.groups + 1) * registers // 8 * 8, (
        "more than the block starts with"
    )
    assert tile.blocks * (kernel.shared + 1024) <= 228 * 1024
    sass = listing(cubin)
    if not sass:
        pytest.skip("no disassembler: registers in flight not looked at")
    assert sass_hazards.hazards(sass) == []
    loops = product_loops(sass)
    assert len(loops) == bin(experts_cuda.widths(tile.widest)).count("1")
    for loop in loops:
        assert sum(o.startswith("HGMMA") for o in loop) == 8
        assert not any(o.startswith(("STL", "LDL", "STS")) for o in loop), "spills or moves operands in its loop"
        # 128 rows x 64 columns: two times 60 of decode, 8 of scales, 4 products, and what waits and loads
        assert len(loop) <= (320 if tile.tiles == 1 else 256)
