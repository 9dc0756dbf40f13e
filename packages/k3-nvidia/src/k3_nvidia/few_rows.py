"""Projections of a decode step: the layers' own products for few rows, by the kernel that the table names.

vLLM's linear layers stay what they are, weights included; only the function that multiplies is asked first whether a
measured kernel is faster at this row count (:mod:`k3_nvidia.tuning.skinny`). The decision is a list look-up on the
host by shapes that a CUDA graph fixes anyway: no synchronisation, and nothing at all where the table has no entry.

``K3_FEW_ROWS=1`` turns it on. The kernels are measured and right on an H200, one by one; the layers have not yet run
with them inside an engine there, and until they have, nobody meets them unasked.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from k3_nvidia.kernels.skinny_gemm import MAX_ROWS
from k3_nvidia.tuning import skinny as tuning

logger = logging.getLogger("vllm.plugins.k3")

Product = Callable[[Tensor, Tensor], Tensor]
#: vLLM's (layer, x, bias) -> product.
Apply = Callable[..., Tensor]


@functools.cache
def _product(choice: tuning.Choice) -> Product:
    """The function of a table entry: (x, weight) -> x W^T."""
    config: Any
    if choice.kernel == "cute":
        from k3_nvidia.kernels import skinny_cute

        config = skinny_cute.Config(**dict(choice.config))
        return lambda x, weight: skinny_cute.skinny_cute(x, weight, config)
    from k3_nvidia.kernels import skinny_gemm

    config = skinny_gemm.Config(**dict(choice.config))
    return lambda x, weight: skinny_gemm.skinny_gemm(x, weight, config)


class FewRows:
    """Stands before a linear layer's ``apply``: a measured kernel for 1..16 rows, else what was there before."""

    def __init__(self, usual: Apply, size: tuple[int, int], choices: list[tuning.Choice | None]) -> None:
        self.usual, self.size = usual, size
        self.products = [None if choice is None else _product(choice) for choice in choices]

    def __call__(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] as the layer's own method; operands that the kernels cannot take go to that."""
        rows = x.shape[0]
        product = self.products[rows] if rows <= MAX_ROWS and x.dim() == 2 else None
        if product is None or bias is not None:
            return self.usual(layer, x, bias)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        if not aligned or weight.shape != self.size or x.dtype != weight.dtype:
            return self.usual(layer, x, bias)
        return product(x, weight)


def _kernels() -> frozenset[str]:
    from k3_nvidia.kernels import skinny_cute

    return frozenset({"triton", "cute"} if skinny_cute.available()[0] else {"triton"})


def _linears(model: nn.Module) -> Iterator[Any]:
    """Layers whose weight is a plain [N, K] matrix of 16-bit floats."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for module in model.modules():
        if isinstance(module, LinearBase | ParallelLMHead) and isinstance(
            module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod
        ):
            weight = module.weight
            if weight.dim() == 2 and weight.dtype in (torch.bfloat16, torch.float16):
                yield module


def install(model: nn.Module, vllm_config: Any, device: str) -> int:
    """Put ``FewRows`` before every linear layer that the table of ``device`` names; returns how many.

    Only where ``K3_FEW_ROWS=1`` asks for it, and not where the user asked for another product: batch-invariant results
    or a linear backend by name.
    """
    if os.environ.get("K3_FEW_ROWS", "0") in ("", "0"):
        return 0
    if not tuning.measured(device) or os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        return 0
    if getattr(getattr(vllm_config, "kernel_config", None), "linear_backend", "auto") != "auto":
        return 0
    kernels, count = _kernels(), 0
    for layer in _linears(model):
        n, k = layer.weight.shape
        choices = tuning.choices(n, k, device, kernels)
        if any(choices):
            layer.quant_method.apply = FewRows(layer.quant_method.apply, (n, k), choices)
            count += 1
    logger.info("Kimi K3: %d linear layers use measured kernels for up to %d rows", count, MAX_ROWS)
    return count


@torch.no_grad()
def warm_up(model: nn.Module) -> None:
    """Compile what the installed layers can meet: every size once at every row count."""
    seen = set()
    for layer in model.modules():
        apply = getattr(getattr(layer, "quant_method", None), "apply", None)
        if not isinstance(apply, FewRows) or apply.size in seen:
            continue
        seen.add(apply.size)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        for rows in range(1, MAX_ROWS + 1):
            if apply.products[rows] is not None:
                apply(layer, torch.zeros(rows, apply.size[1], dtype=weight.dtype, device=weight.device))
