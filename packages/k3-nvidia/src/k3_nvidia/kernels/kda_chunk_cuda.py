"""KDA prefill, `prepare` and `chunk` of kda_chunk as one kernel with explicit layouts (cuda/kda_chunk.cu).

For the bounded gate at D = 128 on bfloat16 rows that 16-byte loads can read; everything else runs the Triton kernels.
Same outputs in the same formats (or in those of kda_passes_cuda), no workspace between two launches.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from k3_nvidia.kernels import cuda_host

DIM = 128
THREADS = 128
#: Shared memory of a block, as counted at the top of the source.
SHARED_BYTES = 66816


class Arguments(ctypes.Structure):
    """`Args` of the source: addresses, strides in elements, the bound as a natural log, heads."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "z", "beta", "a_log", "dt_bias", "chunk")),
        *((name, ctypes.c_void_p) for name in ("w", "ut", "qg", "kg", "a", "gamma")),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("q", "k", "v", "z", "beta")),
        ("bound", ctypes.c_float),
        ("heads", ctypes.c_int),
    ]


@functools.cache
def kernel(blocks: int, tiled: bool = False) -> cuda_host.CudaKernel:
    """The kernel compiled for ``blocks`` blocks a multiprocessor; tiled: it writes what kda_passes_cuda reads."""
    return cuda_host.CudaKernel("kda_chunk", "kda_chunk_cuda", THREADS, SHARED_BYTES, BLOCKS=blocks, TILED=int(tiled))


def refusal(q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, split: bool) -> str:
    """Why this kernel cannot take a call, or "". split: the bounded gate fits the one-product form (fits_split)."""
    if q.device.type != "cuda":
        return f"the device is {q.device.type}"
    if not split:
        return "the gate is unbounded or its bound is below -5"
    if q.shape[2] != DIM:
        return f"head dimension {q.shape[2]} is not {DIM}"
    for name, x in (("q", q), ("k", k), ("v", v), ("z", z)):
        if x.dtype != torch.bfloat16:
            return f"{name} is {x.dtype}"
        if x.data_ptr() % 16 or x.stride(0) % 8:
            return f"rows of {name} do not start on 16 bytes"
    if beta.dtype != torch.float32:
        return f"beta is {beta.dtype}"
    return cuda_host.refusal()


def arguments(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, bound: float,
    chunks: Tensor, w: Tensor, ut: Tensor, qg: Tensor, kg: Tensor, a: Tensor, gamma: Tensor,
) -> Arguments:  # fmt: skip
    """The kernel's parameters for these tensors, which must outlive the launch."""
    tensors = (q, k, v, z, beta, a_log, dt_bias, chunks, w, ut, qg, kg, a, gamma)
    strides = (x.stride(0) for x in (q, k, v, z, beta))
    return Arguments(*(x.data_ptr() for x in tensors), *strides, bound, q.shape[1])


def chunk(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, bound: float,
    chunks: Tensor, w: Tensor, ut: Tensor, qg: Tensor, kg: Tensor, a: Tensor, gamma: Tensor, blocks: int,
    tiled: bool = False,
) -> None:  # fmt: skip
    """Fills w, ut, qg, kg, a, gamma for the chunks of a plan: in the formats of kda_chunk, or (tiled) of the passes."""
    packed = arguments(q, k, v, z, beta, a_log, dt_bias, bound, chunks, w, ut, qg, kg, a, gamma)
    kernel(blocks, tiled)((q.shape[1], chunks.shape[0], 1), packed, q.device)
