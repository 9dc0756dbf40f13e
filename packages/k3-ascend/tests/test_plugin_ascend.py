"""k3-ascend's entry point: what it tells the arbitration, and that nothing it meets makes it raise."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from k3_ascend import __version__, plugin

pytest.importorskip("packaging", reason="vLLM and its requirements bring it")


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> list:
    """The wheels that asked to be registered, instead of registering them."""
    from k3_core.vllm import registration

    seen: list = []
    monkeypatch.setattr(registration, "register", seen.append)
    return seen


def test_it_describes_itself(wheels: list) -> None:
    plugin.register()
    (wheel,) = wheels
    assert (wheel.name, wheel.version, wheel.vendor) == ("k3-ascend", __version__, "ascend")
    assert wheel.vllm == plugin.VLLM


def test_its_contracts_fit_the_core_of_this_tree(wheels: list) -> None:
    from k3_core import CONTRACT_VERSION

    plugin.register()
    assert CONTRACT_VERSION in wheels[0].contracts


def test_registering_twice_is_the_same_request(wheels: list) -> None:
    plugin.register()
    plugin.register()
    assert wheels[0] == wheels[1]


def test_without_a_fitting_core_it_says_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("vllm", "vllm.plugins.k3"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    monkeypatch.setitem(sys.modules, "k3_core.vllm", None)
    plugin.register()
    # pytest also listens to loggers that don't propagate, as vLLM's does once it is imported: a line may come twice.
    (line,) = {record.getMessage() for record in caplog.records}
    assert "k3-ascend" in line
    assert "\n" not in line


def test_importing_it_is_cheap() -> None:
    program = "import sys, k3_ascend.plugin; assert not {'torch', 'vllm', 'k3_core.vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
