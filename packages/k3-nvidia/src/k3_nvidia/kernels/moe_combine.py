"""Weighted sum of the chosen experts' outputs: out[t] = sum_k w[t, k] d[t top_k + k], fp32, slot order, one rounding.

A gather in a fixed order rather than atomics in the down product: the same batch gives the same bits. Rows of experts
that are elsewhere (or id < 0) are neither read nor counted, whatever they hold. Bytes: (pairs + tokens) x L x 2.
"""

# mypy: allow-untyped-defs
# mypy: disable-error-code="assignment"
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators.triton_host import interpreting
from k3_nvidia.kernels.moe_worklist import local_ids


@triton.jit
def combine_kernel(
    d_ptr, weights_ptr, ids_ptr, map_ptr, out_ptr, latent, num_local, top_k, stride_d, stride_out,
    TK: tl.constexpr, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, EVERY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (column block, token). EVERY: TK is top_k, all slots count, the ids are not read."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < latent
    if PDL:
        gdc_launch_dependents()  # first: behind a norm the up projection asks for its weights meanwhile
        gdc_wait()
    acc = tl.zeros((BLOCK,), tl.float32)
    if EVERY:
        # Where rows are found without ids, they and the weights arrive in the time of one load instead of two. All are
        # asked for before the first is used: in the order of the sum ptxas waits for the first four, then for others.
        pairs = token * TK
        weights_at = weights_ptr + pairs
        d_at = d_ptr + pairs * stride_d + column
        rows = ()
        for k in tl.static_range(TK):
            rows = rows + (tl.load(d_at + k * stride_d, mask=inside, other=0.0),)
        shares = ()
        for k in tl.static_range(TK):
            shares = shares + (tl.load(weights_at + k),)
        for k in tl.static_range(TK):
            acc += shares[k] * rows[k].to(tl.float32)
    elif HAS_MAP:
        # A rank of many holds few of a token's experts: only those slots are visited.
        slot = tl.arange(0, TK)
        used = slot < top_k
        ids = tl.load(ids_ptr + token * top_k + slot, mask=used, other=-1)
        _, here = local_ids(ids, map_ptr, num_local, HAS_MAP, used)
        left = tl.where(here, slot, TK)
        k = tl.min(left, 0)
        while k < TK:
            weight = tl.load(weights_ptr + token * top_k + k)
            acc += weight * tl.load(d_ptr + (token * top_k + k) * stride_d + column, mask=inside, other=0.0).to(
                tl.float32
            )
            left = tl.where(left == k, TK, left)
            k = tl.min(left, 0)
    else:
        for k in tl.static_range(TK):
            used = k < top_k
            ids = tl.load(ids_ptr + token * top_k + k, mask=used, other=-1)
            _, here = local_ids(ids, map_ptr, num_local, HAS_MAP, used)
            weight = tl.load(weights_ptr + token * top_k + k, mask=here, other=0.0)
            d = tl.load(d_ptr + (token * top_k + k) * stride_d + column, mask=inside & here, other=0.0)
            acc += weight * d.to(tl.float32)
    tl.store(out_ptr + token * stride_out + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


def combine(
    d: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_local: int,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    block: int = 1024,
    pdl: bool = False,
    every: bool = False,
) -> torch.Tensor:
    """d [T top_k, L] in pair order -> ``out`` [T, L] (any row stride); ids and map as in ``experts``.

    every: the caller knows that each id names an expert of this rank, so that all rows of d were written; only without
    a map (ValueError).
    """
    if every and expert_map is not None:
        raise ValueError("combine: every slot counts only where no map says which experts are here")
    tokens, top_k = topk_ids.shape
    if tokens == 0:
        return out
    latent = out.shape[1]
    pdl = pdl and not interpreting()
    options = {"launch_pdl": True} if pdl else {}
    combine_kernel[(triton.cdiv(latent, block), tokens)](
        d, topk_weights, topk_ids, topk_ids if expert_map is None else expert_map, out, latent, num_local, top_k,
        d.stride(0), out.stride(0), TK=top_k if every else triton.next_power_of_2(top_k), BLOCK=block,
        HAS_MAP=expert_map is not None, EVERY=every, PDL=pdl, num_warps=max(1, min(4, block // 128)), **options,
    )  # fmt: skip
    return out
