"""k3-ascend's entry point: the suite that every wheel runs."""

from __future__ import annotations

import pytest

pytest.importorskip("packaging", reason="vLLM and its requirements bring it")

from k3_ascend import __version__, plugin
from k3_core.vllm.testing.suite_plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = plugin
    distribution, version, vendor = "k3-ascend", __version__, "ascend"
