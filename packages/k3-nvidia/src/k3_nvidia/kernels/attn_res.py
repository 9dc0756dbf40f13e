"""AttnRes on NVIDIA GPUs in Triton: add the pending delta, write the bank, mix, normalise, in one pass over the rows.

Formula and conventions: `k3_core.contracts.attn_res`, operator ``attn_res`` of `k3_core.operators`. Bytes moved per
token: (n + 4) rows of H bfloat16 (prefix read and written, delta, n bank blocks, output), one more for a bank write.

How it gets near that bound (docs/notes/attn-res-hopper.md has the figures):

- A row of H elements is KC tensors of CHUNK elements (7 x 1024 for H = 7168), so no lane is idle although 7168 is no
  power of two; the folded weight ``norm_weight * proj_weight`` stays in registers over all tokens of a program.
- Rows are taken in groups of GROUP: the two sums of every row of a group go through one cross-warp reduction, and
  the running softmax (online, as in flash attention) is rescaled once a group.
- Programs are persistent, and the first rows of the next token are loaded before the last reduction of this one.
- Launched programmatically dependent: while the kernel before ends, weights are read and folded and the L2 is asked for
  the first token's rows, and the product that follows may ask for its own weights meanwhile.
- Few tokens: :mod:`k3_nvidia.kernels.attn_res_cluster`; many: :mod:`k3_nvidia.kernels.attn_res_ring`. The tuning table
  says from where to where.

All arithmetic is fp32; the prefix is rounded to bfloat16 before it is used as a source; the norm is applied to the fp32
mix and rounded once.
"""

# Tuples grow inside the kernels, which Triton types by itself.
# mypy: disable-error-code="assignment, misc, attr-defined, no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators.triton_host import Launcher
from k3_nvidia.kernels import attn_res_cluster
from k3_nvidia.kernels.attn_res_ring import attn_res_ring_kernel
from k3_nvidia.kernels.attn_res_rows import ask_for_rows, row_sums, store_row, sum2
from k3_nvidia.kernels.glue import launch_options, pdl
from k3_nvidia.tuning import attn_res as tuning
from k3_nvidia.tuning.attn_res import Config

MAX_ROWS_A_GROUP = 5


@triton.jit
def _sum4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _sum6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def _sum8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _sum10(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8, a9 + b9


@triton.jit
def _load_row(ptr, H: tl.constexpr, CHUNK: tl.constexpr, KC: tl.constexpr, alive):
    """One row as KC tensors of CHUNK elements; lanes past H read zero; nothing is read where alive is false."""
    cols = tl.arange(0, CHUNK)
    row = ()
    for c in tl.static_range(KC):
        if (c + 1) * CHUNK <= H:
            row = row + (tl.load(ptr + c * CHUNK + cols, mask=alive, other=0.0),)
        else:
            row = row + (tl.load(ptr + c * CHUNK + cols, mask=alive & (c * CHUNK + cols < H), other=0.0),)
    return row


@triton.jit
def _reduce(values, COUNT: tl.constexpr):
    """Sum COUNT tensors over their lanes with one exchange between the warps."""
    if COUNT == 2:
        return tl.reduce(values, 0, sum2)
    elif COUNT == 4:
        return tl.reduce(values, 0, _sum4)
    elif COUNT == 6:
        return tl.reduce(values, 0, _sum6)
    elif COUNT == 8:
        return tl.reduce(values, 0, _sum8)
    else:
        return tl.reduce(values, 0, _sum10)


@triton.jit
def _load_group(
    token, alive, prefix_ptr, delta_ptr, bank_ptr, prefix_stride, delta_stride, bank_stride, block_stride,
    FIRST: tl.constexpr, LAST: tl.constexpr, HAS_DELTA: tl.constexpr,
    H: tl.constexpr, CHUNK: tl.constexpr, KC: tl.constexpr,
):  # fmt: skip
    """Source rows FIRST..LAST-1 of a token, as loaded: row 0 is the prefix, row j bank block j-1; the delta last."""
    rows = ()
    for j in tl.static_range(FIRST, LAST):
        if j == 0:
            prefix = _load_row(prefix_ptr + token * prefix_stride, H, CHUNK, KC, alive)
            rows = rows + (prefix,)
        else:
            rows = rows + (_load_row(bank_ptr + token * bank_stride + (j - 1) * block_stride, H, CHUNK, KC, alive),)
    if HAS_DELTA and FIRST == 0:
        rows = rows + (_load_row(delta_ptr + token * delta_stride, H, CHUNK, KC, alive),)
    return rows


@triton.jit
def _add_delta(rows, COUNT: tl.constexpr, KC: tl.constexpr):
    """The COUNT source rows of the first group: its last entry, the delta, added to row 0 and rounded."""
    summed = ()
    for c in tl.static_range(KC):
        summed = summed + ((rows[0][c].to(tl.float32) + rows[COUNT][c].to(tl.float32)).to(rows[0][c].dtype),)
    result = (summed,)
    for j in tl.static_range(1, COUNT):
        result = result + (rows[j],)
    return result


@triton.jit
def _fold(
    rows, folded, mixed, top, total, COUNT: tl.constexpr, IS_FIRST: tl.constexpr, WEIGHTED: tl.constexpr,
    H: tl.constexpr, eps, KC: tl.constexpr,
):  # fmt: skip
    """Take COUNT more rows into the running softmax: (mixed, top logit, sum of weights) after them."""
    renewed = ()
    if WEIGHTED:
        partial = ()
        for j in tl.static_range(COUNT):
            partial = partial + row_sums(rows[j], folded, KC)
        sums = _reduce(partial, 2 * COUNT)
        logits = ()
        newest = top
        for j in tl.static_range(COUNT):
            logit = sums[2 * j + 1] * tl.rsqrt(sums[2 * j] / H + eps)
            logits = logits + (logit,)
            newest = tl.maximum(newest, logit)
        kept = tl.exp(top - newest)
        total = total * kept
        weights = ()
        for j in tl.static_range(COUNT):
            weight = tl.exp(logits[j] - newest)
            weights = weights + (weight,)
            total += weight
        for c in tl.static_range(KC):
            value = weights[0] * rows[0][c].to(tl.float32)
            for j in tl.static_range(1, COUNT):
                value += weights[j] * rows[j][c].to(tl.float32)
            if not IS_FIRST:
                value += kept * mixed[c]
            renewed = renewed + (value,)
        top = newest
    else:
        total = total + 1.0
        for c in tl.static_range(KC):
            renewed = renewed + (rows[0][c].to(tl.float32),)
    return renewed, top, total


@triton.jit(do_not_specialize=["num_tokens", "write_block"])
def _attn_res_kernel(
    out_ptr, prefix_ptr, delta_ptr, bank_ptr, norm_ptr, proj_ptr, out_norm_ptr,
    prefix_stride, delta_stride, bank_stride, block_stride, num_tokens, eps, out_eps,
    write_block,
    NUM_BLOCKS: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_WRITE: tl.constexpr, HAS_NORM: tl.constexpr,
    H: tl.constexpr, CHUNK: tl.constexpr, KC: tl.constexpr, GROUP: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    ROWS: tl.constexpr = NUM_BLOCKS + 1
    GROUPS: tl.constexpr = (ROWS + GROUP - 1) // GROUP
    step = tl.num_programs(0).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    always = token >= 0
    if PDL:
        ask_for_rows(
            token, prefix_ptr, delta_ptr, bank_ptr, prefix_stride, delta_stride, bank_stride, block_stride, NUM_BLOCKS,
            HAS_DELTA, H,
        )  # fmt: skip
    norm_weight = _load_row(norm_ptr, H, CHUNK, KC, always)
    proj_weight = _load_row(proj_ptr, H, CHUNK, KC, always)
    folded = ()
    for c in tl.static_range(KC):
        folded = folded + (norm_weight[c].to(tl.float32) * proj_weight[c].to(tl.float32),)
    if HAS_NORM:
        out_weight = _load_row(out_norm_ptr, H, CHUNK, KC, always)
    FIRST_END: tl.constexpr = GROUP if GROUP < ROWS else ROWS
    if PDL:
        gdc_wait()
    if PREFETCH:
        ahead = _load_group(
            token, token < num_tokens, prefix_ptr, delta_ptr, bank_ptr, prefix_stride, delta_stride, bank_stride,
            block_stride, 0, FIRST_END, HAS_DELTA, H, CHUNK, KC,
        )  # fmt: skip
    while token < num_tokens:
        if PREFETCH:
            rows = ahead
        else:
            rows = _load_group(
                token, always, prefix_ptr, delta_ptr, bank_ptr, prefix_stride, delta_stride, bank_stride,
                block_stride, 0, FIRST_END, HAS_DELTA, H, CHUNK, KC,
            )  # fmt: skip
        if HAS_DELTA:
            rows = _add_delta(rows, FIRST_END, KC)
            store_row(prefix_ptr + token * prefix_stride, rows[0], H, CHUNK, KC)
        if HAS_WRITE:
            store_row(bank_ptr + token * bank_stride + write_block * block_stride, rows[0], H, CHUNK, KC)
        following = token + step
        top = -float("inf")
        total = 0.0
        mixed = ()
        for g in tl.static_range(GROUPS):
            if g + 1 < GROUPS:
                coming = _load_group(
                    token, always, prefix_ptr, delta_ptr, bank_ptr, prefix_stride, delta_stride, bank_stride,
                    block_stride, (g + 1) * GROUP, min((g + 2) * GROUP, ROWS), HAS_DELTA, H, CHUNK, KC,
                )  # fmt: skip
            elif PREFETCH:
                ahead = _load_group(
                    following, following < num_tokens, prefix_ptr, delta_ptr, bank_ptr, prefix_stride, delta_stride,
                    bank_stride, block_stride, 0, FIRST_END, HAS_DELTA, H, CHUNK, KC,
                )  # fmt: skip
            mixed, top, total = _fold(
                rows, folded, mixed, top, total, min((g + 1) * GROUP, ROWS) - g * GROUP, g == 0, NUM_BLOCKS > 0, H, eps,
                KC,
            )  # fmt: skip
            if g + 1 < GROUPS:
                rows = coming
        scale = 1.0 / total
        if HAS_NORM:
            squares = mixed[0] * mixed[0]
            for c in tl.static_range(1, KC):
                squares += mixed[c] * mixed[c]
            # the mean of (mixed * scale)^2, with the scale taken out of the sum
            scale = scale * tl.rsqrt(tl.sum(squares, 0) * scale * scale / H + out_eps)
        result = ()
        for c in tl.static_range(KC):
            value = mixed[c] * scale
            if HAS_NORM:
                value = value * out_weight[c].to(tl.float32)
            result = result + (value.to(out_ptr.dtype.element_ty),)
        store_row(out_ptr + token * H, result, H, CHUNK, KC)
        token = following


_registers, _ring = Launcher(_attn_res_kernel), Launcher(attn_res_ring_kernel)


def supports(
    prefix: torch.Tensor, delta: torch.Tensor | None, bank: torch.Tensor, num_blocks: int, write_block: int | None
) -> tuple[bool, str]:
    """Whether the kernel can take these tensors, and why not: a float dtype, unit stride along H, H % 8 == 0."""
    if prefix.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False, f"attn_res: dtype {prefix.dtype} is not bfloat16, float16 or float32"
    if prefix.dim() != 2 or bank.dim() != 3 or bank.shape[0] != prefix.shape[0] or bank.shape[2] != prefix.shape[1]:
        return (
            False,
            f"attn_res: prefix {tuple(prefix.shape)} and bank {tuple(bank.shape)} are not [T, H] and [T, M, H]",
        )
    if prefix.shape[1] % 8:
        return False, f"attn_res: hidden size {prefix.shape[1]} is not a multiple of 8"
    for name, tensor in (("prefix", prefix), ("delta", delta), ("bank", bank)):
        if tensor is None:
            continue
        if tensor.dtype != prefix.dtype:
            return False, f"attn_res: {name} is {tensor.dtype}, prefix is {prefix.dtype}"
        if tensor.stride(-1) != 1:
            return False, f"attn_res: {name} has stride {tensor.stride(-1)} along the hidden size, must be 1"
    if delta is not None and delta.shape != prefix.shape:
        return False, f"attn_res: delta {tuple(delta.shape)} does not match prefix {tuple(prefix.shape)}"
    if not 0 <= num_blocks <= bank.shape[1]:
        return False, f"attn_res: num_blocks {num_blocks} does not fit a bank of {bank.shape[1]} slots"
    if write_block is not None and not num_blocks <= write_block < bank.shape[1]:
        return False, f"attn_res: write_block {write_block} must lie in {num_blocks}..{bank.shape[1] - 1}"
    return True, "attn_res: supported"


def _clusters(num_blocks: int, prefix: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the cluster kernel can take these operands here."""
    if prefix.device.type != "cuda" or not attn_res_cluster.available()[0]:
        return False
    return attn_res_cluster.takes([prefix, *others], num_blocks)[0]


def attn_res(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    eps: float,
    num_blocks: int,
    *,
    write_block: int | None = None,
    output_norm_weight: torch.Tensor | None = None,
    output_norm_eps: float | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """One lazy AttnRes step (operator ``attn_res``): changes prefix and bank in place, returns the (normed) mix.

    prefix [T, H] bfloat16, float16 or float32, any row stride, becomes round(prefix + delta). delta [T, H] or None.
    bank [T, M, H], any strides of the first two axes; slots 0..num_blocks-1 are read, slot write_block is written.
    norm_weight, proj_weight, output_norm_weight [H] (or [1, H]), contiguous. out [T, H] contiguous or None. config
    overrides the tuned choice (benchmarks). Raises ValueError where ``supports`` says no.
    """
    ok, reason = supports(prefix, delta, bank, num_blocks, write_block)
    if not ok:
        raise ValueError(reason)
    if (output_norm_weight is None) != (output_norm_eps is None):
        raise ValueError("attn_res: output_norm_weight and output_norm_eps go together")
    tokens, hidden = prefix.shape
    if out is None:
        out = torch.empty((tokens, hidden), dtype=prefix.dtype, device=prefix.device)
    elif out.shape != prefix.shape or not out.is_contiguous() or out.dtype != prefix.dtype:
        raise ValueError(f"attn_res: out must be a contiguous {prefix.dtype} tensor of shape {tuple(prefix.shape)}")
    for name, weight in (
        ("norm_weight", norm_weight),
        ("proj_weight", proj_weight),
        ("output_norm", output_norm_weight),
    ):
        if weight is not None and (weight.numel() != hidden or not weight.is_contiguous()):
            raise ValueError(f"attn_res: {name} must be contiguous with {hidden} elements")
    if tokens == 0:
        return out
    weights = (norm_weight, proj_weight, output_norm_weight)
    clusters = config is None and _clusters(num_blocks, prefix, delta, bank, out, *weights)
    chosen = config or tuning.choose(tokens, num_blocks, hidden, clusters)
    if chosen.cluster:
        attn_res_cluster.launch(
            out, prefix, delta, bank, weights, eps, output_norm_eps or 0.0, num_blocks, write_block, chosen.cluster,
            chosen.programs,
        )  # fmt: skip
        return out
    chunk = min(chosen.chunk, triton.next_power_of_2(hidden))
    grid = tokens if chosen.programs == 0 else min(tokens, chosen.programs * tuning.multiprocessors(prefix.device))
    arguments = (
        out, prefix, delta if delta is not None else prefix, bank, norm_weight, proj_weight,
        output_norm_weight if output_norm_weight is not None else norm_weight,
        prefix.stride(0), delta.stride(0) if delta is not None else 0, bank.stride(0), bank.stride(1), tokens, eps,
        output_norm_eps if output_norm_eps is not None else 0.0, write_block if write_block is not None else 0,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "NUM_BLOCKS": num_blocks, "HAS_DELTA": delta is not None, "HAS_WRITE": write_block is not None,
        "HAS_NORM": output_norm_weight is not None, "H": hidden, "CHUNK": chunk, "KC": triton.cdiv(hidden, chunk),
    }  # fmt: skip
    options = {"num_warps": chosen.warps, "maxnreg": chosen.maxnreg, **launch_options(pdl(prefix))}
    if chosen.ring:
        _ring((grid,), *arguments, **constants, STAGES=chosen.ring, **options)
        return out
    constants |= {
        "GROUP": min(chosen.group, num_blocks + 1, MAX_ROWS_A_GROUP), "PREFETCH": chosen.prefetch and grid < tokens,
    }  # fmt: skip
    _registers((grid,), *arguments, **constants, **options)
    return out
