"""Variants are compiled ahead of their launches by several threads, and a start-up says what it spent on compiling."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from k3_core.operators import compiling, triton_host
from k3_nvidia.kernels import cuda_host
from k3_nvidia.kernels.situ import situ_kernel

pytestmark = pytest.mark.usefixtures("without_interpreter")

OPTIONS: dict[str, Any] = {"ACT": 1, "BR": 1, "INTERPRET": False, "PDL": False, "num_warps": 4}


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler for a device that is not there, with an empty cache."""
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("K3_COMPILE_THREADS", "2")
    before = driver._active
    driver.set_active(Hopper())
    situ_kernel.device_caches.clear()
    yield
    situ_kernel.device_caches.clear()
    driver._active = before


def launch(columns: int) -> Any:
    x, out = torch.empty(4, 1024, dtype=torch.bfloat16), torch.empty(4, 512, dtype=torch.bfloat16)
    return triton_host.Launcher(situ_kernel)(
        (4, 512 // columns), x, out, 4, 512, 4.0, 25.0, 0.25, 0.04, 1024, 512, BC=columns, **OPTIONS
    )


def compiled() -> dict[Any, Any]:
    return situ_kernel.device_caches[0][0]


def test_named_variants_are_compiled_and_nothing_is_launched(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler import CompiledKernel

    threads, original = set(), triton.compiler.compile

    def noting(*args: Any, **named: Any) -> Any:
        threads.add(threading.current_thread())
        return original(*args, **named)

    monkeypatch.setattr(triton.compiler, "compile", noting)
    monkeypatch.setattr(CompiledKernel, "run", property(lambda kernel: pytest.fail("launched")))
    with compiling.timed() as spent:
        with spent.part("named"), compiling.ahead() as possible:
            assert possible
            for columns in (128, 256, 128, 512):
                launch(columns)
        assert len(compiled()) == 3
        assert all(isinstance(kernel, CompiledKernel) for kernel in compiled().values())
        assert threading.main_thread() not in threads
        assert spent.compilers["Triton"][::2] == (3, 0)
        situ_kernel.device_caches.clear()
        with compiling.ahead():
            launch(128)
        assert spent.compilers["Triton"][::2] == (3, 1)
    assert "Triton: 3 compiled and 1 loaded in" in spent.told()
    assert "named" in spent.told()
    assert not compiling.naming


def test_a_kernel_that_does_not_compile_is_left_for_its_launch(hopper: None) -> None:
    with compiling.ahead():
        launch(96)  # no power of two
        launch(128)
    assert len(compiled()) == 1
    assert not compiling.naming


def test_one_thread_changes_nothing(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("K3_COMPILE_THREADS", "1")
    run = JITFunction.run
    with compiling.ahead() as possible:
        assert not possible
        assert JITFunction.run is run


def test_other_compilers_are_noted_where_somebody_asks() -> None:
    with compiling.timing("CuTe"):
        pass
    with compiling.timed() as spent, compiling.timing("CuTe"), compiling.timing("NVRTC") as one:
        one.cached = True
    assert spent.compilers["CuTe"][::2] == (1, 0)
    assert spent.compilers["NVRTC"][::2] == (0, 1)


class Nvrtc:
    """Stands for NVRTC: counts what it compiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
        self.made: list[tuple[str, str, dict[str, int]]] = []
        monkeypatch.setenv("K3_CACHE_DIR", cache)
        monkeypatch.setattr(cuda_host, "compile_source", self.compile)
        monkeypatch.setattr(cuda_host, "version", lambda: (13, 0))

    def compile(self, text: str, arch: str, definitions: dict[str, int]) -> bytes:
        self.made.append((text, arch, definitions))
        return f"{arch} {sorted(definitions.items())} {hash(text)}".encode()


SOURCES = sorted((Path(cuda_host.__file__).parent / "cuda").glob("*.cu"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_source_is_one_text_with_its_header(path: Path) -> None:
    """NVRTC is given no other file, and the key of the cache covers all; every line has the number of its file."""
    lines: dict[str, dict[int, str]] = {}
    name, number = path.name, 0
    for line in cuda_host.source(path.stem).splitlines():
        if line.startswith("#line"):
            _, at, name = line.split()
            name, number = name.strip('"'), int(at) - 1
            continue
        number += 1
        lines.setdefault(name, {})[number] = line
    assert sorted(lines) == ["device.cuh", path.name]
    for file, found in lines.items():
        own = (path.parent / file).read_text().splitlines()
        assert [n for n, text in enumerate(own, 1) if text != found.get(n)] == (
            [own.index('#include "device.cuh"') + 1] if file == path.name else []
        )
    assert not [line for part in lines.values() for line in part.values() if line.startswith("#include")]


def kernel(**definitions: int) -> cuda_host.CudaKernel:
    return cuda_host.CudaKernel("kda_chunk", "kda_chunk_cuda", 128, 0, **definitions)


def test_binaries_of_cuda_kernels_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = Nvrtc(monkeypatch, str(tmp_path / "new" / "k3"))
    first = kernel(A=1).binary("sm_90a")
    with compiling.timed() as spent:
        assert kernel(A=1).binary("sm_90a") == first
    assert len(nvrtc.made) == 1
    assert spent.compilers["NVRTC"][::2] == (0, 1)
    others = [(kernel(A=2), "sm_90a"), (kernel(A=1), "sm_100"), (kernel(AA=1), "sm_90a")]
    assert len({first, *(one.binary(arch) for one, arch in others)}) == 4
    monkeypatch.setattr(cuda_host, "source", lambda name: "another")
    assert kernel(A=1).binary("sm_90a") != first
    monkeypatch.setattr(cuda_host, "version", lambda: (13, 1))
    kernel(A=1).binary("sm_90a")
    assert len(nvrtc.made) == 6
    assert all(path.suffix == ".bin" for path in (tmp_path / "new" / "k3").iterdir()), "no temporary file is left"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"x" + data[41:]]
)
def test_a_damaged_file_is_made_anew(damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = Nvrtc(monkeypatch, str(tmp_path))
    first = kernel(A=1).binary("sm_90a")
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert kernel(A=1).binary("sm_90a") == first
    assert len(nvrtc.made) == 2
    assert path.read_bytes() == whole


@pytest.mark.parametrize("cache", ["", "/proc/none", "/dev/null/none"])
def test_without_a_folder_nothing_is_kept(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = Nvrtc(monkeypatch, cache)
    assert kernel(A=1).binary("sm_90a") == kernel(A=1).binary("sm_90a")
    assert len(nvrtc.made) == 2


class Nothing(ctypes.Structure):
    """No arguments."""

    _fields_: ClassVar[list[Any]] = []


def test_cuda_kernels_are_compiled_ahead_and_not_launched(
    hopper: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = Nvrtc(monkeypatch, str(tmp_path))
    monkeypatch.setattr(cuda_host, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(cuda_host, "_driver", lambda: pytest.fail("launched"))
    one = kernel(A=1)
    with compiling.ahead():
        for _ in range(3):
            one((1, 1, 1), Nothing(), torch.device("cuda", 0))
    assert len(nvrtc.made) == 1
    assert list(one._binaries) == ["sm_90a"]
