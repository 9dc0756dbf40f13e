"""Kernels that are compiled after the warm-up: seen with their names, and refused where that was asked for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the module lives beside vLLM's helpers")

from k3_core.vllm.testing import compiling
from k3_core.vllm.testing.compiling import LateCompilationError, Watch


class Kernels:
    """In the place of Triton's JITFunction."""

    def __init__(self, module: str, name: str) -> None:
        self.fn = SimpleNamespace(__module__=module, __name__=name)

    def _do_compile(self, key: str, warmup: bool = False) -> str:
        return f"binary {key}"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A second compiler: a module with a function that builds."""
    monkeypatch.setattr(compiling, "_jit_function", lambda: Kernels)
    module: Any = ModuleType("wheel.other")
    module.build = lambda size: size + 1
    monkeypatch.setitem(sys.modules, "wheel.other", module)
    return module


def test_every_compilation_of_the_wheel_is_noted(fake: Any) -> None:
    watch = Watch("wheel", ["wheel.other:build", "wheel.missing:build"])
    ours, theirs = Kernels("wheel.kernels.kda", "decode"), Kernels("vllm.ops", "decode")
    assert ours._do_compile("a") == "binary a"
    ours._do_compile("b", warmup=True)
    theirs._do_compile("c")
    assert fake.build(1) == 2
    assert watch.take() == ["wheel.kernels.kda.decode"] * 2 + ["wheel.other.build"]
    assert watch.take() == []
    watch.stop()
    ours._do_compile("d")
    fake.build(1)
    assert watch.take() == []


def test_a_late_compilation_raises_where_it_is_forbidden(fake: Any) -> None:
    watch = Watch("wheel", ["wheel.other:build"])
    watch.forbid()
    with pytest.raises(LateCompilationError, match=r"wheel\.kernels\.kda\.decode is compiled after the warm-up"):
        Kernels("wheel.kernels.kda", "decode")._do_compile("a")
    with pytest.raises(LateCompilationError, match=r"wheel\.other\.build"):
        fake.build(1)
    assert Kernels("vllm.ops", "decode")._do_compile("a") == "binary a"
    watch.forbid(False)
    assert fake.build(1) == 2
    watch.stop()


def test_triton_has_the_function_that_is_watched() -> None:
    triton = pytest.importorskip("triton")
    assert hasattr(triton.runtime.jit.JITFunction, "_do_compile"), triton.__version__
