"""AttnRes: add the pending delta, write the bank, mix, normalise, in one pass over a token's rows.

Formula and conventions: `k3_core.contracts.attn_res`, operator ``attn_res`` of the table.

Programs are persistent over tokens. The folded weight ``norm_weight * proj_weight`` and the running mix stay in the
unified buffer in fp32, one source row at a time streams through it, every source is read once, and the softmax is kept
online (as in flash attention). A row is one block of the next power of two: cut into exact pieces (3 x 2048 + 1024 for
7168) no lane is idle, but each piece brings buffers of its own, and the compiler then fills the unified buffer to 98 %
where one block takes 83 %.
The prefix is rounded before it is used as a source; the norm is applied to the fp32 mix and rounded once.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_ascend.kernels import checks, warmup
from k3_ascend.kernels.launch import launch, programs_for
from k3_core.operators import CallSpec

#: Widest row whose fp32 mix and weights fit 85 % of the unified buffer beside the streams (table in ci/ascend_kernels).
MAX_HIDDEN = 8192


@triton.jit(do_not_specialize=["tokens", "num_blocks", "write_block"])
def attn_res_kernel(
    out_ptr, prefix_ptr, delta_ptr, bank_ptr, folded_ptr, out_norm_ptr,
    tokens, num_blocks, write_block, prefix_stride, delta_stride, bank_stride, block_stride, eps, out_eps,
    H: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_WRITE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Items: tokens."""
    c = tl.arange(0, BLOCK)
    inside = c < H
    folded = tl.load(folded_ptr + c, mask=inside, other=0.0)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        t = token.to(tl.int64)
        row_at = bank_ptr + t * bank_stride
        x = tl.load(prefix_ptr + t * prefix_stride + c, mask=inside, other=0.0)
        if HAS_DELTA:
            delta = tl.load(delta_ptr + t * delta_stride + c, mask=inside, other=0.0)
            x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
            tl.store(prefix_ptr + t * prefix_stride + c, x, mask=inside)
        if HAS_WRITE:
            tl.store(row_at + write_block * block_stride + c, x, mask=inside)
        mixed = x.to(tl.float32)
        top = tl.sum(mixed * folded, axis=0) / tl.sqrt(tl.sum(mixed * mixed, axis=0) / H + eps)
        total = 1.0
        for n in range(num_blocks):
            y = tl.load(row_at + n.to(tl.int64) * block_stride + c, mask=inside, other=0.0).to(tl.float32)
            logit = tl.sum(y * folded, axis=0) / tl.sqrt(tl.sum(y * y, axis=0) / H + eps)
            newest = tl.maximum(top, logit)
            kept = tl.exp(top - newest)
            weight = tl.exp(logit - newest)
            total = total * kept + weight
            mixed = mixed * kept + y * weight
            top = newest
        scale = 1.0 / total
        if HAS_NORM:
            # the mean of (mixed * scale)^2, with the scale taken out of the sum
            scale = scale / tl.sqrt(tl.sum(mixed * mixed, axis=0) * scale * scale / H + out_eps)
            mixed = mixed * tl.load(out_norm_ptr + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + t * H + c, (mixed * scale).to(out_ptr.dtype.element_ty), mask=inside)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """Hidden sizes up to MAX_HIDDEN in multiples of 8."""
    hidden = spec.sizes.get("H", 7168)
    if hidden > MAX_HIDDEN or hidden % 8:
        return False, f"attn_res: hidden size {hidden} is not a multiple of 8 up to {MAX_HIDDEN}"
    return checks.supports(spec, checks.FLOATS)


def fold(norm_weight: Tensor, proj_weight: Tensor) -> Tensor:
    """norm_weight * proj_weight in fp32, [H]: what the kernel reads; a model prepares it once."""
    return norm_weight.reshape(-1).float() * proj_weight.reshape(-1).float()


def attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    bank: Tensor,
    norm_weight: Tensor,
    proj_weight: Tensor,
    eps: float,
    num_blocks: int,
    *,
    write_block: int | None = None,
    output_norm_weight: Tensor | None = None,
    output_norm_eps: float | None = None,
    out: Tensor | None = None,
    folded: Tensor | None = None,
) -> Tensor:
    """Operator ``attn_res`` of the table: changes prefix and bank in place, returns the (normed) mix [T, H].

    Weights may be [H] or [1, H]. folded: `fold` of the two weights, made here if absent. Raises ValueError for shapes,
    UnsupportedError for dtypes and strides.
    """
    _check(prefix, delta, bank, num_blocks, write_block)
    if (output_norm_weight is None) != (output_norm_eps is None):
        raise ValueError("attn_res: output_norm_weight and output_norm_eps go together")
    tokens, hidden = prefix.shape
    for name, w in (("norm_weight", norm_weight), ("proj_weight", proj_weight), ("output_norm", output_norm_weight)):
        if w is not None and (w.numel() != hidden or not w.is_contiguous()):
            raise ValueError(f"attn_res: {name} must be contiguous with {hidden} elements, got {tuple(w.shape)}")
    if folded is None:
        folded = fold(norm_weight, proj_weight)
    checks.check_vector("attn_res", "folded", folded, (hidden,), torch.float32)
    out = checks.result("attn_res", out, (tokens, hidden), prefix, dense=True)
    if tokens == 0:
        return out
    launch(
        attn_res_kernel, programs_for(tokens, prefix.device),
        out, prefix, prefix if delta is None else delta, bank, folded,
        folded if output_norm_weight is None else output_norm_weight,
        tokens, num_blocks, write_block or 0, checks.row_stride(prefix),
        0 if delta is None else checks.row_stride(delta), bank.stride(0), bank.stride(1),
        float(eps), float(output_norm_eps or 0.0), H=hidden, BLOCK=triton.next_power_of_2(hidden),
        HAS_DELTA=delta is not None, HAS_WRITE=write_block is not None,
        HAS_NORM=output_norm_weight is not None,
    )  # fmt: skip
    return out


def _check(prefix: Tensor, delta: Tensor | None, bank: Tensor, num_blocks: int, write_block: int | None) -> None:
    op = "attn_res"
    if prefix.dim() != 2 or prefix.shape[1] > MAX_HIDDEN or prefix.shape[1] % 8:
        raise ValueError(f"{op}: prefix must be [T, H] with H a multiple of 8 up to {MAX_HIDDEN}, got {prefix.shape}")
    checks.check_rows(op, "prefix", prefix, tuple(prefix.shape), checks.FLOATS)
    if delta is not None:
        checks.check_rows(op, "delta", delta, tuple(prefix.shape), (prefix.dtype,))
    if bank.dim() != 3 or (bank.shape[0], bank.shape[2]) != tuple(prefix.shape) or bank.dtype != prefix.dtype:
        raise ValueError(
            f"{op}: bank must be [T, M, H] of prefix {tuple(prefix.shape)} {prefix.dtype}, got {bank.shape}"
        )
    if bank.stride(2) != 1:
        raise ValueError(f"{op}: bank has strides {bank.stride()}, must be 1 along the hidden size")
    if not 0 <= num_blocks <= bank.shape[1]:
        raise ValueError(f"{op}: num_blocks {num_blocks} does not fit a bank of {bank.shape[1]} slots")
    if write_block is not None and not num_blocks <= write_block < bank.shape[1]:
        raise ValueError(f"{op}: write_block {write_block} must lie in {num_blocks}..{bank.shape[1] - 1}")


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """As a decoder calls it: with and without delta, bank write and norm. Token and block counts are no variant."""
    text = warmup.text_of(config)
    if text.attn_res_block_size is None:
        return []
    return [
        {"operator": "attn_res", "hidden": text.hidden_size, "delta": delta, "write": write, "norm": norm}
        for delta in (True, False)
        for write in (True, False)
        for norm in (True, False)
    ]
