"""Which implementation each operator would use on this machine, and why not the others.

A vendor wheel publishes its implementations through the entry point group ``k3.operators``: an entry point named like
its vendor (``nvidia``, ``amd``, ``ascend``) that loads to a `k3_core.operators.Registry`, or to a function that returns
one without touching a device. k3-core's own contracts are what runs for ``reference``.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch

from k3_core.checkpoint import expert_width
from k3_core.config import K3Config
from k3_core.errors import UnsupportedError
from k3_core.operators import TABLE, CallSpec, Registry, Verdict

GROUP = "k3.operators"


@dataclass(frozen=True)
class OperatorChoice:
    """What one operator would use. ``chosen`` None: nothing fits. ``said``: (implementation, accepted, reason)."""

    operator: str
    chosen: str | None
    said: tuple[tuple[str, bool, str], ...]


def registries() -> tuple[dict[str, Registry], dict[str, str]]:
    """Vendor -> registry of every installed wheel that publishes one, and vendor -> why it could not be loaded."""
    found: dict[str, Registry] = {"reference": contracts()}
    failed: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            loaded: Any = entry.load()
            registry = loaded if isinstance(loaded, Registry) else loaded()
            if not isinstance(registry, Registry):
                raise TypeError(f"{entry.value} gives a {type(registry).__name__}, not a Registry")
            found[entry.name] = registry
        except Exception as error:  # a broken wheel must not stop the diagnosis of the others
            failed[entry.name] = f"{type(error).__name__}: {error}"
    return found, failed


def contracts() -> Registry:
    """k3-core's contracts as a registry."""
    from k3_core.operators.contract import IMPLEMENTATIONS

    registry = Registry()
    for implementation in IMPLEMENTATIONS.values():
        registry.register(implementation)
    return registry


def sizes(config: K3Config, tp: int) -> dict[str, int]:
    """The table's symbols for one rank of a model."""
    text, linear = config.text, config.text.linear_attn
    heads, dim = linear.num_heads // tp, linear.head_dim
    return {
        "N": heads, "D": dim, "K": dim, "V": dim, "C": 3 * heads * dim, "W": linear.short_conv_kernel_size,
        "P": linear.short_conv_kernel_size - 1, "Q": 1, "H": text.hidden_size, "E": text.num_experts,
        "A": text.num_experts, "X": text.num_experts_per_token, "L": text.expert_hidden_size,
        "I": expert_width(config, tp)[0],
    }  # fmt: skip


def choose_all(
    registry: Registry, config: K3Config, *, device: str, arch: str, tp: int, dtype: torch.dtype = torch.bfloat16
) -> list[OperatorChoice]:
    """The choice for every operator of the table that ``config`` uses, for one rank at ``tp``."""
    options = {
        "lower_bound": config.text.linear_attn.gate_lower_bound,
        "hidden_act": config.text.hidden_act,
        "state_dtype": torch.float32,
        "num_spec": 0,
        "quantised": config.quantization is not None,
        "num_expert_group": config.text.num_expert_group,
        "topk_group": config.text.topk_group,
    }
    chosen = []
    for name in TABLE:
        if name == "attn_res" and config.text.attn_res_block_size is None:
            continue
        spec = CallSpec(name, device, dtype, arch, sizes(config, tp), options)
        chosen.append(_choose(registry, name, spec))
    return chosen


def _choose(registry: Registry, name: str, spec: CallSpec) -> OperatorChoice:
    candidates = registry.implementations(name)
    said = tuple((i.name, *_verdict(i.supports(spec))) for i in candidates)
    try:
        return OperatorChoice(name, registry.choose(spec).implementation.name, said)
    except UnsupportedError:
        return OperatorChoice(name, None, said)


def _verdict(answer: tuple[bool, str]) -> tuple[bool, str]:
    verdict = Verdict(*answer)
    return verdict.ok, verdict.reason
