"""k3-amd's entry point in vLLM: Kimi K3 on AMD GPUs."""

from __future__ import annotations

import logging

from k3_amd import __version__

#: Versions of k3-core's contracts (operator signatures, schedule, loaders) that this wheel was built against.
CONTRACTS = frozenset({1})
#: Releases of vLLM whose interfaces this wheel uses.
VLLM = ">=0.33,<0.34"


def register() -> None:
    """Register Kimi K3 with vLLM if this wheel is the one to act; cheap, idempotent, never raises."""
    try:
        from k3_core.vllm import registration, versions

        wheel = registration.Wheel(
            name="k3-amd",
            version=__version__,
            vendor="amd",
            models={},
            contracts=CONTRACTS,
            vllm=VLLM,
            transformers=versions.CORE_TRANSFORMERS,
        )
    except Exception as error:
        logging.getLogger("vllm.plugins.k3").error(
            "k3-amd %s does nothing: its k3-core is missing or does not fit (%s); reinstall both", __version__, error
        )
        return
    registration.register(wheel)
