"""Whether Triton interprets kernels here (TRITON_INTERPRET=1), where inline assembly and launch options do not
exist."""

from __future__ import annotations

import os
from typing import Any


def interpreting() -> bool:
    """True under Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _let_scalars_be_indices() -> None:
    """NumPy 2.4 refuses int() of a one-element array, which Triton 3.6's interpreter needs for loop bounds."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        setter = scope[0].set_attr if scope else setattr
        setter(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if interpreting():
    _let_scalars_be_indices()
