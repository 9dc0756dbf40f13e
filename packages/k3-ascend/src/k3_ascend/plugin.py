"""k3-ascend's entry point in vLLM: Kimi K3 on Ascend NPUs.

vllm-ascend has a platform plugin (which makes the platform) and a general plugin (its models and loaders). Both may
run before or after this one: nothing here depends on the order, since the platform exists before any general plugin
runs, vllm-ascend registers no Kimi model, and its patches are applied by its workers.
"""

from __future__ import annotations

import logging

from k3_ascend import __version__

#: Versions of k3-core's contracts (operator signatures, schedule, loaders) that this wheel was built against.
CONTRACTS = frozenset({1})
#: Releases of vLLM whose interfaces this wheel uses.
VLLM = ">=0.23,<0.24"
#: Architecture -> what vLLM imports when such a model is loaded.
MODELS = {
    "KimiK3ForConditionalGeneration": "k3_ascend.model:KimiK3ForConditionalGeneration",
    "KimiLinearForCausalLM": "k3_ascend.model:KimiLinearForCausalLM",
}


def register() -> None:
    """Register Kimi K3 with vLLM if this wheel is the one to act; cheap, idempotent, never raises."""
    logger = logging.getLogger("vllm.plugins.k3")
    try:
        from k3_core.vllm import registration, versions

        wheel = registration.Wheel(
            name="k3-ascend",
            version=__version__,
            vendor="ascend",
            models=MODELS,
            contracts=CONTRACTS,
            vllm=VLLM,
            transformers=versions.CORE_TRANSFORMERS,
            config_hook="k3_ascend.limits:AscendHook",
        )
    except Exception as error:
        logger.error(
            "k3-ascend %s does nothing: its k3-core is missing or does not fit (%s); reinstall both", __version__, error
        )
        return
    registration.register(wheel)
