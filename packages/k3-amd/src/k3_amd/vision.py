"""Attention of the vision tower on AMD GPUs; the tower itself is shared (:mod:`k3_core.vllm.serving.vision`).

Where vLLM's switches enable aiter's attention and the installed aiter has it, all images of a step are one call;
otherwise PyTorch's fused attention takes one image at a time. Both keep items apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from k3_amd import aiter, platform
from k3_core.vllm.serving.vision import Attend, attend_by_item

logger = logging.getLogger("vllm.plugins.k3")


def choose_attention() -> tuple[Attend, str]:
    """(the tower's attention on this device, why)."""
    if not platform.on_rocm():
        return attend_by_item, "contract arithmetic on a CPU"
    if not aiter.enabled("mha"):
        return attend_by_item, "PyTorch's fused attention by image: vLLM's switches leave aiter's attention off"
    function, why = aiter.resolve(aiter.VISION)
    if function is None:
        return attend_by_item, f"PyTorch's fused attention by image: {why}"
    missing = aiter.missing_parameters(aiter.VISION, function)
    if missing:
        lacks = f"{aiter.VISION.name} of {why} lacks {', '.join(missing)}"
        return attend_by_item, f"PyTorch's fused attention by image: {lacks}"
    return varlen(function), f"{aiter.VISION.name} of {why}, all images at once"


def attention() -> Attend:
    """The tower's attention; the choice is logged."""
    chosen, why = choose_attention()
    logger.info("Kimi K3: vision attention: %s", why)
    return chosen


def varlen(function: Callable[..., Any]) -> Attend:
    """Attention inside each item through ``flash_attn_varlen_func``: full, scaled by D^-0.5."""

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
        longest = max(lengths)
        result = function(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=q.shape[-1] ** -0.5,
            causal=False,
        )
        attended: Tensor = result[0] if isinstance(result, tuple) else result
        return attended

    return attend
