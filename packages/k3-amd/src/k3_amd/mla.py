"""MLA on AMD GPUs: the shared layer over vLLM's ROCm backends, with as many heads as the backend takes.

vLLM chooses the backend: aiter's where ``VLLM_ROCM_USE_AITER`` enables it, else its Triton backend. The Triton kernels
mask the heads of a block and take any number. aiter's decode kernels take multiples of 16; a rank of K3 has 12 heads at
TP8 and 6 at TP16. vLLM 0.33 pads such queries inside its backend; an older or changed one refuses them or, what is
worse, repeats heads wrongly. So its padding is tried on numbered heads, once, on the CPU: where every head comes back
as itself vLLM pads, where not this layer does, with zero heads up to the next multiple of 16 that are cut off behind
the call.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from k3_amd import aiter, platform
from k3_core.config import TextConfig
from k3_core.vllm.serving.mla_layer import LatentAttention

logger = logging.getLogger("vllm.plugins.k3")

#: aiter's decode kernels work on blocks of this many heads.
HEAD_BLOCK = 16


class KimiLatentAttention(LatentAttention):
    """MLA over a ragged batch, with its latent rows in vLLM's cache."""

    def __init__(self, text: TextConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__(text, vllm_config, prefix, padded=lambda heads: attention_heads(heads))


@functools.cache
def attention_heads(heads: int) -> int:
    """How many heads vLLM's attention is given for ``heads`` of this rank."""
    count, why = choose_heads(heads)
    logger.info("Kimi K3: MLA with %d heads a rank: %s", heads, why)
    return count


def choose_heads(heads: int) -> tuple[int, str]:
    """(heads to hand over, why)."""
    if not platform.on_rocm():
        return heads, "handed over as they are, the attention takes any number"
    if not aiter.enabled("mla"):
        return heads, "handed over as they are, vLLM's Triton backend takes any number"
    if heads % HEAD_BLOCK == 0:
        return heads, f"handed over as they are, aiter takes multiples of {HEAD_BLOCK}"
    wrong = padding_fault(heads)
    if wrong is None:
        return heads, "padded by vLLM's aiter backend"
    padded = -(-heads // HEAD_BLOCK) * HEAD_BLOCK
    return padded, f"padded here to {padded} with zero heads ({wrong})"


def padding_fault(heads: int) -> str | None:
    """What is wrong with the padding of vLLM's aiter backend for ``heads`` heads; None where each comes back."""
    try:
        from vllm.v1.attention.backends.mla.rocm_aiter_mla import AiterMLAHelper as Helper

        Helper.check_num_heads_validity(heads)
        numbered = torch.arange(1, heads + 1, dtype=torch.float32).view(1, heads, 1)
        padded = Helper.get_mla_padded_q(heads, numbered)
        back = Helper.get_mla_unpadded_o(heads, padded)
    except Exception as error:  # absent, renamed, or an assertion about the number of heads
        return f"vLLM's backend does not pad them: {type(error).__name__}: {error}"
    if padded.shape[1] % HEAD_BLOCK:
        return f"vLLM's backend pads them to {padded.shape[1]}"
    if not torch.equal(back, numbered):
        return "vLLM's backend gives other heads back"
    return None
