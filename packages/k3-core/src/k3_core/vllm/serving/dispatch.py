"""Which implementation of each operator runs here, and why: what every vendor's ``dispatch`` module is made of.

On an accelerator every operator has a kernel of the vendor's wheel or a library's; there is no fall-back to the
contracts, which would be right and thousands of times too slow. On a CPU (``K3_IMPL=<vendor>`` in tests) the contracts
stand in for the kernels and everything else is the real thing.

Layers ask once, while they are built, with the sizes they will use; the answer with every refusal is logged once and
given by :meth:`Dispatch.report`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch

from k3_core.operators import CallSpec, Choice, Implementation, Registry

logger = logging.getLogger("vllm.plugins.k3")

CONTRACT = "contract"
OPERATORS = (
    "attn_res", "short_conv", "kda_prefill", "gated_norm", "kda_decode", "kda_verify", "route", "experts", "situ",
)  # fmt: skip

#: How a layer asks: (operator, dtype, sizes, options, want) -> implementation.
Choose = Callable[..., Implementation]


def contracts_only_on_cpu(spec: CallSpec) -> tuple[bool, str]:
    """The contracts run where no kernel can: on a CPU."""
    if spec.device == "cpu":
        return True, f"{spec.operator}: contract arithmetic on a CPU"
    return False, f"{spec.operator}: contract arithmetic is for CPUs; on {spec.device} a kernel must support the call"


class Dispatch:
    """The registry of one wheel and the choices made in this process.

    kernels: gives the wheel's implementations; those whose compiler is not installed are left out by it.
    device: gives (device type, architecture) of this process.
    """

    def __init__(self, kernels: Callable[[], Iterable[Implementation]], device: Callable[[], tuple[str, str]]) -> None:
        self._kernels, self._device = kernels, device
        self._said: dict[str, str] = {}

    @cached_property
    def registry(self) -> Registry:
        """All implementations: the wheel's, and the contracts for CPUs."""
        from k3_core.operators import contract

        result = Registry()
        for implementation in self._kernels():
            result.register(implementation)
        for name, implementation in contract.IMPLEMENTATIONS.items():
            result.register(
                Implementation(name, CONTRACT, implementation.function, contracts_only_on_cpu, priority=-10)
            )
        return result

    def choose(
        self,
        name: str,
        dtype: torch.dtype,
        sizes: Mapping[str, int],
        options: Mapping[str, Any] | None = None,
        want: str | None = None,
    ) -> Implementation:
        """The implementation of ``name`` for these sizes on this device.

        sizes: symbols of the operator table to numbers. options: what else decides (state_dtype, hidden_act, ...).
        Raises UnsupportedError that lists every candidate's refusal.
        """
        where, arch = self._device()
        spec = CallSpec(name, where, dtype, arch, dict(sizes), dict(options or {}))
        choice: Choice = self.registry.choose(spec, want)
        line = choice.explain()
        if self._said.get(name) != line:
            self._said[name] = line
            logger.info("Kimi K3: %s", line)
        return choice.implementation

    def report(self) -> list[str]:
        """What was chosen in this process so far, one line an operator."""
        return [self._said[name] for name in sorted(self._said)]

    def warmup_profiles(self, config: Any, limits: Any) -> dict[str, list[Any]]:
        """Every kernel variant that serving can meet, by ``operator/implementation``.

        limits: an object with max_num_batched_tokens, max_num_seqs and num_spec.
        """
        profiles = {}
        for name in OPERATORS:
            for implementation in self.registry.implementations(name):
                if implementation.warmup_profiles is not None:
                    variants = implementation.warmup_profiles(config, limits)
                    profiles[f"{name}/{implementation.name}"] = list(variants)
        return profiles
