"""Kimi Delta Attention (KDA): a gated delta rule with one decay per channel, a recurrent state and no positions.

Per head (N heads, key dim K = value dim V = D), token t, state S [V, K] in fp32:

    S[:, k] *= exp(g_k)                    decay per key channel, g <= 0
    e        = v - S k                     what the state misses about this key
    S       += beta * e k^T                write
    o        = S q                         read after the write

q and k are L2-normalised first, eps 1e-6 added to the *sum* of squares, and q is scaled by D^-0.5; all in fp32.
beta = sigmoid of its projection, in (0, 1). The log decay has two forms (z~ is the projection, A = exp(a_log[h])):

    lower_bound L:  g = L * sigmoid(A * (z~ + dt_bias))          K3, L = -5; not a clamp of the other form
    no bound:       g = -A * softplus(z~ + dt_bias)               Kimi-Linear

Chunked form for a chunk of C tokens, G the inclusive cumulative sum of g inside the chunk, S the incoming state:

    M_ij = beta_i sum_c k_i k_j exp(G_i - G_j)   j < i            A_ij = sum_c q_i k_j exp(G_i - G_j)   j <= i
    U = (I + M)^-1 diag(beta) V                                   W = (I + M)^-1 diag(beta) (K . exp G)
    V' = U - W S^T        O = (Q . exp G) S^T + A V'        S' = S diag(exp G_C) + V'^T (K . exp(G_C - G))

Only exponentials of differences that are <= 0 are formed: exp(-G) alone overflows fp32 after 18 tokens at the bound.

The input path of a layer, in order: q, k, v projections, a depthwise causal convolution of width W = 4 with SiLU on
each of them (fp32 weights, tap W-1 on the current token), gate and beta projections from the same input, the rule
above, a gated RMSNorm with the output-gate projection (sigmoid), the output projection.

State: recurrent [S, N, V, K] (V-major), one row a sequence; conv [S, C, W-1] the last raw projections (C channels in
the order q, k, v), oldest first. `None` means a new sequence: zeros. Functions return new state, they change nothing
in place. Sequences are packed along T and bounded by cu_seqlens; rows after the last boundary are padding whose output
is zero. A sequence of length zero keeps its state.

Rounding for BF16 inputs: everything inside is fp32; conv output, o and the normed output are rounded to BF16; states
are returned in fp32 (fp64 for fp64 inputs), the caller rounds when its cache is narrower.

Tolerances against fp64: recurrent and chunked fp32 atol 1e-6 for normalised data with |o| < 0.2 (measured 6e-8; the
delta rule does not amplify errors as |I - beta k k^T| <= 1); state atol 2e-6; conv fp32 1e-6, BF16 1 ulp; gate 2e-6
relative. Kernels that keep BF16 operands inside a chunk: 1e-2 of the largest output.

Sources: released modelling code; flash-linear-attention's reference formulas; report eq. 1. Solving the triangular
system per chunk is the WY form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from k3_core.contracts._common import compute_dtype, linear, sequence_bounds
from k3_core.contracts.norm import gated_rms_norm

L2_EPS = 1e-6
TILE = 16

Bounds = Tensor | Sequence[int] | None


def gate(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Natural-log decay g = log(decay) <= 0: z [T, N, D] raw projection -> [T, N, D] fp32 (fp64 if any operand is).

    a_log: [N]; dt_bias: [N, D] or flat [N*D]; lower_bound: -5.0 for K3, None for the softplus form. Both in fp32.
    """
    dtype = compute_dtype(z, a_log, dt_bias)
    heads, dim = z.shape[-2:]
    rate = a_log.to(dtype).reshape(heads, 1).exp()
    shifted = z.to(dtype) + dt_bias.to(dtype).reshape(heads, dim)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * shifted)
    return -rate * torch.logaddexp(shifted, torch.zeros((), dtype=dtype, device=z.device))


def normalize_qk(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """L2-normalise q and k over the last axis (eps added to the sum of squares) and scale q by D^-0.5, in `dtype`."""
    q, k = q.to(dtype), k.to(dtype)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5
    return q, k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)


def short_conv(
    x: Tensor, weight: Tensor, state: Tensor | None = None, cu_seqlens: Bounds = None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution and SiLU: (y [T, C], new state [S, C, W-1]), both in x's dtype.

        y_t[c] = silu(sum_j w[c, j] * u_{t-W+1+j}[c])

    x: [T, C] raw projections u; weight: [C, W] or [C, 1, W], used in fp32; state: [S, C, W-1] the last raw inputs of
    each sequence, oldest first, or None for zeros. fp32 inside, one rounding.
    """
    taps = weight.reshape(weight.shape[0], -1)
    channels, history = taps.shape[0], taps.shape[1] - 1
    bounds = sequence_bounds(x.shape[0], cu_seqlens)
    num_seqs = len(bounds) - 1
    if state is not None and state.shape != (num_seqs, channels, history):
        raise ValueError(f"conv state must be {(num_seqs, channels, history)}, got {tuple(state.shape)}")
    # All sequences end to end, each behind its own history: row t of sequence s is row t + history * (s + 1).
    ends = torch.tensor(bounds, device=x.device)
    sequence = torch.repeat_interleave(torch.arange(num_seqs, device=x.device), ends.diff())
    first = torch.arange(bounds[-1], device=x.device) + history * sequence
    columns = torch.arange(history, device=x.device)
    packed = x.new_zeros(bounds[-1] + history * num_seqs, channels)
    packed[first + history] = x[: bounds[-1]]
    if state is not None:
        heads = ends[:-1] + history * torch.arange(num_seqs, device=x.device)
        packed[heads[:, None] + columns] = state.to(x.dtype).transpose(1, 2)
    tails = ends[1:] + history * torch.arange(num_seqs, device=x.device)
    y = torch.zeros_like(x)
    y[: bounds[-1]] = _convolve([packed[first + j] for j in range(history + 1)], taps)
    return y, packed[tails[:, None] + columns].transpose(1, 2).contiguous()


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Bounds = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token: (o [T, N, V] in v's dtype, state [S, N, V, K] in fp32 or fp64).

    q, k: [T, N, K] before normalisation; v: [T, N, V]; g: [T, N, K] natural-log decay; beta: [T, N] after sigmoid;
    state: [S, N, V, K] or None for zeros; cu_seqlens: [S+1] or None for one sequence. Decode is S sequences of one
    token. Batched over sequences: the loop runs over the longest one.
    """
    dtype = compute_dtype(q, k, v, g, beta, state)
    bounds = sequence_bounds(q.shape[0], cu_seqlens)
    order, lengths = _longest_first(bounds)
    current = _initial_state(state, order, v, k, dtype)
    starts = torch.tensor([bounds[s] for s in order], device=q.device)
    q, k = normalize_qk(q, k, dtype)
    decay, write, values = g.to(dtype).exp(), beta.to(dtype).unsqueeze(-1), v.to(dtype)
    out = torch.zeros_like(values)
    for t in range(max(lengths, default=0)):
        active = sum(length > t for length in lengths)
        rows = starts[:active] + t
        S, key = current[:active], k[rows].unsqueeze(-1)
        S *= decay[rows].unsqueeze(-2)
        error = values[rows] - (S @ key).squeeze(-1)
        S.flatten(0, 1).baddbmm_((write[rows] * error).flatten(0, 1).unsqueeze(-1), key.flatten(0, 1).transpose(1, 2))
        out[rows] = (S @ q[rows].unsqueeze(-1)).squeeze(-1)
    return out.to(v.dtype), _in_order(current, order)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Bounds = None,
    *,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The chunked form: arguments and results of `recurrent`, equal to it in exact arithmetic for every chunk >= 1."""
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    dtype = compute_dtype(q, k, v, g, beta, state)
    bounds = sequence_bounds(q.shape[0], cu_seqlens)
    order, lengths = _longest_first(bounds)
    current = _initial_state(state, order, v, k, dtype)
    q, k = normalize_qk(q, k, dtype)
    values = v.to(dtype)
    out = torch.zeros_like(values)
    starts = torch.tensor([bounds[s] for s in order], device=q.device)
    ends = starts + torch.tensor(lengths, device=q.device)
    offsets = torch.arange(chunk, device=q.device)
    for begin in range(0, max(lengths, default=0), chunk):
        active = sum(length > begin for length in lengths)
        rows = starts[:active, None] + begin + offsets[: min(chunk, max(lengths) - begin)]
        valid = rows < ends[:active, None]
        rows = torch.where(valid, rows, 0)

        def take(x: Tensor, rows: Tensor = rows, valid: Tensor = valid) -> Tensor:
            # [T, N, D] -> [active, N, C, D]; rows past the end become zero keys with no decay: they change nothing.
            return torch.where(valid[..., None, None], x[rows], 0).transpose(1, 2)

        o, current[:active] = _one_chunk(
            take(q), take(k), take(values), take(g.to(dtype)), take(beta.to(dtype).unsqueeze(-1)), current[:active]
        )
        out[rows[valid]] = o.transpose(1, 2)[valid]
    return out.to(v.dtype), _in_order(current, order)


def output_norm(o: Tensor, output_gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(o) * weight * sigmoid(output_gate) per head: o, output_gate [T, N, D], weight [D] fp32; one rounding."""
    return gated_rms_norm(o, output_gate, weight, eps)


def decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token for each of S sequences: operands [S, N, D] and [S, N], state [S, N, V, K]; see `recurrent`."""
    return recurrent(q, k, v, g, beta, state, range(q.shape[0] + 1))


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    num_accepted: Tensor,
    cu_seqlens: Bounds,
) -> tuple[Tensor, Tensor]:
    """Speculative verification: run 1 + drafted tokens of each sequence and keep the state after every one.

    states: [S, 1 + num_spec, N, V, K]. Sequence s starts from slot num_accepted[s] - 1 (what the previous step's
    sampling accepted, 1..1 + num_spec) and the state after its j-th token goes to slot j. Slots beyond its token
    count keep their values. A sequence without drafts still needs this form: only it applies the accepted offset.
    Returns (o [T, N, V] in v's dtype, new states in the compute dtype).
    """
    dtype = compute_dtype(q, k, v, g, beta, states)
    bounds = sequence_bounds(q.shape[0], cu_seqlens)
    new = states.to(dtype, copy=True)
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    for s, (start, end) in enumerate(pairwise(bounds)):
        _check_verify(s, end - start, int(num_accepted[s]), states.shape[1] - 1)
        current = states[s, int(num_accepted[s]) - 1].to(dtype).unsqueeze(0)
        for slot, row in enumerate(range(start, end)):
            one = slice(row, row + 1)
            out[one], current = recurrent(q[one], k[one], v[one], g[one], beta[one], current)
            new[s, slot] = current[0]
    return out, new


def short_conv_verify(
    x: Tensor, weight: Tensor, state: Tensor, num_accepted: Tensor, cu_seqlens: Bounds
) -> tuple[Tensor, Tensor]:
    """`short_conv` for verification: state [S, C, W-1 + num_spec], whose history starts at column num_accepted - 1.

    With history h (W-1 columns) and tokens x_0..x_n of a sequence the new columns are h_1..h_{W-2}, x_0..x_n, so that
    after a tokens are accepted the next history starts at column a - 1. Columns beyond stay as they were.
    """
    taps = weight.reshape(weight.shape[0], -1)
    history = taps.shape[1] - 1
    bounds = sequence_bounds(x.shape[0], cu_seqlens)
    y, new = torch.zeros_like(x), state.clone()
    for s, (start, end) in enumerate(pairwise(bounds)):
        accepted = int(num_accepted[s])
        _check_verify(s, end - start, accepted, state.shape[2] - history)
        if end == start:
            continue
        window = torch.cat([state[s, :, accepted - 1 : accepted - 1 + history].T.to(x.dtype), x[start:end]])
        y[start:end] = _convolve([window[j : j + end - start] for j in range(history + 1)], taps)
        new[s, :, : len(window) - 1] = window[1:].T
    return y, new


@dataclass
class KdaWeights:
    """Tensors of one layer as in the checkpoint (N heads of D, H hidden).

    q, k, v [N*D, H]; q_conv, k_conv, v_conv [N*D, 1, W] fp32; f_a [r, H], f_b [N*D, r]; b [N, H]; a_log [N] fp32 (cut
    to the head count); dt_bias [N*D] fp32; o_norm [D] fp32; o [H, N*D]. Output gate: g [N*D, H] of full rank (g_a
    None), or g_a [r, H] and g [N*D, r] of low rank.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_conv: Tensor
    k_conv: Tensor
    v_conv: Tensor
    f_a: Tensor
    f_b: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    g: Tensor
    o_norm: Tensor
    o: Tensor
    g_a: Tensor | None = None


class KdaState(NamedTuple):
    """State of S sequences: conv [S, 3*N*D, W-1] (channels q, k, v) and recurrent [S, N, V, K]."""

    conv: Tensor
    recurrent: Tensor


def layer(
    x: Tensor,
    w: KdaWeights,
    *,
    num_heads: int,
    lower_bound: float | None,
    eps: float,
    state: KdaState | None = None,
    cu_seqlens: Bounds = None,
    chunk: int | None = 64,
) -> tuple[Tensor, KdaState]:
    """The whole KDA layer on normed x [T, H]: (out [T, H] in x's dtype, new state).

    eps: of the output norm. chunk: tokens a chunk, or None for the recurrence. The recurrent state has the dtype of
    the computation; feed it back as it is.
    """
    raw = torch.cat([linear(x, w.q), linear(x, w.k), linear(x, w.v)], dim=-1)
    taps = torch.cat([w.q_conv, w.k_conv, w.v_conv])
    mixed, conv = short_conv(raw, taps, None if state is None else state.conv, cu_seqlens)
    q, k, v = (part.unflatten(-1, (num_heads, -1)) for part in mixed.chunk(3, dim=-1))
    decay = gate(linear(linear(x, w.f_a), w.f_b).unflatten(-1, (num_heads, -1)), w.a_log, w.dt_bias, lower_bound)
    beta = torch.sigmoid(linear(x, w.b).to(compute_dtype(x)))
    old = None if state is None else state.recurrent
    if chunk is None:
        o, new = recurrent(q, k, v, decay, beta, old, cu_seqlens)
    else:
        o, new = chunked(q, k, v, decay, beta, old, cu_seqlens, chunk=chunk)
    output_gate = linear(x if w.g_a is None else linear(x, w.g_a), w.g).unflatten(-1, (num_heads, -1))
    return linear(output_norm(o, output_gate, w.o_norm, eps).flatten(-2), w.o), KdaState(conv, new)


def _check_verify(sequence: int, tokens: int, accepted: int, num_spec: int) -> None:
    if tokens > 1 + num_spec or not 1 <= accepted <= 1 + num_spec:
        raise ValueError(
            f"sequence {sequence}: {tokens} tokens and {accepted} accepted do not fit {num_spec} speculative tokens"
        )


def _convolve(shifted: list[Tensor], taps: Tensor) -> Tensor:
    """silu(sum_j taps[:, j] * shifted[j]) for shifted inputs [T, C], in their dtype.

    Summed tap by tap, so that a token's result does not depend on how many are computed with it.
    """
    wide = compute_dtype(shifted[0])
    total = torch.zeros(shifted[0].shape, dtype=wide, device=shifted[0].device)
    for j, inputs in enumerate(shifted):
        total = total + inputs.to(wide) * taps[:, j].to(wide)
    return functional.silu(total).to(shifted[0].dtype)


def _longest_first(bounds: list[int]) -> tuple[list[int], list[int]]:
    """Sequence numbers by falling length, and those lengths: the active ones are then always a prefix."""
    lengths = [b - a for a, b in pairwise(bounds)]
    order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    return order, [lengths[s] for s in order]


def _initial_state(state: Tensor | None, order: list[int], v: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the states [S, N, V, K] in `order`, or zeros."""
    shape = (len(order), v.shape[-2], v.shape[-1], k.shape[-1])
    if state is None:
        return torch.zeros(shape, dtype=dtype, device=v.device)
    if state.shape != shape:
        raise ValueError(f"state must be [S, N, V, K] = {shape}, got {tuple(state.shape)}")
    if order == sorted(order):
        return state.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return state[order].to(dtype)


def _in_order(current: Tensor, order: list[int]) -> Tensor:
    """States back in the order of the sequences."""
    if order == sorted(order):
        return current
    result = torch.empty_like(current)
    result[order] = current
    return result


def _one_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of every active sequence: operands [B, N, C, D], beta [B, N, C, 1], S [B, N, V, K] -> (o, new S)."""
    from_start = g.cumsum(-2)
    reads, writes, to_end = _decayed_products(q, k, g)
    system = beta * writes.tril(-1)
    right = torch.cat([beta * v, beta * k * _decay(from_start)], dim=-1)
    # The unit diagonal is implied: forward substitution of (I + M) X = diag(beta) [V | K exp G].
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    U, W = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    fresh = U - W @ S.transpose(-1, -2)
    o = (q * _decay(from_start)) @ S.transpose(-1, -2) + reads @ fresh
    return o, S * _decay(from_start[..., -1:, :]) + fresh.transpose(-1, -2) @ (k * _decay(to_end))


def _decayed_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A_ij = sum_c q_i k_j exp(G_i - G_j), the same with k_i for j <= i (zero above the diagonal), and G_C - G_j.

    In tiles of TILE rows. Off the diagonal the exponential is split at the tile's first boundary r, exp(G_i - r) *
    exp(r - G_j) with both exponents <= 0, which makes it a matrix product; on it each column's differences are summed
    directly. No difference of two long sums is taken: in fp32 that would cost 3e-5 of a factor once |G| is near 300.
    """
    length = q.shape[-2]
    both = torch.stack([q, k])
    products = both.new_zeros(*both.shape[:-1], length)
    to_boundary = g[..., :0, :]  # r - G_j of the rows before the current tile
    for begin in range(0, length, TILE):
        end = min(begin + TILE, length)
        tile, rows = g[..., begin:end, :], both[..., begin:end, :]
        if begin:
            right = k[..., :begin, :] * _decay(to_boundary)
            products[..., begin:end, :begin] = (rows * _decay(tile.cumsum(-2))) @ right.transpose(-1, -2)
        for b in range(len(tile)):  # one sequence at a time bounds the [N, TILE, TILE, D] intermediate
            products[:, b, :, begin:end, begin:end] = _tile_products(rows[:, b], k[b, :, begin:end], tile[b])
        later = torch.cat([tile[..., 1:, :], torch.zeros_like(tile[..., :1, :])], dim=-2)
        inside = later.flip(-2).cumsum(-2).flip(-2)
        to_boundary = torch.cat([to_boundary + tile.sum(-2, keepdim=True), inside], dim=-2)
    return products[0], products[1], to_boundary


def _tile_products(rows: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """sum_c rows_i k_j exp(g_{j+1} + ... + g_i) for j <= i, else 0: rows [2, N, R, D], k and g [N, R, D]."""
    after = torch.ones(g.shape[-2], g.shape[-2], dtype=torch.bool, device=g.device).tril(-1)
    since = torch.where(after[..., None], g.unsqueeze(-2), 0).cumsum(-3)  # [N, i, j, D]
    return torch.einsum("snid,nijd->snij", rows, _decay(since).mul_(k.unsqueeze(-3))).tril_()


def _decay(exponent: Tensor) -> Tensor:
    """exp of non-positive exponents; zero where the result is below the root of the smallest normal number.

    That is 1e-19 in fp32 and 1e-154 in fp64, far below rounding of anything of order one. The product of two such
    factors would be subnormal, which CPUs multiply many times slower.
    """
    floor = math.log(torch.finfo(exponent.dtype).tiny) / 2
    return torch.where(exponent < floor, 0, exponent.exp())
