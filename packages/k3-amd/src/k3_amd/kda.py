"""KDA on AMD GPUs: the shared layer with this wheel's operators and the plan of its prefill kernels."""

from __future__ import annotations

from typing import Any

from k3_amd import dispatch
from k3_core.config import TextConfig
from k3_core.vllm.serving.kda_layer import KdaLayer


class KimiDeltaAttention(KdaLayer):
    """KDA over a ragged batch, with its states in vLLM's cache."""

    def __init__(self, text: TextConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__(text, vllm_config, prefix, dispatch.choose, _plan)


def _plan(*args: Any, **named: Any) -> Any:
    from k3_amd.kernels.kda_prefill import plan_prefill

    return plan_prefill(*args, **named)
