"""Which implementation of each operator runs here, and why: this wheel's registry, filled from the table of channels.

How it is asked: :mod:`k3_core.vllm.serving.dispatch`. On an NPU the contracts are the last resort of every operator;
that they were chosen, and what refused before them, is logged as a warning.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from k3_ascend import channels, npu_ops
from k3_ascend.generation import Generation, of_build
from k3_core.operators import CallSpec, Implementation, Registry
from k3_core.vllm.serving.dispatch import Dispatch

logger = logging.getLogger("vllm.plugins.k3")

Supports = Callable[[CallSpec], tuple[bool, str]]

#: (operator, channel) -> launcher and capability, the kernels of this wheel apart.
_VENDOR: Mapping[tuple[str, str], tuple[Callable[..., Any], Supports]] = {
    ("route", channels.NPU): (npu_ops.route, npu_ops.route_supports),
    ("gated_norm", channels.NPU): (npu_ops.gated_norm, lambda spec: (True, "gated_norm: npu_rms_norm in fp32")),
    ("kda_decode", channels.C_ASCEND): (npu_ops.kda_decode, npu_ops.kda_decode_supports),
    ("short_conv", channels.C_ASCEND): (npu_ops.short_conv, npu_ops.short_conv_supports),
}
_warned: set[str] = set()


def registry() -> Registry:
    """All implementations of this wheel, best first."""
    return _dispatch.registry


@functools.cache
def generation() -> Generation:
    """The generation of this process's devices."""
    return of_build()


@functools.cache
def device() -> tuple[str, str]:
    """(device type, architecture) of this process: ("npu", "ascend910b") or ("cpu", "")."""
    from vllm.platforms import current_platform

    if getattr(current_platform, "device_type", None) != "npu":
        return "cpu", ""
    return "npu", generation().arch


def choose(
    name: str,
    dtype: torch.dtype,
    sizes: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
    want: str | None = None,
) -> Implementation:
    """The implementation of ``name`` on this device; see :meth:`k3_core.vllm.serving.dispatch.Dispatch.choose`."""
    chosen = _dispatch.choose(name, dtype, sizes, options, want)
    if chosen.name == channels.TORCH and name not in _warned:
        _warned.add(name)
        logger.warning("Kimi K3: %s runs in plain PyTorch, right but slow: %s", name, _line(name))
    return chosen


def report() -> list[str]:
    """What was chosen in this process so far, one line an operator."""
    return _dispatch.report()


def falls_back(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that plain PyTorch serves in this process (by what was chosen so far)."""
    return [name for name in names if f"{name} -> {channels.TORCH}" in _line(name)]


def warmup_profiles(config: Any, limits: Any) -> dict[str, list[Any]]:
    """Every kernel variant that serving can meet, by ``operator/implementation``."""
    return _dispatch.warmup_profiles(config, limits)


# ------------------------------------------------------------------------------------------------------ this wheel's


def _line(name: str) -> str:
    return next((line for line in _dispatch.report() if line.startswith(f"{name} ->")), "")


def _on_npu(name: str, channel: str, supports: Supports) -> Supports:
    """A capability that also asks for the device and for the table's row of its generation."""

    def asked(spec: CallSpec) -> tuple[bool, str]:
        if spec.device != "npu":
            return False, f"{name}: {channel} runs on npu tensors, not on {spec.device}"
        known = {g.arch: g for g in Generation}
        where = known.get(spec.arch)
        if where is None or channel not in channels.channels(name, where):
            return False, f"{name}: the table has no channel {channel} on {spec.arch or 'an unknown SoC'}"
        return supports(spec)

    return asked


def triton_ready() -> tuple[bool, str]:
    """Whether kernels can be launched: Triton with a driver for the NPU, as vLLM found at start-up."""
    from k3_ascend import kernels

    found, why = kernels.available()
    if not found:
        return found, why
    if importlib.util.find_spec("vllm") is None:
        return False, "vLLM, which looks for the driver, is not installed"
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return False, "Triton has no driver for an NPU here"
    return True, "Triton"


def _implementations() -> Iterable[Implementation]:
    from k3_core.operators import contract

    kernels: Mapping[str, Implementation] = {}
    ready, why = triton_ready()
    if ready:
        from k3_ascend import kernels as own

        kernels = own.implementations()
    for row in channels.ROWS:
        order = list(dict.fromkeys(c for g in Generation for c in row.channels[g]))
        for rank, channel in enumerate(order):
            priority = 100 - rank
            if channel == channels.TRITON:
                yield _kernel(row.operator, kernels.get(row.operator), why, priority)
            elif channel == channels.TORCH:
                yield Implementation(
                    row.operator,
                    channels.TORCH,
                    contract.IMPLEMENTATIONS[row.operator].function,
                    _on_npu(row.operator, channel, _last_resort),
                    priority,
                )
            elif (row.operator, channel) in _VENDOR:
                function, supports = _VENDOR[row.operator, channel]
                asked = _on_npu(row.operator, channel, supports)
                yield Implementation(row.operator, channel, function, asked, priority)


def _kernel(name: str, kernel: Implementation | None, why: str, priority: int) -> Implementation:
    """A Triton kernel, or an entry that says why there is none."""
    from k3_core.operators import contract

    def absent(spec: CallSpec) -> tuple[bool, str]:
        return False, f"{name}: no Triton kernel ({why})"

    if kernel is None:
        function = contract.IMPLEMENTATIONS[name].function
        return Implementation(name, channels.TRITON, function, _on_npu(name, channels.TRITON, absent), priority)
    asked = _on_npu(name, channels.TRITON, kernel.supports)
    profiles = kernel.warmup_profiles
    return Implementation(name, channels.TRITON, kernel.function, asked, priority, warmup_profiles=profiles)


def _last_resort(spec: CallSpec) -> tuple[bool, str]:
    return True, f"{spec.operator}: contract arithmetic in plain PyTorch"


_dispatch = Dispatch(_implementations, lambda: device())
