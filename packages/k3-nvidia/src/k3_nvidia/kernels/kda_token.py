"""Device functions of one token: what decode and verification share. Formulas: k3_core.contracts.kda; see kda_step."""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

from k3_nvidia.kernels.kda_math import sigmoid


@triton.jit
def _inner(a, b):
    """a . b as a [1] tensor, reduced inside each warp: every warp that uses a row vector holds all of it."""
    return tl.sum((a * b)[None, :], axis=1)


@triton.jit
def _zero_rows(out_ptr, first, count, out_stride, head, D: tl.constexpr):
    """Zeros for one head of rows first .. first + count."""
    c = tl.arange(0, D)
    for t in tl.range(0, count):
        at = (first + t).to(tl.int64) * out_stride + head * D + c
        tl.store(out_ptr + at, tl.zeros([D], dtype=out_ptr.dtype.element_ty))


@triton.jit
def _block_step(S, q, k, v, decay, beta, rq, rk, kq):
    """One token for a block of value rows: (new S, o)."""
    S = S * decay[None, :]
    a = tl.sum(S * k[None, :], axis=1)
    b = tl.sum(S * q[None, :], axis=1)
    u = beta * (v - rk * a) * rk
    return S + u[:, None] * k[None, :], rq * (b + u * kq)


@triton.jit
def _norm(o, weight, gate, eps, D: tl.constexpr):
    """rms_norm(o) * weight * sigmoid(gate) of one head."""
    return o * tl.rsqrt(tl.sum(o * o, axis=0) * (1.0 / D) + eps) * weight * sigmoid(gate)
