"""k3-core's entry point in vLLM: the reference model, on CPU."""

from __future__ import annotations

from k3_core import CONTRACT_VERSION, __version__
from k3_core.vllm import versions
from k3_core.vllm.registration import Wheel
from k3_core.vllm.registration import register as _register

WHEEL = Wheel(
    name="k3-core",
    version=__version__,
    vendor="reference",
    models={
        "KimiK3ForConditionalGeneration": "k3_core.vllm.model:KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM": "k3_core.vllm.text_model:KimiLinearForCausalLM",
    },
    contracts=frozenset({CONTRACT_VERSION}),
    vllm=versions.CORE_VLLM,
    transformers=versions.CORE_TRANSFORMERS,
    config_hook="k3_core.vllm.limits:ReferenceHook",
)


def register() -> None:
    """Register the reference model when vLLM runs on a CPU (or ``K3_IMPL=reference``); never raises."""
    _register(WHEEL)
