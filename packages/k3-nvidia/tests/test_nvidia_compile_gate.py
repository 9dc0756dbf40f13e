"""No kernel without a compile gate: each has a line in one of the scripts that compile ahead of time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parent / "src" / "k3_nvidia" / "kernels"
#: A kernel of Triton or Gluon that is launched (device functions have other names), or the function that builds one of
#: the CuTe DSL.
LAUNCHED = re.compile(r"^@(?:triton|gluon)\.jit[^\n]*\n(?:[^\n]*\n)??def (_?\w+_kernel)\(", re.MULTILINE)
BUILT = re.compile(r"^def (build)\(", re.MULTILINE)


def launched(text: str) -> list[str]:
    """Names of the kernels in a source."""
    found = LAUNCHED.findall(text)
    return found + (BUILT.findall(text) if "@cute.kernel" in text else [])


KNOWN = [(path.stem, name) for path in sorted(KERNELS.glob("*.py")) for name in launched(path.read_text())]


def test_the_kernels_are_found() -> None:
    modules = {module for module, _ in KNOWN}
    assert {"attn_res", "experts_gemm", "glue", "kda_chunk", "kda_step", "moe_repack", "skinny_cute_kernel"} <= modules
    assert launched("@triton.jit\ndef a_kernel(x):\n    pass\n\n\n@triton.jit\ndef _helper(x):\n") == ["a_kernel"]
    assert launched('@triton.jit(do_not_specialize=["n"])\ndef b_kernel(x):\n') == ["b_kernel"]


@pytest.mark.parametrize(("module", "name"), KNOWN, ids=[f"{module}.{name}" for module, name in KNOWN])
def test_a_kernel_is_compiled_ahead_of_time(module: str, name: str) -> None:
    scripts = "\n".join(path.read_text() for path in sorted(HERE.glob("*_aot.py")))
    assert f"{module}.{name}" in scripts, f"{module}.{name} has no line in tests/*_aot.py"
