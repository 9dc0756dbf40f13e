"""Routed experts for a handful of tokens: matrix times vector, one program a (token, expert) pair or a token.

    y[pair] = act(x[token] W1_e^T, x[token] W3_e^T)      ``w13_vector_kernel``     rounded once to bf16
    out[token] = sum_k w[token, k] y[pair] W2_e^T         ``w2_vector_kernel``      fp32 to the end, rounded once

At a few tokens nearly every pair has an expert of its own, so there is nothing for a tensor-core tile to reuse and the
products of ``experts_gemm`` are bound by the latency of their loops (24 us for 11 MB at one token of a TP16 rank). Here
a program asks for all its weights at once (28 KB of gate and up rows, 24 KB of down rows) and multiplies them on the
ordinary units: bytes in flight, not operand shapes, decide. The down product visits the experts of a token itself, so
the weighted sum needs no launch and no rounding of its own, and no work list is read.

Weights lie as ``moe_layout`` puts them for the tensor cores; a lane's 16 bytes are 32 weights of two rows.
"""

# mypy: allow-untyped-defs
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators.triton_host import interpreting
from k3_nvidia.kernels.experts_gemm import block_index, decode_parts, gated_act
from k3_nvidia.kernels.moe_layout import SwizzledExperts
from k3_nvidia.kernels.moe_worklist import local_ids


@triton.jit
def _columns(KT: tl.constexpr):
    """[1, KT, 1, 4 t, 2 u, 1, 2 h]: the input column of position 0 of a lane's half words, from the first block on."""
    kb = tl.reshape(tl.arange(0, KT), (1, KT, 1, 1, 1, 1, 1)) * 64
    t = tl.reshape(tl.arange(0, 4), (1, 1, 1, 4, 1, 1, 1)) * 2
    u = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 2, 1, 1)) * 8
    h = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 1, 2))
    return kb + t + u + h


@triton.jit
def _dot(parts, x_ptrs, mask, WHOLE: tl.constexpr):
    """Sum over the four positions of weight times input, fp32, shaped as the half words.

    WHOLE: every lane loads what it multiplies; otherwise the inputs are loaded once and handed to the lanes.
    """
    if WHOLE:
        x_ptrs = tl.broadcast_to(x_ptrs, parts[0].shape)
        mask = tl.broadcast_to(mask, parts[0].shape)
    acc = parts[0].to(tl.float32) * tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    acc += parts[1].to(tl.float32) * tl.load(x_ptrs + 16, mask=mask, other=0.0).to(tl.float32)
    acc += parts[2].to(tl.float32) * tl.load(x_ptrs + 32, mask=mask, other=0.0).to(tl.float32)
    acc += parts[3].to(tl.float32) * tl.load(x_ptrs + 48, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _sum_columns(acc):
    """[MT, KT, g, t, u, r, h] -> [MT, g, r]: within a thread first, then lanes, then warps."""
    return tl.sum(tl.sum(tl.sum(tl.sum(acc, axis=6), axis=4), axis=3), axis=1)


@triton.jit
def w13_vector_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, ids_ptr, map_ptr, num_local, beta, linear_beta,
    stride_x, stride_we, stride_se, stride_y, top_k, KB,
    MT: tl.constexpr, KT: tl.constexpr, STEPS: tl.constexpr, HAS_MAP: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (row tile, pair): y[pair, 8 MT channels]. STEPS tiles of KT column blocks, all asked for at once.

    Pairs whose expert is elsewhere (or id < 0) are left unwritten; ``w2_vector_kernel`` does not read them.
    """
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chosen = tl.load(ids_ptr + pair)
    local, here = local_ids(chosen, map_ptr, num_local, HAS_MAP, True)
    if here:
        e = local.to(tl.int64)
        m = tile * MT + tl.arange(0, MT)[:, None, None]
        lane = tl.arange(0, 256)[None, None, :]
        octet = tl.arange(0, 8)[None, None, :]
        codes, scales = (), ()
        for step in tl.static_range(STEPS):
            kb = (step * KT + tl.arange(0, KT))[None, :, None]
            block = block_index(m, kb, KB)
            codes = codes + (tl.load(w_ptr + e * stride_we + block * 256 + lane, mask=kb < KB, other=0),)
            scales = scales + (tl.load(s_ptr + e * stride_se + block * 8 + octet, mask=kb < KB, other=0),)
        columns = _columns(KT)
        x_row = x_ptr + (pair // top_k).to(tl.int64) * stride_x
        acc = tl.zeros((MT, KT, 8, 4, 2, 2, 2), tl.float32)
        for step in tl.static_range(STEPS):
            parts = decode_parts(codes[step], scales[step], MT, KT, WIDE, INTERPRET)
            at = step * KT * 64 + columns
            acc += _dot(parts, x_row + at, at < KB * 64, WHOLE)
        gate, up = tl.split(tl.reshape(_sum_columns(acc), (MT * 8, 2)))
        y = gated_act(gate, up, beta, linear_beta, ACT)
        channel = tile * MT * 8 + tl.arange(0, MT * 8)
        tl.store(y_ptr + pair.to(tl.int64) * stride_y + channel, y.to(y_ptr.dtype.element_ty))


@triton.jit
def w2_vector_kernel(
    y_ptr, w_ptr, s_ptr, out_ptr, weights_ptr, ids_ptr, map_ptr, num_local,
    stride_y, stride_we, stride_se, stride_out, top_k, KB, L,
    JT: tl.constexpr, STEPS: tl.constexpr, HAS_MAP: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (row block, token): out[token, 16 rows].

    The column blocks of all chosen experts are one run of top_k * KB blocks, cut into STEPS tiles of JT, all asked for
    at once.
    """
    mt = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.arange(0, 256)[None, None, :]
    octet = tl.arange(0, 8)[None, None, :]
    codes, scales, places, factors = (), (), (), ()
    for step in tl.static_range(STEPS):
        j = step * JT + tl.arange(0, JT)
        slot, kb = j // KB, j % KB
        used = slot < top_k
        chosen = tl.load(ids_ptr + token * top_k + slot, mask=used, other=-1)
        local, here = local_ids(chosen, map_ptr, num_local, HAS_MAP, used)
        e = tl.where(here, local, 0).to(tl.int64)
        factor = tl.load(weights_ptr + token * top_k + slot, mask=here, other=0.0)
        block = block_index(mt, kb, KB)
        at = w_ptr + (e * stride_we + block * 256)[None, :, None] + lane
        s_at = s_ptr + (e * stride_se + block * 8)[None, :, None] + octet
        codes = codes + (tl.load(at, mask=here[None, :, None], other=0),)
        scales = scales + (tl.load(s_at, mask=here[None, :, None], other=0),)
        places = places + (tl.where(here, (token * top_k + slot) * stride_y + kb * 64, -1),)
        factors = factors + (factor,)
    within = _columns(1)
    acc = tl.zeros((1, JT, 8, 4, 2, 2, 2), tl.float32)
    for step in tl.static_range(STEPS):
        parts = decode_parts(codes[step], scales[step], 1, JT, WIDE, INTERPRET)
        place = tl.reshape(places[step], (1, JT, 1, 1, 1, 1, 1))
        # Rows of y of experts elsewhere were never written: they are not read.
        product = _dot(parts, y_ptr + place + within, place + within * 0 >= 0, WHOLE)
        acc += tl.reshape(factors[step], (1, JT, 1, 1, 1, 1, 1)) * product
    rows = tl.reshape(_sum_columns(acc), (8, 2))
    row = mt * 16 + tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :] * 8
    tl.store(out_ptr + token * stride_out + row, rows.to(out_ptr.dtype.element_ty), mask=row < L)


def _steps(blocks: int, tile: int) -> int:
    return triton.cdiv(blocks, tile)


def vector_experts(
    x: torch.Tensor,
    weights: SwizzledExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    act: tuple[int, float, float],
    out: torch.Tensor,
    *,
    pdl: bool = True,
    row_blocks: int = 1,
    column_blocks: int = 8,
    slots: int = 16,
    warps: tuple[int, int] = (4, 4),
    whole: tuple[bool, bool] = (True, True),
) -> torch.Tensor:
    """x bf16 [T, L] and ids int32 [T, top_k] -> this rank's weighted sum in ``out`` [T, L]; T is a handful.

    act: code and constants of ``situ.activation_code``. row_blocks, column_blocks: tile of the gate/up product in
    blocks of 16 and 64; slots: tile of the down product in column blocks. Same operands as ``experts``.
    """
    tokens, top_k = topk_ids.shape
    y = torch.empty(tokens * top_k, weights.padded_width, dtype=x.dtype, device=x.device)
    if interpreting():  # it truncates bfloat16 instead of rounding it
        y = y.float()
    pdl = pdl and not interpreting()
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    emap = topk_ids if expert_map is None else expert_map
    common: dict[str, Any] = {
        "HAS_MAP": expert_map is not None, "WIDE": weights.wide_scales, "PDL": pdl, "INTERPRET": interpreting(),
    }  # fmt: skip
    s13, s2 = weights.s13.view(torch.int32), weights.s2.view(torch.int32)
    mb, kb = weights.w13.shape[1] * 4, weights.w13.shape[2]
    w13_vector_kernel[(mb // row_blocks, tokens * top_k)](
        x, weights.w13, s13, y, topk_ids, emap, weights.num_experts, act[1], act[2],
        x.stride(0), weights.w13.stride(0), s13.stride(0), y.stride(0), top_k, kb,
        MT=row_blocks, KT=column_blocks, STEPS=_steps(kb, column_blocks), ACT=act[0], WHOLE=whole[0],
        num_warps=warps[0],
        **common, **options,
    )  # fmt: skip
    mb, kb = weights.w2.shape[1] * 4, weights.w2.shape[2]
    w2_vector_kernel[(mb, tokens)](
        y, weights.w2, s2, out, topk_weights, topk_ids, emap, weights.num_experts,
        y.stride(0), weights.w2.stride(0), s2.stride(0), out.stride(0), top_k, kb, weights.latent,
        JT=slots, STEPS=_steps(top_k * kb, slots), WHOLE=whole[1], num_warps=warps[1], **common, **options,
    )  # fmt: skip
    return out
