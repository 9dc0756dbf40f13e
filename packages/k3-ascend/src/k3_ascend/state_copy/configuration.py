"""The configuration that compiled kernels depend on, read when preparation begins and again when it is sealed.

Nothing here runs while serving: what was compiled stays compiled, and a scan of the environment costs time.
"""

from __future__ import annotations

import importlib.metadata
import os

import torch

PREFIXES = ("TRITON_", "ASCEND_", "CANN_", "TORCH_NPU_", "NPU_", "LLVM_")
NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")
#: Distributions that may own the package `triton`.
_TRITON = ("triton-ascend", "triton")


def snapshot() -> dict[str, str]:
    """Versions of torch and triton and the environment variables that a kernel compiler reads."""
    found = {k: v for k, v in os.environ.items() if k.startswith(PREFIXES) or k in NAMES}
    found["torch version"] = torch.__version__
    for name in _TRITON:
        try:
            found[f"{name} version"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def drift(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names whose value differs, appeared or vanished, sorted. Values are not told: they may be private."""
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
