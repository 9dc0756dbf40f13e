"""The CUDA kernels of KDA prefill compiled ahead of time for sm_90a: registers, stack, matrix instructions.

Needs a CUDA compiler (nvcc); the wheel itself uses NVRTC, which is the same front end.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from k3_nvidia.kernels import cuda_host, kda_chunk_cuda, kda_passes_cuda
from k3_nvidia.kernels.cuda_host import CudaKernel

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")
REGISTERS = 65536
#: (kernel, blocks a multiprocessor, bytes of stack that spills may take, wgmma products).
VARIANTS = [
    (kda_chunk_cuda.kernel(2), 2, 0, 0),
    (kda_chunk_cuda.kernel(3), 3, 64, 0),
    (kda_chunk_cuda.kernel(3, True), 3, 64, 0),
    *((kda_passes_cuda.kernel(False, groups, 4, True), 1, 0, 12) for groups in (1, 2)),
    *((kda_passes_cuda.kernel(True, groups, 3, wide), 1, 0, 24) for groups in (1, 2) for wide in (True, False)),
    *((kda_passes_cuda.scan_kernel(rows, stages), 1, 0, 16) for rows, stages in ((16, 3), (16, 2), (32, 2))),
]


def label(variant: tuple[CudaKernel, int, int, int]) -> str:
    kernel = variant[0]
    return "-".join([kernel.name, *(f"{k}{v}" for k, v in kernel.definitions.items())])


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_fits_the_multiprocessor(variant: tuple[CudaKernel, int, int, int], tmp_path: Path) -> None:
    kernel, blocks, stack, products = variant
    source = tmp_path / "kernel.cu"
    source.write_text(cuda_host.source(kernel.name))
    defined = [f"-D{k}={v}" for k, v in kernel.definitions.items()]
    command = [str(NVCC), "-arch=sm_90a", *defined, "-Xptxas", "-v", "--keep", "--keep-dir", str(tmp_path), "-cubin"]
    done = subprocess.run(
        [*command, str(source), "-o", str(tmp_path / "kernel.cubin")], capture_output=True, text=True, check=True
    )
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])  # type: ignore[index]
    used = int(re.search(r"(\d+) bytes stack frame", done.stderr)[1])  # type: ignore[index]
    assert "C75" not in done.stderr, "the assembler serialises products"
    assert used <= stack
    # registers are dealt in units of 8 a thread
    assert blocks * kernel.threads * -(-registers // 8) * 8 <= REGISTERS
    assert blocks * (kernel.shared + 1024) <= 228 * 1024
    code = next(tmp_path.glob("*.ptx")).read_text()
    assert len(re.findall(r"^wgmma\.mma_async", code, re.MULTILINE)) == products
