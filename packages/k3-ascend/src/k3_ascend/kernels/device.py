"""Device functions that several kernels share. All of it is fp32.

``1 / sqrt`` instead of ``rsqrt`` and exponentials in base e: the vector unit's reciprocal root is an approximation, and
it exponentiates in base e. Formulas: `k3_core.contracts`.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); saturates to 0 and 1 without NaN."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """tanh with a relative error of a few 2^-24: an odd polynomial below 0.625, where 1 - 2 / (exp(2x) + 1) cancels.

    Split and degree as in Cephes' tanhf.
    """
    a = tl.abs(x)
    s = x * x
    small = -5.70498872745e-3 * s + 2.06390887954e-2
    small = small * s - 5.37397155531e-2
    small = small * s + 1.33314422036e-1
    small = small * s - 3.33332819422e-1
    small = x + x * s * small
    large = 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)
    large = tl.where(x < 0.0, -large, large)
    return tl.where(a < 0.625, small, large)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) with relative accuracy on both sides: a series below -4, the identity above 20."""
    e = tl.exp(tl.minimum(x, 20.0))
    small = e * (1.0 - e * (0.5 - e * (0.3333333333 - e * 0.25)))
    return tl.where(x > 20.0, x, tl.where(x < -4.0, small, tl.log(1.0 + e)))


@triton.jit
def gate(z, rate, lower_bound, BOUNDED: tl.constexpr):
    """Natural-log decay of a biased projection z: rate = exp(a_log) of its head."""
    return lower_bound * sigmoid(rate * z) if BOUNDED else -rate * softplus(z)
