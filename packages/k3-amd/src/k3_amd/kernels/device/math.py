"""Device functions that several kernels share: sigmoid, gates, gated activations, a product the interpreter can run.

All fp32. Exponentials are base 2 (v_exp_f32); decays are kept as base-2 logarithms (g * log2 e). Formulas:
k3_core.contracts.kda and k3_core.contracts.situ.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)): the square of a reciprocal root, because a division is ten instructions and v_rsq_f32 is one.

    Saturates to 0 and 1 without NaN.
    """
    r = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return r * r


@triton.jit
def softplus(x):
    """log(1 + exp(x)) with relative accuracy on both sides: a series below -4, the identity above 20."""
    e = tl.exp2(tl.minimum(x, 20.0) * 1.4426950408889634)
    series = e * (1.0 - e * (0.5 - e * (0.3333333333 - e * 0.25)))
    return tl.where(x > 20.0, x, tl.where(x < -4.0, series, tl.log(1.0 + e)))


@triton.jit
def gate_log2(z, rate, bias, lower_bound, BOUNDED: tl.constexpr):
    """Base-2 log decay. z, bias fp32; rate = exp(a_log); lower_bound natural, used only if BOUNDED."""
    if BOUNDED:
        return (lower_bound * 1.4426950408889634) * sigmoid(rate * (z + bias))
    else:
        return (rate * -1.4426950408889634) * softplus(z + bias)


@triton.jit
def tanh(x):
    """fp32 tanh: 1 - 2 / (e^2x + 1), and a series near 0, where that cancels. No device library, so it interprets."""
    x2 = x * x
    series = x * (1.0 + x2 * (-0.3333333333 + x2 * (0.1333333333 - x2 * 0.05396825397)))
    return tl.where(x2 < 0.01, series, 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))


@triton.jit
def gated_act(gate, up, beta, linear_beta, ACT: tl.constexpr):
    """fp32 gated activation. ACT 0: silu(g) u; 1: SiTU; 2: SiTU whose up half stays linear."""
    gated = 1.0 / (1.0 + tl.exp2(gate * -1.4426950408889634))
    if ACT == 0:
        return gate * gated * up
    left = beta * tanh(gate / beta) * gated
    if ACT == 1:
        return left * (linear_beta * tanh(up / linear_beta))
    return left * up


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b, fp32 accumulation. UPCAST is for the interpreter, which multiplies bfloat16 as integers."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
