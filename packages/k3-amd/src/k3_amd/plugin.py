"""k3-amd's entry point in vLLM: Kimi K3 on AMD GPUs.

It acts on vLLM's ROCm platform, or where ``K3_IMPL=amd`` asks for it (on a CPU, for tests). The ROCm builds of vLLM are
not on the package index, so no requirement of this distribution names vLLM; its version is checked here, at run time.
"""

from __future__ import annotations

import logging

from k3_amd import __version__

#: Versions of k3-core's contracts (operator signatures, schedule, loaders) that this wheel was built against.
CONTRACTS = frozenset({1})
#: Releases of vLLM whose interfaces this wheel uses.
VLLM = ">=0.33,<0.34"
#: Architecture -> what vLLM imports when such a model is loaded.
MODELS = {
    "KimiK3ForConditionalGeneration": "k3_amd.model:KimiK3ForConditionalGeneration",
    "KimiLinearForCausalLM": "k3_amd.model:KimiLinearForCausalLM",
}


def register() -> None:
    """Register Kimi K3 with vLLM if this wheel is the one to act; cheap, idempotent, never raises."""
    try:
        from k3_core.vllm import registration, versions

        wheel = registration.Wheel(
            name="k3-amd",
            version=__version__,
            vendor="amd",
            models=MODELS,
            contracts=CONTRACTS,
            vllm=VLLM,
            transformers=versions.CORE_TRANSFORMERS,
            config_hook="k3_amd.limits:AmdHook",
        )
    except Exception as error:
        logging.getLogger("vllm.plugins.k3").error(
            "k3-amd %s does nothing: its k3-core is missing or does not fit (%s); reinstall both", __version__, error
        )
        return
    registration.register(wheel)


def diagnose() -> list[str]:
    """What `k3 doctor` adds on this wheel's platform: aiter's table, a line a symbol. Imports aiter if it can."""
    from k3_amd import aiter

    return aiter.installed()
