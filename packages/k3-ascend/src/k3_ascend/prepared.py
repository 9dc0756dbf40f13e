"""Weights in the form that the Triton kernels read, made once after loading and not in every step.

The kernels of attention residuals read norm * projection in fp32, those of the short convolution the taps by tap. A
launcher makes them where its caller has none; the layers of a model have them here, in buffers whose addresses stay the
same, as captured graphs need.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from k3_ascend import channels
from k3_core.operators import Implementation
from k3_core.vllm.serving.attn_res import Mix
from k3_core.vllm.serving.kda_layer import KdaLayer


@torch.no_grad()
def prepare(model: nn.Module) -> None:
    """Make or renew the prepared weights of every mix and KDA layer that a Triton kernel serves."""
    for module in model.modules():
        if isinstance(module, Mix):
            _prepare_mix(module)
        elif isinstance(module, KdaLayer):
            _prepare_kda(module)


def _prepare_mix(mix: Mix) -> None:
    if mix._operator.name != channels.TRITON:
        return
    from k3_ascend.kernels.attn_res import fold

    if _keep(mix, "folded", fold(mix.norm_weight, mix.proj_weight)):
        mix._operator = _given(mix._operator, "folded", lambda: mix.folded)


def _prepare_kda(layer: KdaLayer) -> None:
    served = [name for name in ("_short_conv", "_decode", "_verify") if getattr(layer, name).name == channels.TRITON]
    if not served:
        return
    from k3_ascend.kernels.short_conv import tap_major

    if _keep(layer, "taps", tap_major(layer.conv_weight)):
        for name in served:
            setattr(layer, name, _given(getattr(layer, name), "taps", lambda: layer.taps))


def _keep(module: nn.Module, name: str, values: Tensor) -> bool:
    """Hold ``values`` as a buffer; whether it is new."""
    if hasattr(module, name):
        getattr(module, name).copy_(values)
        return False
    module.register_buffer(name, values, persistent=False)
    return True


def _given(implementation: Implementation, name: str, value: Callable[[], Any]) -> Implementation:
    """The implementation with one more argument in every call."""
    function = implementation.function

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **named, **{name: value()})

    return dataclasses.replace(implementation, function=call)
