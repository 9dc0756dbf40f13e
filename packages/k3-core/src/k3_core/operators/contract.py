"""Every operator of the table by the contracts, in plain PyTorch on any device.

Two uses: a vendor's model runs on a CPU with these in place of its kernels (layers, metadata and state indexing are the
real ones), and the conformance suite runs itself against them. In-place semantics, null slots and padding are here;
the mathematics is in :mod:`k3_core.contracts`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_core.contracts import attn_res as _attn_res
from k3_core.contracts import kda, moe
from k3_core.contracts.situ import gated_activation, situ_and_mul
from k3_core.operators.registry import ExpertWeights, Implementation


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
) -> Tensor:
    """See the table. Raises ValueError where write_block is a source or outside the bank, or out is not contiguous."""
    if write_block is not None and not num_blocks <= write_block < bank.shape[1]:
        raise ValueError(
            f"write_block {write_block} must lie in num_blocks {num_blocks} .. bank slots {bank.shape[1]} - 1"
        )
    if out is not None and not out.is_contiguous():
        raise ValueError(f"attn_res: out must be contiguous, got strides {out.stride()}")
    mixed = _attn_res.attn_res(
        prefix, delta, bank, num_blocks, write_block, norm_weight, proj_weight, eps, output_norm_weight, output_norm_eps
    )
    return _deliver(mixed, out)


def short_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See the table."""
    history = weight.shape[-1] - 1
    live = _live(slot_mapping, cu_seqlens)
    rows, bounds, slots = _select(slot_mapping, cu_seqlens, live)
    result = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if len(slots):
        old = _initial(conv_state[slots][:, :, :history], has_initial_state[live])
        result[rows], new = kda.short_conv(x[rows], weight, old, bounds)
        conv_state[slots, :, :history] = new.to(conv_state.dtype)
    return _deliver(result, out)


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See the table."""
    live = _live(slot_mapping, cu_seqlens)
    rows, bounds, slots = _select(slot_mapping, cu_seqlens, live)
    result = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    if len(slots):
        old = _initial(recurrent_state[slots], has_initial_state[live])
        g = kda.gate(z[rows], a_log, dt_bias, lower_bound)
        result[rows], new = kda.chunked(q[rows], k[rows], v[rows], g, beta[rows], old, bounds)
        recurrent_state[slots] = new.to(recurrent_state.dtype)
    return _deliver(result, out)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """See the table."""
    return _deliver(kda.output_norm(o, gate, weight, eps), out)


def kda_decode(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    o_norm_weight: Tensor,
    o_norm_eps: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See the table."""
    history = conv_weight.shape[-1] - 1
    rows = (slot_mapping > 0).nonzero().flatten()
    slots = slot_mapping[rows].long()
    result = torch.zeros(z.shape, dtype=qkv.dtype, device=qkv.device)
    if len(slots):
        each = range(len(slots) + 1)
        y, columns = kda.short_conv(qkv[rows], conv_weight, conv_state[slots][:, :, :history], each)
        q, k, v = (part.unflatten(-1, z.shape[1:]) for part in y.chunk(3, dim=-1))
        g = kda.gate(z[rows], a_log, dt_bias, lower_bound)
        o, state = kda.decode(q, k, v, g, beta[rows], recurrent_state[slots])
        result[rows] = kda.output_norm(o, gate[rows], o_norm_weight, o_norm_eps)
        conv_state[slots, :, :history] = columns.to(conv_state.dtype)
        recurrent_state[slots] = state.to(recurrent_state.dtype)
    return _deliver(result, out)


def kda_verify(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    o_norm_weight: Tensor,
    o_norm_eps: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    num_accepted: Tensor,
    cu_seqlens: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See the table. Raises ValueError where a live row has more than Q tokens or an accepted count outside 1..Q."""
    live = _live(slot_mapping[:, 0], cu_seqlens)
    rows, bounds, conv_slots = _select(slot_mapping[:, 0], cu_seqlens, live)
    result = torch.zeros(z.shape, dtype=qkv.dtype, device=qkv.device)
    if len(conv_slots):
        accepted, slots = num_accepted[live], slot_mapping[live].long()
        y, columns = kda.short_conv_verify(qkv[rows], conv_weight, conv_state[conv_slots], accepted, bounds)
        q, k, v = (part.unflatten(-1, z.shape[1:]) for part in y.chunk(3, dim=-1))
        g = kda.gate(z[rows], a_log, dt_bias, lower_bound)
        before = recurrent_state[slots.clamp(min=0)]
        o, states = kda.verify(q, k, v, g, beta[rows], before, accepted, bounds)
        result[rows] = kda.output_norm(o, gate[rows], o_norm_weight, o_norm_eps)
        conv_state[conv_slots] = columns.to(conv_state.dtype)
        counts = (bounds[1:] - bounds[:-1]).unsqueeze(-1)
        written = (torch.arange(slots.shape[1], device=slots.device) < counts) & (slots > 0)
        recurrent_state[slots[written]] = states[written].to(recurrent_state.dtype)
    return _deliver(result, out)


def route(
    logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    *,
    renormalize: bool,
    routed_scaling_factor: float,
    num_expert_group: int,
    topk_group: int,
) -> tuple[Tensor, Tensor]:
    """See the table."""
    weights, ids = moe.route(
        logits,
        correction_bias,
        top_k,
        renormalize=renormalize,
        scaling=routed_scaling_factor,
        num_groups=num_expert_group,
        topk_groups=topk_group,
    )
    return weights.contiguous(), ids.to(torch.int32).contiguous()


def experts(
    x: Tensor,
    weights: ExpertWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    hidden_act: str,
    situ_beta: float | None,
    situ_linear_beta: float | None,
    expert_map: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See the table; `weights` is ExpertWeights unprepared."""
    held: moe.Experts
    if weights.w13_scale is None or weights.w2_scale is None:
        held = moe.DenseExperts(weights.w13, weights.w2)
    else:
        held = moe.PackedExperts(weights.w13, weights.w13_scale, weights.w2, weights.w2_scale)
    ids = topk_ids.long()
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map[ids.clamp(min=0)].long(), -1)
    activation = gated_activation(hidden_act, situ_beta, situ_linear_beta)
    return _deliver(moe.latent_experts(x, topk_weights, ids, held, activation), out)


def situ(x: Tensor, beta: float, linear_beta: float | None, *, out: Tensor | None = None) -> Tensor:
    """See the table."""
    gate, up = x.chunk(2, dim=-1)
    return _deliver(situ_and_mul(gate, up, beta, linear_beta), out)


def state_gather(
    cache: Tensor, indices: Tensor, has_initial_state: Tensor | None, *, out: Tensor | None = None
) -> Tensor:
    """See the table."""
    keep = (indices >= 0) & (indices < cache.shape[0])
    if has_initial_state is not None:
        keep = keep & has_initial_state
    packed = cache.new_zeros((len(indices), *cache.shape[1:]))
    packed[keep] = cache[indices[keep].long()]
    return _deliver(packed, out)


def state_scatter(cache: Tensor, indices: Tensor, packed: Tensor) -> None:
    """See the table."""
    keep = (indices >= 0) & (indices < cache.shape[0])
    cache[indices[keep].long()] = packed[keep]


def _live(slots: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sequences that have both a slot of their own and at least one token: bool [B]."""
    return (slots > 0) & (cu_seqlens[1:] > cu_seqlens[:-1])


def _select(slots: Tensor, cu_seqlens: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token rows of the live sequences, their own cu_seqlens, and their slots as int64."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    owner_live = torch.repeat_interleave(live, lengths)
    rows = owner_live.nonzero().flatten() + int(cu_seqlens[0])
    bounds = torch.nn.functional.pad(lengths[live].cumsum(0), (1, 0))
    return rows, bounds, slots[live].long()


def _initial(state: Tensor, has_initial_state: Tensor) -> Tensor:
    """Zeros for new sequences, whatever the slot held (a product with the flag would keep its NaN)."""
    flags = has_initial_state.reshape(-1, *[1] * (state.dim() - 1))
    return torch.where(flags, state, torch.zeros((), dtype=state.dtype, device=state.device))


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return result.contiguous()
    if out.shape != result.shape or out.dtype != result.dtype:
        raise ValueError(f"out must be {tuple(result.shape)} {result.dtype}, got {tuple(out.shape)} {out.dtype}")
    return out.copy_(result)


#: The contract implementation of every operator of the table.
IMPLEMENTATIONS: dict[str, Implementation] = {
    function.__name__: Implementation(function.__name__, "contract", function)
    for function in (
        attn_res,
        short_conv,
        kda_prefill,
        gated_norm,
        kda_decode,
        kda_verify,
        route,
        experts,
        situ,
        state_gather,
        state_scatter,
    )
}
