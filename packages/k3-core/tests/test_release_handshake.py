"""Vendor wheels beside an older and a newer k3-core: one line, nothing registered, nothing raised."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from k3_core import CONTRACT_VERSION
from k3_core.vllm import registration, versions
from k3_core.vllm.registration import Wheel

VENDORS = ("nvidia", "amd", "ascend")


@pytest.fixture(params=VENDORS)
def plugin(request: pytest.FixtureRequest) -> object:
    return pytest.importorskip(f"k3_{request.param}.plugin")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Wheel]:
    wheels: list[Wheel] = []
    monkeypatch.setattr(registration, "register", wheels.append)
    return wheels


@pytest.mark.parametrize("core", [CONTRACT_VERSION - 1, CONTRACT_VERSION + 1], ids=["older core", "newer core"])
def test_another_contract_version_is_refused_by_both_numbers(
    plugin: object, core: int, seen: list[Wheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()  # type: ignore[attr-defined]
    (wheel,) = seen
    monkeypatch.setattr(versions, "mismatch", lambda vllm, transformers: None)
    assert registration.refuse(wheel) in (None, "this release has no model yet")
    monkeypatch.setattr(registration, "CONTRACT_VERSION", core)
    reason = registration.refuse(wheel)
    assert reason is not None
    assert f"contract version {CONTRACT_VERSION}" in reason
    assert f"has version {core}" in reason
    assert "\n" not in reason


#: Cores a vendor may meet: one from before there was a room for vLLM, one without the class that describes a wheel, one
#: whose description asks for more than today's vendors say.
OTHER_CORES = {
    "older": {"__init__.py": "CONTRACT_VERSION = 0\n__version__ = '0.0.1'\n"},
    "without Wheel": {"vllm/registration.py": "", "vllm/versions.py": "CORE_TRANSFORMERS = ''\n"},
    "newer": {
        "vllm/registration.py": """
            class Wheel:
                def __init__(self, *, manifest): ...
            def register(wheel): raise AssertionError("must not be reached")
        """,
        "vllm/versions.py": "CORE_TRANSFORMERS = ''\n",
    },
}


@pytest.mark.parametrize("kind", OTHER_CORES)
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_core_with_another_interface_costs_one_line(vendor: str, kind: str, tmp_path: Path) -> None:
    module = importlib.util.find_spec(f"k3_{vendor}")
    if module is None or module.origin is None:
        pytest.skip(f"k3_{vendor} is not installed")
    for name, text in {"__init__.py": "", **OTHER_CORES[kind]}.items():
        path = tmp_path / "k3_core" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        if path.parent.name == "vllm":
            (path.parent / "__init__.py").touch()
    program = f"""
        import logging, sys
        sys.path[:0] = [{str(tmp_path)!r}, {str(Path(module.origin).parents[1])!r}]
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        from k3_{vendor} import plugin
        plugin.register()
        assert sys.modules["k3_core"].__file__.startswith({str(tmp_path)!r})
    """
    done = subprocess.run([sys.executable, "-I", "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"ERROR k3-{vendor} ")
    assert "does nothing" in line


def test_core_meets_itself() -> None:
    from k3_core.vllm.plugin import WHEEL

    assert CONTRACT_VERSION in WHEEL.contracts
    assert logging.getLogger("vllm.plugins.k3")
