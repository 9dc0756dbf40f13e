"""Kernels in CUDA C++: compiled from source by NVRTC at first use, loaded and launched through the driver.

For kernels whose layouts must be chosen lane by lane. NVRTC and the driver are what PyTorch itself brings and uses; no
compiler on the machine, no header files, no build step of the wheel. A binary is made per source, definitions and
architecture and kept on disk; compilation takes about a second and happens in warm-up like Triton's.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from k3_core.operators import compiling, disk_cache

OPTIONS = ("--std=c++17",)  # of every compilation
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


class _Value(ctypes.Union):
    _fields_ = [("number", ctypes.c_int), ("pad", ctypes.c_char * 64)]


class _Attribute(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _Value)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig of the driver."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def _nvrtc_names() -> Iterator[str]:
    """Where this PyTorch's NVRTC may lie: already loaded or on the loader's path, else beside the nvidia packages."""
    major = str(torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    yield name
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for folder in (f"cu{major}/lib", "cuda_nvrtc/lib"):
            path = Path(root) / folder / name
            if path.exists():
                yield str(path)


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """NVRTC of PyTorch's CUDA version. Raises OSError where there is none."""
    if not torch.version.cuda:
        raise OSError("this PyTorch is not built for CUDA")
    reason: OSError | None = None
    for name in _nvrtc_names():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reason = error
    raise OSError(f"NVRTC of CUDA {torch.version.cuda} was not found: {reason}")


@functools.cache
def version() -> tuple[int, int]:
    """(major, minor) of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({code})")


def source(name: str) -> str:
    """Text of kernels/cuda/<name>.cu with what it includes from that folder in its place.

    One text, so the key of the disk cache covers the headers; lines keep the numbers of their files in a log.
    """
    folder = resources.files("k3_nvidia.kernels.cuda")
    own = folder.joinpath(f"{name}.cu").read_text(encoding="utf-8")

    def placed(found: re.Match[str]) -> str:
        header = folder.joinpath(found[1]).read_text(encoding="utf-8")
        after = own.count("\n", 0, found.end()) + 2
        return f'#line 1 "{found[1]}"\n{header}#line {after} "{name}.cu"'

    return INCLUDE.sub(placed, own)


def compile_source(text: str, arch: str, definitions: dict[str, int]) -> bytes:
    """The binary for ``arch`` ("sm_90"). Raises OSError without NVRTC, RuntimeError with its log if it refuses."""
    library = nvrtc()
    program = ctypes.c_void_p()
    created = library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    if created:
        raise RuntimeError(f"NVRTC: no program (error {created})")
    options = [f"--gpu-architecture={arch}", *OPTIONS, *(f"-D{k}={v}" for k, v in definitions.items())]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    size = ctypes.c_size_t()
    try:
        if library.nvrtcCompileProgram(program, len(options), array):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC refuses the kernel for {arch}:\n{log.value.decode(errors='replace')}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def architecture(device: int) -> str:
    """What to compile for; on Hopper with the instructions that only it has."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


@functools.cache
def refusal() -> str:
    """Why no kernel of this kind can be compiled here, or ""."""
    try:
        nvrtc()
        _driver()
    except OSError as error:
        return str(error)
    return ""


#: Kernels whose binary is being made in the background.
_named: set[CudaKernel] = set()


class CudaKernel:
    """One kernel of a source file; callable as kernel(grid, arguments, device), arguments a ctypes.Structure."""

    def __init__(self, name: str, entry: str, threads: int, shared: int, **definitions: int) -> None:
        self.name, self.entry, self.threads, self.shared = name, entry, threads, shared
        self.definitions = definitions
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._binaries: dict[str, bytes] = {}

    def function(self, device: int) -> ctypes.c_void_p:
        """The driver's handle on a device, made at the first call."""
        if device not in self._functions:
            self._functions[device] = self.load(self.binary(architecture(device)), device)
        return self._functions[device]

    def binary(self, arch: str) -> bytes:
        """The binary for ``arch``, compiled at the first call on this machine."""
        if arch not in self._binaries:
            text = source(self.name)
            parts = (text, arch, repr(OPTIONS), repr(sorted(self.definitions.items())), repr(version()))
            self._binaries[arch] = disk_cache.stored(
                "NVRTC", parts, lambda: compile_source(text, arch, self.definitions)
            )
        return self._binaries[arch]

    def load(self, binary: bytes, device: int) -> ctypes.c_void_p:
        """The driver's handle of a compiled binary."""
        driver, library, kernel = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.init()
        _check(
            driver.cuLibraryLoadData(ctypes.byref(library), binary, None, None, 0, None, None, 0), f"load {self.name}"
        )
        _check(driver.cuLibraryGetKernel(ctypes.byref(kernel), library, self.entry.encode()), f"find {self.entry}")
        place = ctypes.c_int()
        _check(driver.cuDeviceGet(ctypes.byref(place), device), "cuDeviceGet")
        _check(
            driver.cuKernelSetAttribute(ctypes.c_int(MAX_DYNAMIC_SHARED), ctypes.c_int(self.shared), kernel, place),
            f"shared memory of {self.entry}",
        )
        return kernel

    def __call__(
        self, grid: tuple[int, int, int], arguments: ctypes.Structure, device: torch.device, overlap: bool = False
    ) -> None:
        """Launches on the current stream of ``device``, which must be the current device.

        overlap: it may start before the kernel before it has ended (programmatic dependent launch); its source then
        waits (griddepcontrol.wait) before it touches what that kernel reads or writes.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        if compiling.naming:
            if index not in self._functions and self not in _named:
                _named.add(self)
                compiling.later(functools.partial(self.binary, architecture(index)))
            return
        kernel = self.function(index)
        pointers: Any = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        if overlap:
            attribute = _Attribute(kind=OVERLAP, value=_Value(number=1))
            launch = _Launch(*grid, self.threads, 1, 1, self.shared, stream, ctypes.pointer(attribute), 1)
            code = _driver().cuLaunchKernelEx(ctypes.byref(launch), kernel, pointers, None)
        else:
            code = _driver().cuLaunchKernel(kernel, *grid, self.threads, 1, 1, self.shared, stream, pointers, None)
        if code:
            _check(code, f"launch {self.entry}")
