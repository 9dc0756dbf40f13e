"""MXFP4 to bfloat16, for generations whose matrix unit has no fp4 (A2, A3).

The bits of the result are made by integer arithmetic: nothing is rounded and flush-to-zero cannot touch a subnormal.
Two neighbours are one 32-bit word, so that packed bytes, scales and results are all read and written contiguously.
Contract: `k3_core.contracts.mxfp4.unpack`.
"""

# mypy: allow-untyped-defs, disable-error-code="attr-defined"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_ascend.kernels.launch import has_executor, launch, programs_for
from k3_core.errors import CheckpointError
from k3_core.operators import CallSpec

#: Groups of 32 values a tile.
GROUPS = 128


@triton.jit
def _bits(code, scale):
    """bfloat16 bits of e2m1 code (0..15) under e8m0 scale byte (0..255), both int32."""
    magnitude = code & 7
    half = (magnitude & 1) * 64  # the mantissa bit of magnitudes from 2 on; magnitude 1 is 0.5, a power of two
    half = tl.where(magnitude == 1, 0, half)
    exponent = scale + (magnitude >> 1) - 1
    normal = exponent * 128 + half
    small = tl.where(exponent == 0, 64 + (half >> 1), 32)  # 2^-127 times the significand, or 2^-128
    bits = tl.where(exponent >= 1, normal, small)
    bits = tl.where(exponent >= 255, 0x7F80, bits)
    bits = tl.where(magnitude == 0, 0, bits)
    bits = tl.where(scale == 255, 0x7FC0, bits)
    return bits + (code >> 3) * 32768


@triton.jit(do_not_specialize=["groups"])
def unpack_kernel(packed_ptr, scale_ptr, out_ptr, groups, GROUPS: tl.constexpr):
    """Items: tiles of GROUPS groups; out_ptr int32 [groups * 16], the low half the even column."""
    tiles = tl.cdiv(groups, GROUPS)
    g = tl.arange(0, GROUPS)
    b = tl.arange(0, 16)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first = tile.to(tl.int64) * GROUPS
        inside = g < groups - tile * GROUPS
        at = g[:, None] * 16 + b[None, :]
        byte = tl.load(packed_ptr + first * 16 + at, mask=inside[:, None], other=0).to(tl.int32)
        scale = tl.load(scale_ptr + first + g, mask=inside, other=0).to(tl.int32)
        scale = tl.broadcast_to(scale[:, None], (GROUPS, 16))
        low = _bits(byte & 15, scale)
        high = _bits((byte >> 4) & 15, scale)
        tl.store(out_ptr + first * 16 + at, low | (high << 16), mask=inside[:, None])


def supports(spec: CallSpec) -> tuple[bool, str]:
    """uint8 operands on an NPU; only bfloat16 is made."""
    if spec.device not in ("npu", "cuda") and not (spec.device == "cpu" and has_executor()):
        return False, f"unpack_mxfp4: Triton kernels run on npu tensors, not on {spec.device}"
    if spec.dtype is not torch.bfloat16:
        return False, f"unpack_mxfp4: makes bfloat16, not {spec.dtype}; use k3_core.contracts.mxfp4.unpack"
    return True, "unpack_mxfp4: any shape, exact"


def unpack_mxfp4(packed: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    """packed uint8 [..., K/2], scale uint8 [..., K/32], both contiguous -> bfloat16 [..., K], contiguous.

    Raises CheckpointError for operands that do not belong together.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise CheckpointError(f"MXFP4 operands must be uint8, got {packed.dtype} and {scale.dtype}")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] != 16 * scale.shape[-1]:
        raise CheckpointError(
            f"MXFP4 packed {tuple(packed.shape)} and scale {tuple(scale.shape)} don't belong together"
        )
    if not packed.is_contiguous() or not scale.is_contiguous():
        raise CheckpointError("MXFP4 operands must be contiguous; call .contiguous() first")
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=packed.device)
    elif tuple(out.shape) != shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise CheckpointError(f"MXFP4 result must be contiguous bfloat16 {shape}, got {out.dtype} {tuple(out.shape)}")
    groups = scale.numel()
    if groups:
        words = out.view(-1).view(torch.int32)
        programs = programs_for(triton.cdiv(groups, GROUPS), packed.device)
        launch(unpack_kernel, programs, packed, scale, words, groups, GROUPS=GROUPS)
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """One variant: sizes are no constants."""
    return [{"operator": "unpack_mxfp4"}]
