"""Lower a Triton kernel with triton-ascend's own passes to linalg: no NPU, no CANN."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
}
#: Architecture whose front end is asked; linalg does not depend on it (A2, A3 and 950 share it).
ARCH = "Ascend910B3"


@dataclass(frozen=True)
class Variant:
    """What a launch is specialised on: argument types by parameter name, and constants."""

    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> str:
        """A short name that is the same for the same variant."""
        return hashlib.sha256(repr((self.signature, self.constants)).encode()).hexdigest()[:12]


def variant_of(kernel: Any, args: tuple[Any, ...], constants: Mapping[str, Any]) -> Variant:
    """The variant that a launch with these arguments would compile (integers are not specialised on their values)."""
    names = kernel.arg_names[: len(args)]
    return Variant(
        tuple((name, type_of(value)) for name, value in zip(names, args, strict=True)), tuple(sorted(constants.items()))
    )


def type_of(value: Any) -> str:
    """Triton's name of an argument's type. Raises TypeError for what no kernel takes."""
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        raise TypeError("a bool must be a constant")
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"no kernel takes a {type(value).__name__}")


def to_linalg(kernel: Any, variant: Variant) -> str:
    """The linalg MLIR of a variant.

    Raises RuntimeError with the compiler's message where a construct has no lowering.
    """
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget("npu", ARCH, 0)
    backend = make_backend(target)
    source = ASTSource(fn=kernel, signature=dict(variant.signature), constants=dict(variant.constants))
    options = backend.parse_options(dict(source.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"target": target, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    try:
        lowered: str = stages["ttadapter"](stages["ttir"](module, metadata), metadata)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{kernel.__name__}: {error.stderr.decode(errors='replace')[-2000:]}") from error
    return lowered
