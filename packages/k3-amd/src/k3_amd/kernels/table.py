"""This wheel's kernels as implementations of the operator table, ready for a registry."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from k3_amd.kernels import attn_res, experts, kda_prefill, kda_step, router, situ, state_copy
from k3_core.operators import Implementation

NAME = "triton"
PRIORITY = 10

_OPERATORS: tuple[tuple[str, ModuleType], ...] = (
    ("attn_res", attn_res),
    ("short_conv", kda_prefill),
    ("kda_prefill", kda_prefill),
    ("gated_norm", kda_prefill),
    ("kda_decode", kda_step),
    ("kda_verify", kda_step),
    ("route", router),
    ("experts", experts),
    ("situ", situ),
    ("state_gather", state_copy),
    ("state_scatter", state_copy),
)


def _implementation(name: str, module: ModuleType) -> Implementation:
    more: dict[str, Any] = {"prepare": module.prepare} if name == "experts" else {}
    function: Callable[..., Any] = getattr(module, name)
    return Implementation(
        name, NAME, function, module.supports, priority=PRIORITY, warmup_profiles=module.warmup_profiles, **more
    )


IMPLEMENTATIONS: dict[str, Implementation] = {name: _implementation(name, module) for name, module in _OPERATORS}
