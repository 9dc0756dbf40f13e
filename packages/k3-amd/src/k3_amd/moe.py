"""Routed experts on AMD GPUs: the shared layer with this wheel's operators, expert layout and router product."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from k3_amd import dispatch
from k3_amd.experts_store import make_store
from k3_core.config import K3Config
from k3_core.contracts.moe import router_logits
from k3_core.vllm.serving.moe_layer import MoeLayer

logger = logging.getLogger("vllm.plugins.k3")


class MoE(MoeLayer):
    """A mixture-of-experts layer of one rank; the correction bias is fp32 from the file to the operator."""

    def __init__(self, config: K3Config, vllm_config: Any, prefix: str) -> None:
        store = functools.partial(make_store, form=wanted_form(vllm_config))
        super().__init__(config, vllm_config, prefix, dispatch.choose, store, logits)


def wanted_form(vllm_config: Any) -> str | None:
    """What ``--additional-config`` says of the experts' form (``k3_experts``); None for the device's exact one."""
    extra = vllm_config.additional_config
    return extra.get("k3_experts") if isinstance(extra, dict) else None


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Router logits fp32 [T, A] of x [T, H] and weight [A, H]: bfloat16 products, summed and left in fp32."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return router_logits(x, weight)
    if leaves_sums_unrounded(str(x.device)):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


@functools.cache
def leaves_sums_unrounded(device: str) -> bool:
    """Whether torch's product of bfloat16 matrices on ``device`` gives fp32 results; asked once, outside any graph.

    ROCm builds of torch took the argument up later than CUDA builds. Where it is missing the operands are widened.
    """
    probe = torch.full((16, 16), 1.0078125, dtype=torch.bfloat16, device=device)  # 1 + 2^-7: its square needs 15 bits
    try:
        product = torch.mm(probe, probe, out_dtype=torch.float32)
        ok = product.dtype == torch.float32 and product[0, 0].item() == 16 * 1.0078125**2
    except (RuntimeError, TypeError) as error:
        logger.info("Kimi K3: router products widen their operands to fp32 (torch.mm with out_dtype: %s)", error)
        return False
    if not ok:
        logger.info("Kimi K3: router products widen their operands to fp32 (torch.mm rounds its sums here)")
    return bool(ok)
