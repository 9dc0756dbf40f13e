"""KDA prefill, the passes of kda_segment with wgmma and bulk copies, for Hopper (cuda/kda_passes.cu, kda_scan_bulk.cu).

They read what cuda/kda_chunk.cu writes with TILED: the bytes of their shared memory. Transitions go to the scan as the
bytes of its shared memory too.
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


@functools.cache
def kernel(output: bool, groups: int, stages: int, wide: bool) -> cuda_host.CudaKernel:
    """The output or the local pass for blocks of ``groups`` x 64 rows; wide: the state is fp32, else bfloat16."""
    return cuda_host.CudaKernel(
        "kda_passes", "kda_pass_cuda", 128 * groups, shared_bytes(output, stages), OUTPUT=int(output), GROUPS=groups,
        STAGES=stages, STATE_BF16=int(not wide),
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


def local(tensors: Tensors, heads: int, groups: int, stages: int, overlap: bool = False) -> None:
    """B and P of every segment that has a successor: fills start (initial states and B), hi and lo.

    overlap: the launch may begin before the chunk kernel has ended.
    """
    launch = kernel(False, groups, stages, tensors.state.dtype == torch.float32)
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


def scan_bytes(rows: int, stages: int) -> int:
    """Shared memory of a block: stages of transitions, two buffers of states, barriers, what aligning may take."""
    return stages * 65536 + 2 * rows * 512 + 8 * stages + 1024


@functools.cache
def scan_kernel(rows: int, stages: int) -> cuda_host.CudaKernel:
    """The scan for blocks of ``rows`` rows of the state, ``stages`` transitions in shared memory at a time.

    Raises ValueError for rows that it is not written for and for no stage.
    """
    if rows not in (16, 32) or stages < 1:
        raise ValueError(f"KDA scan: rows must be 16 or 32 and stages at least 1, got {rows} and {stages}")
    return cuda_host.CudaKernel(
        "kda_scan_bulk", "kda_scan_bulk_cuda", 256, scan_bytes(rows, stages), ROWS=rows, STAGES=stages
    )


def scan(tensors: Tensors, scans: Tensor, heads: int, rows: int, stages: int, overlap: bool = False) -> None:
    """Turns B into starts, in place, for sequences of more than two segments.

    overlap: the launch may begin before the local pass has ended.
    """
    addresses = (x.data_ptr() for x in (tensors.start, tensors.hi, tensors.lo, scans))
    grid = (DIM // rows, heads, scans.shape[0])
    scan_kernel(rows, stages)(grid, ScanArguments(*addresses, heads), tensors.out.device, overlap)
