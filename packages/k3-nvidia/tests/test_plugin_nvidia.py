"""k3-nvidia's entry point: the suite that every wheel runs."""

from __future__ import annotations

import pytest

pytest.importorskip("packaging", reason="vLLM and its requirements bring it")

from k3_core.vllm.testing.suite_plugin import PluginSuite
from k3_nvidia import __version__, plugin


class TestPlugin(PluginSuite):
    plugin = plugin
    distribution, version, vendor = "k3-nvidia", __version__, "nvidia"
