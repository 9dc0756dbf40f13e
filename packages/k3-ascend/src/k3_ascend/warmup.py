"""Compiling every Triton variant that serving can meet, before the first request.

It happens in vLLM's own profiling run, the first forward pass of a model, so its memory is accounted for.
``K3_WARMUP=0`` leaves compilation to first use: a faster start with a cold cache, and slow first requests.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch

from k3_ascend import dispatch
from k3_core.vllm.serving.warmup import Limits

logger = logging.getLogger("vllm.plugins.k3")


@torch.no_grad()
def run(text_model: Any) -> int:
    """Run every profile of the chosen kernels once; returns how many. Nothing where no Triton kernel is used."""
    ready, why = dispatch.triton_ready()
    if not ready:
        logger.info("Kimi K3: nothing to compile (%s)", why)
        return 0
    if os.environ.get("K3_WARMUP", "1") == "0":
        logger.info("Kimi K3: K3_WARMUP=0, kernels are compiled when they are first used")
        return 0
    from k3_ascend.kernels.warmup import run_profile

    started, count = time.monotonic(), 0
    profiles = dispatch.warmup_profiles(text_model.config, Limits.of(text_model.vllm_config))
    for variants in profiles.values():
        for profile in variants:
            run_profile(**profile)
            count += 1
    logger.info("Kimi K3: %d kernel variants compiled or loaded in %.1f s", count, time.monotonic() - started)
    return count
