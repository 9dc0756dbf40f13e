"""CUDA kernels of this package run on the CPU: `emulated` replaces their launches (see cuda_emulation.hpp)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3_nvidia.kernels import cuda_host

HERE = Path(__file__).resolve().parent
#: Type of the parameter, by kernel.
ARGUMENTS = {
    "kda_chunk_cuda": "Args",
    "kda_pass_cuda": "PassArgs",
    "kda_scan_bulk_cuda": "ScanArgs",
}
_libraries: dict[tuple[str, str, tuple[tuple[str, int], ...]], ctypes.CDLL] = {}
Edit = Callable[[str, str], str]


def library(name: str, entry: str, definitions: dict[str, int], edit: Edit | None = None) -> ctypes.CDLL:
    """The kernel as a library, built once a source and definitions; edit(name, source) makes mutants."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    source = cuda_host.source(name)
    source = edit(name, source) if edit else source
    key = (entry, source, tuple(sorted(definitions.items())))
    if key not in _libraries:
        folder = Path(tempfile.mkdtemp(prefix="emulated-"))
        (folder / "kernel.cu").write_text(source)
        defined = [f"-D{k}={v}" for k, v in definitions.items()]
        names = [f'-DKERNEL="{folder / "kernel.cu"}"', f"-DENTRY={entry}", f"-DARGUMENTS={ARGUMENTS[entry]}"]
        command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{HERE}", *defined, *names]
        subprocess.run([*command, HERE / "cuda_emulation.cpp", "-o", folder / "kernel.so"], check=True)
        _libraries[key] = ctypes.CDLL(str(folder / "kernel.so"))
        shutil.rmtree(folder)
    return _libraries[key]


def emulated(monkeypatch: pytest.MonkeyPatch, edit: Edit | None = None, seed: int = 1) -> list[str]:
    """From here on every launch runs on the CPU; returns the entries that ran, in order."""
    ran: list[str] = []

    def call(
        self: cuda_host.CudaKernel,
        grid: tuple[int, int, int],
        arguments: ctypes.Structure,
        device: torch.device,
        overlap: bool = False,
    ) -> None:
        ran.append(self.entry)
        kernel = library(self.name, self.entry, self.definitions, edit)
        if kernel.emulate(ctypes.byref(arguments), *grid, self.threads, self.shared, seed):
            raise RuntimeError("a block hangs: every thread waits")

    monkeypatch.setattr(cuda_host.CudaKernel, "__call__", call)
    return ran
