"""Compiling Triton kernels ahead of time for any target: no device, no torch. What the vendors' compile gates share.

A kernel's arguments are typed by name: constants are compile-time, ``types`` says the rest. Alignment follows what a
launch would specialise on: pointers and strides are multiples of 16 unless the kernel declares that it does not
specialise on them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def argument_types(kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, str]:
    """Triton type of every argument that is no constant, in the order of the kernel: ``*bf16``, ``i32``, ``fp32``.

    types: exceptions by name. Without one a name that ends in ``_ptr`` is ``*i32``, any other ``i32``.
    """
    return {
        name: types.get(name) or ("*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
        if name not in constants
    }


def aligned_arguments(kernel: Any, constants: Mapping[str, Any], divisible: Collection[str] = ()) -> list[str]:
    """Arguments that are multiples of 16: pointers, strides and ``divisible`` (sizes), where launches specialise."""
    found = []
    for parameter in kernel.params:
        name = parameter.name
        if name in constants or parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
            continue
        if name.endswith("_ptr") or "stride" in name or name in divisible:
            found.append(name)
    return found


def compile_kernel(
    kernel: Any,
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    target: tuple[str, int | str, int],
    types: Mapping[str, str],
    divisible: Collection[str] = (),
    narrow: Collection[str] = (),
) -> Any:
    """Triton's compiled kernel for target (backend, architecture, lanes of a wave or warp).

    narrow: pointers whose storage has at most 2 GiB, for which AMD's compiler uses buffer instructions.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource
    if getattr(kernel, "is_gluon", bool)():  # written in Gluon, Triton's form with explicit layouts
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    named = argument_types(kernel, constants, types)
    signature = {name: named.get(name, "constexpr") for name in kernel.arg_names}
    aligned = set(aligned_arguments(kernel, constants, divisible))
    attrs: dict[tuple[int], list[list[Any]]] = {}
    for i, name in enumerate(kernel.arg_names):
        traits = [["tt.divisibility", 16]] if name in aligned else []
        traits += [["tt.pointer_range", 32]] if name in narrow and name not in constants else []
        if traits:
            attrs[i,] = traits
    return triton.compile(
        source(kernel, signature, dict(constants), attrs), target=GPUTarget(*target), options=dict(options)
    )
