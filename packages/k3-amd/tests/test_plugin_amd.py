"""k3-amd's entry point: the suite that every wheel runs."""

from __future__ import annotations

import pytest

pytest.importorskip("packaging", reason="vLLM and its requirements bring it")

from k3_amd import __version__, plugin
from k3_core.vllm.testing.suite_plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = plugin
    distribution, version, vendor = "k3-amd", __version__, "amd"
