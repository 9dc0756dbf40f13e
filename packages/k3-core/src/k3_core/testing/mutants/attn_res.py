"""Faults of attn_res."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.contracts.norm import rms_norm
from k3_core.testing.mutants.base import Arguments, Run, dense_view, plant, put, unwritten


def _sources(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """(sources [T, n+1, H], folded weight, logits) of attn_res in fp32, after the contract has updated the prefix."""
    s = torch.cat([a["bank"][:, : a["num_blocks"]], a["prefix"].unsqueeze(1)], dim=1).float()
    w = a["norm_weight"].float() * a["proj_weight"].float()
    return s, w, torch.rsqrt(s.square().mean(-1) + a["eps"]) * (s @ w)


def _mixed(a: Arguments, mixed: Tensor) -> Tensor:
    """Finish attn_res from a mix in fp32."""
    if a["output_norm_weight"] is not None:
        mixed = rms_norm(mixed, a["output_norm_weight"].float(), a["output_norm_eps"])
    return put(mixed, a["out"], a["prefix"].dtype)


@plant("attn_res", "the last bank block is not a source", "n1.delta.strided.T17.H64")
def _source_missing(a: Arguments, run: Run) -> Tensor:
    return run(num_blocks=max(a["num_blocks"] - 1, 0))


@plant("attn_res", "the prefix is not a source", "n1.delta.strided.T17.H64")
def _prefix_not_a_source(a: Arguments, run: Run) -> Tensor:
    run()
    s, _, logits = _sources(a)
    logits[:, -1] -= 1e30 if a["num_blocks"] else 0.0
    return _mixed(a, torch.einsum("tj,tjh->th", logits.softmax(-1), s))


@plant("attn_res", "sources are normalised before the sum (norm before reduction)", "n1.delta.strided.T17.H64")
def _normalised_sources(a: Arguments, run: Run) -> Tensor:
    run()
    s, _, logits = _sources(a)
    values = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + a["eps"])
    return _mixed(a, torch.einsum("tj,tjh->th", logits.softmax(-1), values if a["num_blocks"] else s))


@plant("attn_res", "logits without the rms of the source", "n1.delta.strided.T17.H64")
def _logits_not_normalised(a: Arguments, run: Run) -> Tensor:
    run()
    s, w, _ = _sources(a)
    return _mixed(a, torch.einsum("tj,tjh->th", (s @ w).softmax(-1), s))


@plant("attn_res", "the bank write spills into the neighbouring block", "n0.delta.norm.write0.T17.H64")
def _neighbour_overwritten(a: Arguments, run: Run) -> Tensor:
    result = run()
    block, slots = a["write_block"], a["bank"].shape[1]
    if block is not None:
        a["bank"][:, block - 1 if block else min(1, slots - 1), -8:] = a["prefix"][:, -8:]
    return result


@plant("attn_res", "the prefix is not updated in place", "n1.delta.strided.T17.H64")
def _prefix_not_updated(a: Arguments, run: Run) -> Tensor:
    return run(prefix=a["prefix"].clone())


@plant("attn_res", "the mix uses the sum before it is rounded", "n1.delta.strided.T17.H64")
def _rounded_late(a: Arguments, run: Run) -> Tensor:
    wide = a["prefix"].float() + (0.0 if a["delta"] is None else a["delta"].float())
    run()
    s, w, _ = _sources(a)
    s[:, -1] = wide
    logits = torch.rsqrt(s.square().mean(-1) + a["eps"]) * (s @ w)
    return _mixed(a, torch.einsum("tj,tjh->th", logits.softmax(-1), s))


@plant("attn_res", "the block receives the prefix without delta", "n0.delta.norm.write0.T17.H64")
def _bank_written_before_add(a: Arguments, run: Run) -> Tensor:
    old = a["prefix"].clone()
    result = run()
    if a["write_block"] is not None:
        a["bank"][:, a["write_block"]] = old
    return result


@plant("attn_res", "one unwritten block takes part with weight zero", "n1.delta.strided.T17.H64")
def _reads_unwritten_block(a: Arguments, run: Run) -> Tensor:
    n = a["num_blocks"]
    result: Tensor = run()
    return result.add_(0.0 * a["bank"][:, n]) if n < a["bank"].shape[1] else result


@plant("attn_res", "the row stride of the prefix is taken to be H", "n1.delta.strided.T17.H64")
def _prefix_stride_ignored(a: Arguments, run: Run) -> Tensor:
    return run(prefix=dense_view(a["prefix"]))


@plant("attn_res", "the strides of the bank are taken to be dense", "n1.delta.strided.T17.H64")
def _bank_stride_ignored(a: Arguments, run: Run) -> Tensor:
    return run(bank=dense_view(a["bank"]))


@plant("attn_res", "the last row is never written", "n1.delta.strided.T17.H64")
def _row_unwritten(a: Arguments, run: Run) -> Tensor:
    return unwritten(run(), slice(-1, None))


@plant("attn_res", "a NaN in one row reaches all rows", "n3.delta.norm.neighbour_nan.T17.H64")
def _rows_leak(a: Arguments, run: Run) -> Tensor:
    result = run()
    return result.add_(0.0 * a["prefix"].sum())


@plant("attn_res", "the last bit depends on the run (a race)", "n1.delta.strided.T17.H64")
def _not_repeatable(a: Arguments, run: Run, calls: list[int] = [0]) -> Tensor:  # noqa: B006
    result = run()
    calls[0] += 1
    if result.numel():
        result[0, 0] *= 1.0 + (calls[0] % 2) * 2.0**-8
    return result


@plant("attn_res", "without out the result is a padded view", "n1.delta.strided.T17.H64")
def _result_not_contiguous(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    return result if a["out"] is not None else torch.nn.functional.pad(result, (0, 8))[:, :-8]
