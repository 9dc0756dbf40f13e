"""What the kernel tests share: the tools (or a clear reason), an executor, and kernels with a planted fault."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: Compiled kernels, shared by the workers of one machine; the same text is built once.
BUILD = Path(tempfile.gettempdir()) / f"k3-ascend-kernels-{os.getuid()}"
MODULES = ("attn_res", "situ", "gated_norm", "mxfp4", "kda_gate", "short_conv", "kda_step", "kda_chunk", "kda_prefill")


def tools(name: str) -> ModuleType:
    """A module of ci/ascend_kernels, once everything that it calls is there.

    Skips with what is missing, and fails instead where K3_REQUIRE_TOOLS is set (CI): a check that silently does not run
    is none.
    """
    if not (ROOT / "ci" / "ascend_kernels").is_dir():
        pytest.skip("ci/ascend_kernels is not here: the kernel checks need the repository", allow_module_level=True)
    if str(ROOT / "ci") not in sys.path:
        sys.path.insert(0, str(ROOT / "ci"))
    for needed in ("execute", name):
        module = importlib.import_module(f"ascend_kernels.{needed}") if needed != "budget" else None
        reason = module.missing() if module is not None and hasattr(module, "missing") else ""
        if reason and os.environ.get("K3_REQUIRE_TOOLS"):
            pytest.fail(reason)
        if reason:
            pytest.skip(reason, allow_module_level=True)
    return importlib.import_module(f"ascend_kernels.{name}")


def executor(programs: int | None = None) -> Any:
    """A fresh executor over the shared folder."""
    return tools("execute").Executor(BUILD, programs)


def kernel_module(name: str) -> ModuleType:
    """A module of k3_ascend.kernels."""
    return importlib.import_module(f"k3_ascend.kernels.{name}")


@contextlib.contextmanager
def planted(module_name: str, old: str, new: str, folder: Path) -> Iterator[None]:
    """Every kernel of a module compiled from its source with ``old`` replaced by ``new``, wherever it is used."""
    module = kernel_module(module_name)
    source = Path(module.__file__ or "").read_text()
    assert source.count(old) >= 1, f"{module_name} does not contain {old!r}: the mutant is out of date"
    file = folder / f"mutant_{module_name}.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"mutant_{module_name}", file)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    original = {name: value for name, value in vars(module).items() if type(value).__name__ == "JITFunction"}
    changed: list[tuple[ModuleType, str, Any]] = []
    for name in MODULES:
        user = kernel_module(name)
        for attribute, value in list(vars(user).items()):
            if attribute.endswith("_kernel") and value is original.get(attribute):
                changed.append((user, attribute, value))
                setattr(user, attribute, getattr(mutant, attribute))
    try:
        yield
    finally:
        for user, attribute, value in changed:
            setattr(user, attribute, value)


def quietly(function: Callable[[], Any]) -> Any:
    """A call inside executing_with of a fresh executor."""
    with kernel_module("launch").executing_with(executor()):
        return function()
