"""Gated multi-head latent attention without positions (NoPE-MLA).

    q        = rms_norm(x Wqa^T) Wqb^T                    [T, N, nope + rope]   (q_lora_rank None: q = x Wq^T)
    c | kr   = x Wkva^T                                   R latent | rope key part shared by all heads
    ĉ        = rms_norm(c)                                kr is not normed
    kn | v   = ĉ Wkvb^T  per head                         nope | v_dim rows per head, head after head
    scores   = q . (kn, kr) * (nope + rope)^-0.5          causal; softmax in fp32
    out      = (softmax(scores) v  .  sigmoid(x Wg^T)) Wo^T       without gate (Kimi-Linear): no factor

No rotation is ever applied; "rope" only names the shared key slice. The norms of the two low ranks use eps 1e-6, the
class default of the released code; the config's eps is not passed to them. (It is invisible in logits of well-scaled
models and large where mean(c^2) is near 1e-5.)

Absorbed form, for decoding from a cache of one row [ĉ | kr] (R + rope values) a token, shared by the heads:

    q' = [qn W_UK(h) | qr]      scores = q' . row * the same scale      out(h) = (softmax(scores) ĉ) W_UV(h)^T

where W_UK(h) [nope, R] and W_UV(h) [v_dim, R] are the row blocks of kv_b_proj.

Rounding for BF16: projections, kn, v and the attention output are rounded; the scores, softmax and weighted sum stay
in fp32 here (the released eager code rounds scores and probabilities too). The gate's sigmoid is taken in BF16 on the
BF16 projection and the product rounded to BF16, as released.

Tolerances: fp32 against fp64 1e-5 (softmax over some hundred keys); absorbed against unabsorbed the same in fp32. A
BF16 layer atol 0.08 at output std 0.8 (measured .036: scores and probabilities rounded to BF16 on one side only).

Source: released modelling code; report eq. 7; the absorbed form from DeepSeek-V2, section 2.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_core.contracts._common import compute_dtype, linear, sequence_bounds
from k3_core.contracts.norm import LOW_RANK_EPS, rms_norm


def query(
    x: Tensor, q_a: Tensor | None, q_a_norm: Tensor | None, q_b: Tensor, num_heads: int, eps: float = LOW_RANK_EPS
) -> Tensor:
    """Queries [T, N, nope + rope] of x [T, H]: low rank with q_a [r, H], q_a_norm [r], q_b [N*(nope+rope), r].

    Without low rank (q_a and q_a_norm None) q_b is the whole projection [N*(nope+rope), H].
    """
    low = x if q_a is None or q_a_norm is None else rms_norm(linear(x, q_a), q_a_norm, eps)
    return linear(low, q_b).unflatten(-1, (num_heads, -1))


def cache_rows(x: Tensor, kv_a: Tensor, kv_a_norm: Tensor, eps: float = LOW_RANK_EPS) -> Tensor:
    """Cache rows [ĉ | kr]: x [T, H], kv_a [R + rope, H], kv_a_norm [R] -> [T, R + rope] in x's dtype."""
    rank = kv_a_norm.shape[0]
    latent, shared = linear(x, kv_a).split([rank, kv_a.shape[0] - rank], dim=-1)
    return torch.cat([rms_norm(latent, kv_a_norm, eps), shared], dim=-1)


def split_kv_b(kv_b: Tensor, num_heads: int, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Absorbed weights of kv_b [N*(nope+v), R]: (W_UK [N, nope, R], W_UV [N, v, R]), views."""
    per_head = kv_b.unflatten(0, (num_heads, -1))
    return per_head[:, :nope_dim], per_head[:, nope_dim:]


def attend(
    q: Tensor,
    rows: Tensor,
    kv_b: Tensor,
    nope_dim: int,
    *,
    absorbed: bool = False,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Causal attention of q [T, N, nope+rope] over cache rows [L, R+rope] -> [T, N, v] in q's dtype, before the gate.

    kv_b: [N*(nope+v), R]. The last query of a sequence sees its last row: L >= T per sequence, the surplus being its
    past. Both packings default to one sequence. absorbed selects the decode form; the results agree up to rounding.
    Padding queries get zeros. Raises ValueError where a sequence has more queries than rows.
    """
    bounds_q = sequence_bounds(q.shape[0], cu_seqlens_q)
    bounds_k = sequence_bounds(rows.shape[0], cu_seqlens_k)
    if len(bounds_q) != len(bounds_k):
        raise ValueError(f"{len(bounds_q) - 1} query sequences but {len(bounds_k) - 1} key sequences")
    w_uk, w_uv = split_kv_b(kv_b, q.shape[1], nope_dim)
    form = _attend_absorbed if absorbed else _attend_unabsorbed
    out = torch.zeros(q.shape[0], q.shape[1], w_uv.shape[1], dtype=q.dtype, device=q.device)
    for s in range(len(bounds_q) - 1):
        queries = slice(bounds_q[s], bounds_q[s + 1])
        keys = slice(bounds_k[s], bounds_k[s + 1])
        if queries.stop == queries.start:
            continue
        if queries.stop - queries.start > keys.stop - keys.start:
            raise ValueError(f"sequence {s} has more queries than cache rows")
        out[queries] = form(q[queries], rows[keys], w_uk, w_uv)
    return out


def apply_gate(attention: Tensor, gate: Tensor) -> Tensor:
    """attention . sigmoid(gate), both [T, N*v] in the model dtype; sigmoid and product each rounded to it."""
    wide = compute_dtype(gate)
    return attention * torch.sigmoid(gate.to(wide)).to(gate.dtype)


@dataclass
class MlaWeights:
    """Tensors of one layer as in the checkpoint.

    q_a [r, H], q_a_norm [r] (both None without low rank), q_b [N*(nope+rope), r or H]; kv_a [R+rope, H],
    kv_a_norm [R], kv_b [N*(nope+v), R]; g [N*v, H] or None without output gate; o [H, N*v].
    """

    q_a: Tensor | None
    q_a_norm: Tensor | None
    q_b: Tensor
    kv_a: Tensor
    kv_a_norm: Tensor
    kv_b: Tensor
    g: Tensor | None
    o: Tensor


def layer(
    x: Tensor,
    w: MlaWeights,
    *,
    num_heads: int,
    nope_dim: int,
    past: Tensor | None = None,
    absorbed: bool = False,
    low_rank_eps: float = LOW_RANK_EPS,
) -> tuple[Tensor, Tensor]:
    """One sequence's MLA layer on normed x [T, H]: (out [T, H], rows [past + T, R+rope]).

    past: [P, R+rope] cache rows of earlier tokens, or None.
    """
    q = query(x, w.q_a, w.q_a_norm, w.q_b, num_heads, low_rank_eps)
    rows = cache_rows(x, w.kv_a, w.kv_a_norm, low_rank_eps)
    if past is not None:
        rows = torch.cat([past, rows])
    attention = attend(q, rows, w.kv_b, nope_dim, absorbed=absorbed).flatten(1)
    if w.g is not None:
        attention = apply_gate(attention, linear(x, w.g))
    return linear(attention, w.o), rows


def _probabilities(scores: Tensor, scale: float) -> Tensor:
    """Causal softmax of scores [N, T, L] aligned at the end of the keys."""
    queries, keys = scores.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    return torch.softmax((scores * scale).masked_fill(hidden, float("-inf")), dim=-1)


def _attend_unabsorbed(q: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    wide = compute_dtype(q, rows)
    rank = w_uk.shape[-1]
    latent, shared = rows[:, :rank], rows[:, rank:].to(wide)
    k_nope = torch.einsum("lr,ndr->nld", latent, w_uk.to(latent.dtype)).to(wide)
    values = torch.einsum("lr,ndr->nld", latent, w_uv.to(latent.dtype)).to(wide)
    keys = torch.cat([k_nope, shared.expand(k_nope.shape[0], -1, -1)], dim=-1)
    probabilities = _probabilities(q.to(wide).transpose(0, 1) @ keys.transpose(1, 2), q.shape[-1] ** -0.5)
    return (probabilities @ values).transpose(0, 1).to(q.dtype)


def _attend_absorbed(q: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    wide = compute_dtype(q, rows)
    rank, nope = w_uk.shape[-1], w_uk.shape[-2]
    keys, by_head = rows.to(wide), q.to(wide).transpose(0, 1)
    absorbed = torch.cat([by_head[..., :nope] @ w_uk.to(wide), by_head[..., nope:]], dim=-1)
    context = _probabilities(absorbed @ keys.T, q.shape[-1] ** -0.5) @ keys[:, :rank]
    return (context @ w_uv.to(wide).transpose(1, 2)).transpose(0, 1).to(q.dtype)
