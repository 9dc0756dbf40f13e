"""SiTU-GLU on [gate | up] rows: beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta), fp32, one rounding.

Used for the dense layer and the shared experts; the routed experts have it in the epilogue of their first product.
Sixteen bytes a lane from either half. Contract: ``k3_core.contracts.situ.situ_and_mul``.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

from k3_amd.kernels.device.math import gated_act


@triton.jit
def situ_kernel(x_ptr, out_ptr, width, beta, linear_beta, x_stride, out_stride, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    y = gated_act(gate, up, beta, linear_beta, ACT)
    tl.store(out_ptr + row * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=inside)
