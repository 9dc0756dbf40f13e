"""Device functions that every KDA kernel shares: gate, activation, and a product that the interpreter can run.

Formulas: k3_core.contracts.kda. All of it is fp32. Decays are kept in base 2 (g * log2 e) because the hardware
exponentiates in base 2; only exponentials of bounded differences are formed.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

#: The bounded-gate form exponentiates at most this many doublings: half of 32 tokens at the bound, see `kda_chunk`.
MAX_HALF_RANGE = 120.0
LOG2E = 1.4426950408889634


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) as the square of a reciprocal root: one special instruction where a division takes ten.

    Saturates to 0 and 1 without NaN.
    """
    r = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return r * r


@triton.jit
def softplus(x):
    """log(1 + exp(x)) with relative accuracy on both sides: a series below -4, the identity above 20."""
    e = tl.exp2(tl.minimum(x, 20.0) * 1.4426950408889634)
    small = e * (1.0 - e * (0.5 - e * (0.3333333333 - e * 0.25)))
    return tl.where(x > 20.0, x, tl.where(x < -4.0, small, tl.log(1.0 + e)))


@triton.jit
def gate_log2(z, rate, bias, lower_bound, BOUNDED: tl.constexpr):
    """Base-2 log decay: z, bias fp32, rate = exp(a_log), lower_bound natural log (unused unless BOUNDED)."""
    x = z + bias
    if BOUNDED:
        return (lower_bound * 1.4426950408889634) * sigmoid(rate * x)
    else:
        return (rate * -1.4426950408889634) * softplus(x)
