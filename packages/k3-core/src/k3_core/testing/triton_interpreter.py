"""Triton's interpreter as tests need it: fp32 becomes bfloat16 by rounding to nearest, and no time is lost.

The interpreter of Triton 3.6 truncates to bfloat16 where hardware rounds to nearest. Three of its parts take most of
its time without computing anything, and are replaced by others of the same result.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def round_to_nearest() -> None:
    """Patch the interpreter in place: casts from fp32 to bfloat16 round as hardware does. Idempotent; also `hasten`."""
    import triton.language as tl
    from triton.runtime import interpreter

    hasten()
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


def hasten() -> None:
    """Patch the interpreter in place: the same results in less time. Idempotent; call it outside kernels.

    * A reduction by a kernel's own function combines the halves of the axis until one row is left, as a device does;
      the original calls the function once for each element, in Python.
    * What is builtin in Triton's language is looked up once, not at each call of each function.
    * The table of NumPy's types is made once, not at each use.
    """
    from triton.runtime import interpreter

    operations: Any = interpreter.ReduceOps
    if getattr(operations.generic_reduce, "by_halves", False):
        return
    operations.generic_reduce = _by_halves(operations.generic_reduce)
    interpreter._patch_builtin = _known_builtins()
    interpreter._get_np_dtype = _known_types(interpreter._get_np_dtype)


def _by_halves(original: Any) -> Any:
    """`ReduceOps.generic_reduce` over whole halves: lengths are powers of two. Without an axis, ``original``."""

    def reduce(self: Any, parts: tuple[Any, ...]) -> list[Any]:
        axis = self.axis
        if axis is None:
            return list(original(self, parts))
        rows = [np.moveaxis(part.handle.data, axis, 0) for part in parts]
        while (half := len(rows[0]) // 2) > 0:
            first, second = (
                [
                    self.to_tensor(row[half * i : half * (i + 1)], part.dtype)
                    for row, part in zip(rows, parts, strict=True)
                ]
                for i in (0, 1)
            )
            combined = self.combine_fn.fn(*first, *second)
            combined = combined if isinstance(combined, tuple) else (combined,)
            rows = [
                np.broadcast_to(value.handle.data, row[:half].shape) for value, row in zip(combined, rows, strict=True)
            ]
        results = [np.expand_dims(row[0], axis) if self.keep_dims else row[0] for row in rows]
        return [self.to_tensor(result, part.dtype) for result, part in zip(results, parts, strict=True)]

    reduce.by_halves, reduce.original = True, original  # type: ignore[attr-defined]
    return reduce


def _known_builtins() -> Any:
    """`_patch_builtin` that looks at the names which were builtin before any kernel ran, not at all members."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_builtin
    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    names = {place: [n for n in dir(place) if tl.core.is_builtin(getattr(place, n, None))] for place in places}

    def patch(place: Any, builder: Any, *scope: Any) -> None:
        if place not in names:
            return original(place, builder, *scope)
        for name in names[place]:
            member = getattr(place, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(place, name, member, builder, *scope)
        return None

    return patch


def _known_types(original: Any) -> Any:
    """`_get_np_dtype` that remembers the answer for each type of elements; pointers cannot be keys."""
    import triton.language as tl

    of = functools.cache(original)
    pointer = np.dtype(np.uint64)

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return pointer if isinstance(element, tl.pointer_type) else of(element)

    return numpy_type
