"""KDA decode and verification by clusters of blocks that share a head's value rows (cuda/kda_step.cu).

For bfloat16 activations and fp32 states of 128 channels on compute capability 9.0 and newer; everything else runs the
Triton forms of kda_step. Same results up to the order of sums.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from k3_nvidia.kernels import cuda_host

DIM = 128
MOST_ROWS = 65535
#: Tokens a row for which shared memory is laid out.
MOST_TOKENS = 16


class Arguments(ctypes.Structure):
    """`Args` of the source: addresses, strides in elements, the bound as a natural log, heads."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "z", "beta", "gate", "weight", "a_log", "dt_bias", "norm")),
        *((name, ctypes.c_void_p) for name in ("conv", "state", "slot", "out", "accepted", "bounds")),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("qkv", "z", "beta", "gate", "out")),
        *(
            (f"{name}_stride", ctypes.c_longlong)
            for name in ("conv", "channel", "column", "state", "slot", "slot_column")
        ),
        ("bound", ctypes.c_float),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("heads", "rows", "tokens")),
    ]


class StepKernel(cuda_host.CudaKernel):
    """One variant; a launch may overlap the end of the kernel before it. tokens: most a row, 0 for decode."""

    def __init__(self, split: int, warps: int, bulk: bool, overlap: bool, tokens: int, **definitions: int) -> None:
        rows, most = DIM // split, max(tokens, 1)
        if rows % (4 * warps) or (bulk and tokens):
            raise ValueError(f"KDA step: {warps} warps cannot share {rows} rows of a block (bulk copies: {bulk})")
        self.overlap = overlap
        # As counted at the top of the source.
        shared = -(-(most * (2048 + 512 + 16 + 128) + 64) // 128) * 128 + (rows * DIM * 4 if bulk else 0)
        definitions |= {"SPLIT": split, "WARPS": warps, "BULK": int(bulk), "PDL": int(overlap), "TOKENS": most}
        definitions["VERIFY"] = int(tokens > 0)
        super().__init__("kda_step", "kda_step_cuda", 32 * warps, shared, **definitions)

    def __call__(
        self, grid: tuple[int, int, int], arguments: ctypes.Structure, device: torch.device, overlap: bool = False
    ) -> None:
        """As CudaKernel's, with overlap if the variant was made for it."""
        super().__call__(grid, arguments, device, overlap or self.overlap)


@functools.cache
def kernel(
    split: int, warps: int, bulk: bool, overlap: bool, blocks: int, tokens: int, bounded: bool, wide: bool, bf16: bool
) -> StepKernel:
    """A variant: blocks of a cluster, warps of a block, the state by bulk copies; int64 slots; bf16 norm weight."""
    kinds = {"BLOCKS": blocks, "BOUNDED": int(bounded), "WIDE_SLOTS": int(wide), "NORM_BF16": int(bf16)}
    return StepKernel(split, warps, bulk, overlap, tokens, **kinds)


def refusal(qkv: Tensor, z: Tensor, gate: Tensor, out: Tensor, weight: Tensor, norm: Tensor, pool: Tensor) -> str:
    """Why this kernel cannot take a call (arguments as the operators check them), or ""."""
    if qkv.device.type != "cuda" or torch.cuda.get_device_capability(qkv.device) < (9, 0):
        return "clusters need compute capability 9.0"
    if cuda_host.refusal():
        return cuda_host.refusal()
    if z.shape[2] != DIM:
        return f"head dimension {z.shape[2]} is not {DIM}"
    if any(x.dtype != torch.bfloat16 for x in (qkv, z, gate, out)):
        return "activations are not bfloat16"
    if pool.dtype != torch.float32 or pool.data_ptr() % 16 or pool.stride(0) % 4:
        return "states are not fp32 slots that start on 16 bytes"
    if any(x.data_ptr() % 4 or x.stride(0) % 2 for x in (qkv, z)):
        return "rows of qkv or z do not start on 4 bytes"
    if len(z) > MOST_ROWS:
        return f"{len(z)} rows are more than a grid has"
    if weight.data_ptr() % 16:
        return "the convolution's weights do not start on 16 bytes"
    return "" if norm.dtype in (torch.float32, torch.bfloat16) else f"the norm's weight is {norm.dtype}"


def step(
    options: dict[str, Any], qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, weight: Tensor, a_log: Tensor,
    dt_bias: Tensor, norm: Tensor, conv: Tensor, pool: Tensor, slots: Tensor, out: Tensor, lower_bound: float | None,
    eps: float, strides: list[int], accepted: Tensor | None = None, bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches. strides: rows of qkv, z, beta, gate and out. options: SPLIT, num_warps, BULK, PDL, BLOCKS.

    slots [rows], or [rows, columns] with accepted [rows] and bounds [rows + 1] for verification.
    """
    heads, rows = z.shape[1], slots.shape[0]
    tensors = (qkv, z, beta, gate, weight, a_log, dt_bias, norm, conv, pool, slots, out)
    arguments = Arguments(
        *(x.data_ptr() for x in tensors), *(None if x is None else x.data_ptr() for x in (accepted, bounds)),
        *strides, *conv.stride(), pool.stride(0), slots.stride(0), slots.stride(-1),
        float(lower_bound or 0.0), eps, heads, rows, z.shape[0],
    )  # fmt: skip
    tokens = 0 if bounds is None else 1 << (slots.shape[1] - 1).bit_length()
    made = kernel(
        options["SPLIT"], options["num_warps"], options["BULK"], options["PDL"], options["BLOCKS"], tokens,
        lower_bound is not None, slots.dtype == torch.int64, norm.dtype == torch.bfloat16,
    )  # fmt: skip
    made((options["SPLIT"], heads, rows), arguments, qkv.device)
