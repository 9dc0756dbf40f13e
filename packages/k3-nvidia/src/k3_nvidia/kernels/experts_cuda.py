"""The routed experts' two products for many tokens as CUDA C++ (cuda/experts.cu), Hopper only.

Beside the Triton kernels of ``experts_gemm``: the same formulas, work list, layouts of weights and results, fp32 sums
and one rounding to bfloat16. What they add is that one warpgroup brings operands while others decode and multiply, and
items of up to 176 tokens in one pass. A plan of the tuning table asks for them (``Plan.cuda13``, ``Plan.cuda2``).
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from k3_nvidia.kernels import cuda_host
from k3_nvidia.kernels.moe_layout import SwizzledExperts
from k3_nvidia.kernels.moe_worklist import Worklist
from k3_nvidia.tuning.experts import CudaTile, Plan

TILE = 2176  # bytes of codes and scales: 64 rows x 64 columns
#: Compiled widths of products below the widest; a compiled width costs two seconds of compilation and 10 KB of code.
WIDTHS = (48, 128, 144, 160)
FEW_WIDTHS = (16, 32, 48)  # of those where no item holds more than 64 tokens
SHARED = 227 * 1024
EMULATED_BLOCKS = 3


class Arguments(ctypes.Structure):
    """`ExpertArgs` of the source: addresses, strides (elements; bytes an expert), activation, sizes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "codes", "scales", "out", "sorted", "work", "number")),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("tokens", "codes", "scales", "out")),
        *((name, ctypes.c_float) for name in ("beta", "linear_beta", "per_beta", "per_linear_beta")),
        *((name, ctypes.c_int) for name in ("top_k", "tiles", "columns", "parts", "per", "grid")),
    ]


def registers(tile: CudaTile) -> tuple[int, int]:
    """Registers a thread of the warpgroup that brings operands and of those that multiply, dealt from what a block is
    started with (units of 8)."""
    groups = tile.groups + 1
    pool = min(65536 // (128 * groups * tile.blocks), 255) // 8 * 8 * groups
    consumer = min((pool - 24) // tile.groups // 8 * 8, 240)
    return min(pool - consumer * tile.groups, 240), consumer


def shared_bytes(tile: CudaTile, slots: int) -> int:
    """Shared memory of a block; slots: column blocks of resident tokens, 0 where they are streamed."""
    tiles = tile.tiles * (1 if slots else tile.groups)
    tokens = (slots or tile.stages) * tile.widest * 128
    return tokens + tile.stages * (tiles * TILE + 16) + 16 * max(slots, 1) + 8 + 1024


def widths(widest: int) -> int:
    """Bit i: products of 16 (i + 1) columns are compiled."""
    some = FEW_WIDTHS if widest <= 64 else WIDTHS
    return sum(1 << (n // 16 - 1) for n in {*some, widest} if n <= widest)


def tile_refusal(tile: CudaTile, columns: int, down: bool) -> str:
    """Why the kernel cannot be built or run with these tiles for ``columns`` column blocks, or ""."""
    if tile.widest % 16 or not 16 <= tile.widest <= 192:
        return f"products of {tile.widest} columns are not compiled (16 to 192 in steps of 16)"
    if tile.tiles not in (1, 2):
        return f"a warpgroup has 1 or 2 tiles of 64 rows, not {tile.tiles}"
    if tile.tiles == 1 and columns % 2:
        return f"one tile a warpgroup takes column blocks in pairs, here are {columns}"
    if tile.parts and not down:
        return "only the down product keeps its tokens"
    if tile.stages < 4:
        return f"{tile.stages} stages; a warpgroup holds up to 3 of them"
    slots = columns if tile.parts else 0
    if tile.blocks * (shared_bytes(tile, slots) + 1024) > 228 * 1024 or shared_bytes(tile, slots) > SHARED:
        return f"{shared_bytes(tile, slots)} bytes of shared memory, {tile.blocks} times"
    return ""


def refusal(weights: SwizzledExperts, plan: Plan) -> str:
    """Why these kernels cannot run a call that the Triton kernels take, or "" (also where the plan does not ask)."""
    for tile, codes, down in ((plan.cuda13, weights.w13, False), (plan.cuda2, weights.w2, True)):
        why = tile_refusal(tile, codes.shape[2], down) if tile else ""
        if why:
            return why
    if not (plan.cuda13 or plan.cuda2):
        return ""
    if weights.wide_scales:
        return "some scale byte is above 128: its weights take two products each"
    return device_refusal(weights.w13.device)


def device_refusal(device: torch.device) -> str:
    """Why no kernel of this module runs on a device, or ""."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "wgmma with a left operand in registers is Hopper's"
    return cuda_host.refusal()


@functools.cache
def kernel(down: bool, columns: int, tile: CudaTile, act: int) -> cuda_host.CudaKernel:
    """The kernel of one product. columns: column blocks where its tokens stay in shared memory, else anything."""
    slots = columns if tile.parts else 0
    producer, consumer = registers(tile)
    return cuda_host.CudaKernel(
        "experts", "experts_cuda", 128 * (tile.groups + 1), shared_bytes(tile, slots),
        DOWN=int(down), RESIDENT=int(bool(slots)), SLOTS=max(slots, 1), GROUPS=tile.groups, TILES=tile.tiles,
        WIDEST=tile.widest, WIDTHS=widths(tile.widest), STAGES=tile.stages, BLOCKS=tile.blocks, ACT=act,
        PRODUCER_REGISTERS=producer, CONSUMER_REGISTERS=consumer,
    )  # fmt: skip


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else EMULATED_BLOCKS


def _launch(
    tokens: Tensor, codes: Tensor, scales: Tensor, out: Tensor, lst: tuple[Tensor, Tensor, Tensor, int],
    act: tuple[int, float, float], top_k: int, tile: CudaTile, down: bool,
) -> None:  # fmt: skip
    if lst[3] > tile.widest:
        raise ValueError(f"experts: items of {lst[3]} tokens, the kernel holds {tile.widest}")
    if tokens.dtype != torch.bfloat16:
        raise ValueError(f"experts: token rows are {tokens.dtype}, the kernel multiplies bfloat16")
    if tokens.shape[0] * tokens.stride(0) >= 1 << 35 or tokens.stride(0) % 8 or tokens.data_ptr() % 16:
        raise ValueError("experts: token rows must start on 16 bytes, below 64 GiB")
    tiles, columns = codes.shape[1], codes.shape[2]
    if tile.parts:
        passes = -(-tiles // tile.tiles)
        per = -(-passes // tile.parts)
        parts = -(-passes // per)
    else:
        per, parts = 1, -(-tiles // (tile.tiles * tile.groups))
    grid = _multiprocessors(tokens.device) * tile.blocks
    strides = tokens.stride(0), codes.stride(0) * 2, scales.stride(0) * 2, out.stride(0)
    _, beta, linear_beta = act
    addresses = (t.data_ptr() for t in (tokens, codes, scales, out, *lst[:3]))
    arguments = Arguments(
        *addresses, *strides, beta, linear_beta, 1 / (beta or 1.0), 1 / (linear_beta or 1.0), top_k, tiles, columns,
        parts, per, grid,
    )  # fmt: skip
    launch = kernel(down, columns if tile.parts else 0, tile, 0 if down else act[0])
    launch((grid, 1, 1), arguments, tokens.device)


def run_w13(
    x: Tensor, weights: SwizzledExperts, lst: Worklist, top_k: int, act: tuple[int, float, float], tile: CudaTile
) -> Tensor:
    """Gate/up product and activation: [pairs, padded width] bf16 in sorted order (rows past the last pair
    unwritten)."""
    y = torch.empty(lst.sorted.numel(), weights.padded_width, dtype=torch.bfloat16, device=x.device)
    items = (lst.sorted, lst.work, lst.number, lst.block_n)
    _launch(x, weights.w13, weights.s13, y, items, act, top_k, tile, False)
    return y


def run_w2(y: Tensor, weights: SwizzledExperts, lst: Worklist, tile: CudaTile) -> Tensor:
    """Down product: [pairs, L] bf16 in pair order (rows of experts that are elsewhere unwritten)."""
    d = torch.empty(lst.sorted.numel(), weights.latent, dtype=torch.bfloat16, device=y.device)
    items = (lst.sorted, lst.work2, lst.number2, lst.block_n2)
    _launch(y, weights.w2, weights.s2, d, items, (0, 1.0, 1.0), 1, tile, True)
    return d
