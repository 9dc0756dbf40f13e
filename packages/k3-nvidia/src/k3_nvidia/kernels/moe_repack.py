"""Re-arranging MXFP4 codes into the kernel layout on the device: one pass, one read and one write a byte
(``moe_layout``)."""

# mypy: allow-untyped-defs
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _place_byte(byte, position: tl.constexpr):
    """Word bits of a source byte (two codes) at a position; see ``moe_layout``."""
    code = (byte & 15) | ((byte >> 4) << 16)  # one code in each half word
    sign = (code >> 3) & 0x00010001
    low = code & 0x00070007
    if position < 3:
        return (sign << (15 - 3 * position)) | (low << (6 - 3 * position))
    return (sign << 14) | ((low & 0x00060006) << 9) | ((low & 0x00010001) << 13)


@triton.jit
def repack_kernel(
    low_ptr, high_ptr, low_scale_ptr, high_scale_ptr, words_ptr, scales_ptr, MT, KB,
    stride_e, stride_mt, stride_g, stride_se, stride_smt, stride_sg,
    KC: tl.constexpr,
):  # fmt: skip
    """Program (kb chunk, row block, expert): KC blocks of 16 rows x 64 columns."""
    mt = tl.program_id(1).to(tl.int64)
    e = tl.program_id(2).to(tl.int64)
    kb = tl.program_id(0) * KC + tl.arange(0, KC)[:, None]
    inside = kb < KB
    w = tl.arange(0, 128)[None, :]
    r, u, t, g = w % 2, (w // 2) % 2, (w // 4) % 4, w // 16
    source = e * stride_e + mt * stride_mt + g * stride_g + kb * 32 + 4 * u + t
    word = tl.zeros((KC, 128), tl.int32)
    for p in tl.static_range(4):
        low = tl.load(low_ptr + source + 8 * p, mask=inside & (r == 0), other=0).to(tl.int32)
        high = tl.load(high_ptr + source + 8 * p, mask=inside & (r == 1), other=0).to(tl.int32)
        word |= _place_byte(low | high, p)
    block = e * MT * KB + ((mt // 4) * KB + kb) * 4 + mt % 4
    tl.store(words_ptr + block * 128 + w, word, mask=inside)
    g8 = tl.arange(0, 8)[None, :]
    scale_source = e * stride_se + mt * stride_smt + g8 * stride_sg + kb * 2
    scale = tl.zeros((KC, 8), tl.int32)
    for c in tl.static_range(2):
        a = tl.load(low_scale_ptr + scale_source + c, mask=inside, other=0).to(tl.int32)
        b = tl.load(high_scale_ptr + scale_source + c, mask=inside, other=0).to(tl.int32)
        scale |= (a << (8 * c)) | (b << (8 * c + 16))
    tl.store(scales_ptr + block * 8 + g8, scale, mask=inside)


def repack(
    words_out: torch.Tensor,
    scales_out: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    low_scale: torch.Tensor,
    high_scale: torch.Tensor,
) -> None:
    """``moe_layout.swizzle_rows`` into given storage.

    ``words_out`` int16 [(E,) MT/4, KB, 4, 256], ``scales_out`` int16 [(E,) MT/4, KB, 4, 16], contiguous; sources uint8
    [(E,) MT, 8, KB*32] and [(E,) MT, 8, KB*2] of any strides with a contiguous last axis.
    """
    if words_out.dim() == 4:
        words_out, scales_out, low, high, low_scale, high_scale = (
            t.unsqueeze(0) for t in (words_out, scales_out, low, high, low_scale, high_scale)
        )
    experts, mt4, kb, _, _ = words_out.shape
    mt = 4 * mt4
    if not (words_out.is_contiguous() and scales_out.is_contiguous()):
        raise ValueError("repack: the destination must be contiguous")
    if low.stride() != high.stride() or low_scale.stride() != high_scale.stride() or low.stride(-1) != 1:
        raise ValueError("repack: row pairs must have equal strides and a contiguous last axis")
    if tuple(low.shape) != (experts, mt, 8, kb * 32) or tuple(low_scale.shape) != (experts, mt, 8, kb * 2):
        raise ValueError(f"repack: sources {tuple(low.shape)}, {tuple(low_scale.shape)} for blocks {(experts, mt, kb)}")
    chunk = 4
    grid = (triton.cdiv(kb, chunk), mt, experts)
    repack_kernel[grid](
        low, high, low_scale, high_scale, words_out.view(torch.int32), scales_out.view(torch.int32), mt, kb,
        low.stride(0), low.stride(1), low.stride(2), low_scale.stride(0), low_scale.stride(1), low_scale.stride(2),
        KC=chunk, num_warps=4,
    )  # fmt: skip


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """The repack kernel has one variant; it runs while weights load, never while serving."""
    return [{"KC": 4}]
