"""A wheel's entry point: what it tells the arbitration, and that nothing it meets makes it raise."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest


class PluginSuite:
    """Needs neither vLLM nor a device; ``packaging`` only.

    Attributes:
        plugin: the wheel's plugin module.
        distribution, version, vendor: what it must say.
    """

    plugin: ClassVar[ModuleType]
    distribution: ClassVar[str]
    version: ClassVar[str]
    vendor: ClassVar[str]

    @pytest.fixture
    def wheels(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """The wheels that asked to be registered, instead of registering them."""
        from k3_core.vllm import registration

        seen: list[Any] = []
        monkeypatch.setattr(registration, "register", seen.append)
        return seen

    def test_it_describes_itself(self, wheels: list[Any]) -> None:
        self.plugin.register()
        (wheel,) = wheels
        assert (wheel.name, wheel.version, wheel.vendor) == (self.distribution, self.version, self.vendor)
        assert wheel.vllm == self.plugin.VLLM

    def test_its_contracts_fit_the_core_of_this_tree(self, wheels: list[Any]) -> None:
        from k3_core import CONTRACT_VERSION

        self.plugin.register()
        assert CONTRACT_VERSION in wheels[0].contracts

    def test_registering_twice_is_the_same_request(self, wheels: list[Any]) -> None:
        self.plugin.register()
        self.plugin.register()
        assert wheels[0] == wheels[1]

    def test_without_a_fitting_core_it_says_one_line(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("vllm", "vllm.plugins.k3"):
            monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setitem(sys.modules, "k3_core.vllm", None)
        self.plugin.register()
        # pytest also listens to loggers that don't propagate, as vLLM's once it is imported: a line may come twice.
        (line,) = {record.getMessage() for record in caplog.records}
        assert self.distribution in line
        assert "\n" not in line

    def test_importing_it_is_cheap(self) -> None:
        name = self.plugin.__name__
        program = f"import sys, {name}; assert not {{'torch', 'vllm', 'k3_core.vllm'}} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
