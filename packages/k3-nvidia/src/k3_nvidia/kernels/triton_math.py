"""Arithmetic that kernels of several operators share."""

# mypy: allow-untyped-defs
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b with fp32 accumulation; UPCAST is for the interpreter, which multiplies bfloat16 as integers."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
