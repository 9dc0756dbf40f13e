"""KDA prefill, the passes of kda_segment with wgmma and bulk copies (cuda/kda_passes.cu, cuda/kda_scan*.cu) (Hopper).

They read what cuda/kda_chunk.cu writes with TILED: the bytes of their shared memory. Transitions go to the scan in the
format of its form: fragments of products (through registers), or bytes of shared memory (bulk copies).
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from k3_nvidia.kernels import cuda_host

DIM = 128


class Tensors(NamedTuple):
    """What the passes read and write, in the order of `PassArgs` of the source.

    w, u, qg, kg, a bf16 in tiles and gamma fp32, an entry a chunk and head; chunk, segment, order: the plan's tables;
    start fp32 [segments, N, V, K], hi and lo bf16 of that size; out bf16 [T, N, D]; state [slots, N, V, K] fp32 or
    bf16; slot int32 and init bool [sequences].
    """

    w: Tensor
    u: Tensor
    qg: Tensor
    kg: Tensor
    a: Tensor
    gamma: Tensor
    chunk: Tensor
    segment: Tensor
    order: Tensor
    start: Tensor
    hi: Tensor
    lo: Tensor
    out: Tensor
    state: Tensor
    slot: Tensor
    init: Tensor


class Arguments(ctypes.Structure):
    """`PassArgs` of the source: addresses, strides in elements, heads."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in Tensors._fields),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("out", "state", "slot")),
        ("heads", ctypes.c_int),
    ]


def shared_bytes(output: bool, stages: int) -> int:
    """Shared memory of a block: stages, their barriers, and what aligning to 1024 bytes may take."""
    return stages * (58368 if output else 33792) + 16 * stages + 1024


class ScanForm(NamedTuple):
    """How the scan runs. rows of the state a block, 0: 16 with transitions through registers (kda_scan.cu); stages:
    transitions in shared memory at a time; terms: 3 products a step, or 2 (transitions rounded to bfloat16: half of the
    bytes, an error of up to 2^-9 a step, for measurements)."""

    rows: int = 0
    stages: int = 3
    terms: int = 3


REGISTERS = ScanForm()


@functools.cache
def kernel(output: bool, groups: int, stages: int, wide: bool, tiles: bool = False) -> cuda_host.CudaKernel:
    """The output or the local pass for blocks of ``groups`` x 64 rows; wide: the state is fp32, else bfloat16; tiles:
    the local pass writes transitions for kda_scan_bulk, else for kda_scan."""
    return cuda_host.CudaKernel(
        "kda_passes", "kda_pass_cuda", 128 * groups, shared_bytes(output, stages), OUTPUT=int(output), GROUPS=groups,
        STAGES=stages, STATE_BF16=int(not wide), **({} if output else {"TILES": int(tiles)}),
    )  # fmt: skip


def refusal(out: Tensor, state: Tensor, slot: Tensor) -> str:
    """Why the passes cannot take a call that kda_chunk_cuda takes, or ""."""
    if torch.cuda.get_device_capability(out.device)[0] != 9:
        return "wgmma is Hopper's"
    if out.dtype != torch.bfloat16 or out.data_ptr() % 4 or out.stride(0) % 2:
        return "out is not bfloat16 rows on 4 bytes"
    if state.data_ptr() % 8 or state.stride(0) % 2:
        return "states do not start on 8 bytes"
    if slot.dtype != torch.int32:
        return f"slot_mapping is {slot.dtype}"
    return ""


def arguments(tensors: Tensors, heads: int) -> Arguments:
    """The kernel's parameters for these tensors, which must outlive the launch."""
    strides = (x.stride(0) for x in (tensors.out, tensors.state, tensors.slot))
    return Arguments(*(x.data_ptr() for x in tensors), *strides, heads)


def local(
    tensors: Tensors, heads: int, groups: int, stages: int, form: ScanForm = REGISTERS, overlap: bool = False
) -> None:
    """B and P of every segment that has a successor: fills start (initial states and B), hi and lo.

    form: of the scan that follows. overlap: the launch may begin before the chunk kernel has ended.
    """
    launch = kernel(False, groups, stages, tensors.state.dtype == torch.float32, form.rows > 0)
    launch((4 // groups, heads, tensors.order.numel()), arguments(tensors, heads), tensors.out.device, overlap)


def output(tensors: Tensors, heads: int, groups: int, stages: int, overlap: bool = False) -> None:
    """Outputs of every segment from its start, and the states of sequences that end in it.

    overlap: the launch may begin before the one before it, which must be `local` or `scan`, has ended: it asks for what
    the chunk kernel wrote at once.
    """
    launch = kernel(True, groups, stages, tensors.state.dtype == torch.float32)
    launch((2 // groups, heads, tensors.segment.shape[0]), arguments(tensors, heads), tensors.out.device, overlap)


class ScanArguments(ctypes.Structure):
    """`ScanArgs` of the source."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("start", "hi", "lo", "scan")), ("heads", ctypes.c_int)]


def scan_bytes(form: ScanForm) -> int:
    """Shared memory of a block: stages of transitions, two buffers of states, barriers, what aligning may take; or
    two buffers of states as fragments."""
    if not form.rows:
        return 16384
    return form.stages * (form.terms - 1) * 32768 + 2 * form.rows * 512 + 8 * form.stages + 1024


@functools.cache
def scan_kernel(form: ScanForm = REGISTERS) -> cuda_host.CudaKernel:
    """The scan in one of its forms. Raises ValueError for one that there is not."""
    if (
        form.rows not in (0, 16, 32)
        or form.terms not in (2, 3)
        or form.stages < 1
        or (not form.rows and form.terms != 3)
    ):
        raise ValueError(f"KDA scan: there is no form {form}")
    if not form.rows:
        return cuda_host.CudaKernel("kda_scan", "kda_scan_cuda", 256, scan_bytes(form))
    definitions = {"ROWS": form.rows, "STAGES": form.stages, "TERMS": form.terms}
    return cuda_host.CudaKernel("kda_scan_bulk", "kda_scan_bulk_cuda", 256, scan_bytes(form), **definitions)


def scan(tensors: Tensors, scans: Tensor, heads: int, form: ScanForm = REGISTERS, overlap: bool = False) -> None:
    """Turns B into starts, in place, for sequences of more than two segments; form as `local` was told."""
    addresses = (x.data_ptr() for x in (tensors.start, tensors.hi, tensors.lo, scans))
    grid = (DIM // (form.rows or 16), heads, scans.shape[0])
    scan_kernel(form)(grid, ScanArguments(*addresses, heads), tensors.out.device, overlap)
