"""The wheel that the shared suites of ``k3_core.vllm.testing`` test here, and its helpers by short names."""

from __future__ import annotations

from typing import Any

from k3_core.vllm.testing import ranks
from k3_core.vllm.testing.engine import Engine
from k3_core.vllm.testing.ranks import Group, bind_caches, fill, groups, one_prompt, run_ranks
from k3_core.vllm.testing.vendor import Vendor, random_prompts, settle

VENDOR = Vendor("nvidia", "k3_nvidia")
our_model = VENDOR.acting

__all__ = [
    "VENDOR", "Engine", "Group", "bind_caches", "build", "fill", "groups", "one_prompt", "our_model", "random_prompts",
    "run_ranks", "settle",
]  # fmt: skip


def build(vllm_config: Any, config: Any) -> Any:
    """The text model of the rank and stage that the current groups say, not loaded."""
    return ranks.build(VENDOR, vllm_config, config)
