"""The delta rule once more in fp64, with the size of what cancels in it.

Values equal :func:`k3_core.contracts.kda.recurrent` (a test holds them together). The scale is needed because an output
``o = S q`` may be far smaller than its terms: a kernel that rounds q, k, v, the correction or the state it reads to
bfloat16 errs by a fraction of the terms, and no kernel can do better. To first order, with independent roundings,

    scale_v^2 = sum_k (S_vk^2 + (beta e_v k_k)^2) q_k^2  +  beta^2 (v_v^2 + sum_k S_vk^2 k_k^2) (k . q)^2

where S is the decayed state before the update: roundings of q and of the state that is read, of k in the update, of v
and of S k in the correction e. It is averaged over v.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """One token: output [.., N, V], state [.., N, V, K], scale [.., N, 1] of the output."""

    out: Tensor
    state: Tensor
    scale: Tensor


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Step:
    """One token of B sequences, all fp64: q, k, g [B, N, K] raw, v [B, N, V], beta [B, N], state [B, N, V, K]."""
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    old = state * g.exp().unsqueeze(-2)
    write = beta.unsqueeze(-1) * (v - (old * k.unsqueeze(-2)).sum(-1))
    new = old + write.unsqueeze(-1) * k.unsqueeze(-2)
    out = (new * q.unsqueeze(-2)).sum(-1)
    read = ((old.square() + (write.unsqueeze(-1) * k.unsqueeze(-2)).square()) * q.square().unsqueeze(-2)).sum(-1)
    correction = v.square() + (old.square() * k.square().unsqueeze(-2)).sum(-1)
    overlap = (beta * (k * q).sum(-1)).square().unsqueeze(-1)
    return Step(out, new, (read + overlap * correction).mean(-1, keepdim=True).sqrt())


def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, lengths: list[int]) -> Step:
    """Packed sequences of the given lengths: [T, N, D] operands, state [B, N, V, K]; out and scale have T rows."""
    out, scale = torch.zeros_like(v), torch.zeros_like(v[..., :1])
    current = state.clone()
    size = torch.tensor(lengths, device=v.device)
    starts = size.cumsum(0) - size
    for t in range(max(lengths, default=0)):
        active = (size > t).nonzero().flatten()
        rows = starts[active] + t
        done = step(q[rows], k[rows], v[rows], g[rows], beta[rows], current[active])
        out[rows], current[active], scale[rows] = done
    return Step(out, current, scale)
