"""Which variant of a Triton kernel a launch needs: what Triton would compile for it, read from the arguments alone."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch


@functools.cache
def _compiled_form(kernel: Any) -> Any:
    """The kernel as it would be without Triton's interpreter, which drops what is declared of parameters."""
    if hasattr(kernel, "params"):
        return kernel
    from triton import JITFunction

    return JITFunction(kernel.fn, **kernel.kwargs)


def variant(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Hashable:
    """(name, what each parameter is specialised on, launch options) of ``kernel[grid](*args, **named)``.

    kernel: what ``triton.jit`` made, with or without the interpreter. Constants count by value; tensors by dtype and
    16-byte alignment; integers by width and, unless the kernel says otherwise, by being one and by being divisible by
    16; floats by being that.
    """
    kernel = _compiled_form(kernel)
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    traits = []
    for parameter in kernel.params:
        value = values.pop(parameter.name)
        trait: Any
        if parameter.is_constexpr:
            trait = value
        elif isinstance(value, torch.Tensor):
            free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            trait = (value.dtype, free or value.data_ptr() % 16 == 0)
        elif isinstance(value, int) and not isinstance(value, bool):
            width = 32 if -(2**31) <= value < 2**31 else 64
            trait = (width,) if parameter.do_not_specialize else (width, value == 1, value % 16 == 0)
        else:
            trait = type(value)
        traits.append((parameter.name, trait))
    return kernel.__name__, tuple(traits), tuple(sorted(values.items(), key=lambda item: item[0]))
