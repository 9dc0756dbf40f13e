"""Makes Triton's interpreter round fp32 to bfloat16 to nearest, as hardware does (it truncates; and this is faster)."""

from __future__ import annotations

from typing import Any

import numpy as np


def round_to_nearest() -> None:
    """Patch the interpreter in place. Idempotent."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    if getattr(original, "rounds_to_nearest", False):
        return

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            u: Any = np.ascontiguousarray(data).view(np.uint32).astype(np.uint64)
            nan = (u & 0x7FFFFFFF) > 0x7F800000
            rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
            return np.where(nan, np.uint16(0x7FC0), rounded).reshape(data.shape)
        if source == tl.bfloat16 and target == tl.float32:
            u = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
            return u.reshape(data.shape)
        return original(data, source, target, mode)

    convert.rounds_to_nearest = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert
