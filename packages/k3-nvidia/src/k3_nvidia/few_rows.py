"""Projections of a decode step: the layers' own products for few rows, by the kernel that the table names.

vLLM's linear layers stay what they are, weights included; only the function that multiplies is asked first whether a
measured kernel is faster at this row count (:mod:`k3_nvidia.tuning.skinny`). The decision is a list look-up on the
host by shapes that a CUDA graph fixes anyway: no synchronisation, and nothing at all where the table has no entry.

A product whose result another tensor is added to (the latent's up projection and the shared experts) adds it in the
same launch. ``K3_FEW_ROWS=0`` turns all of it off: every product is then the library's.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from k3_core.vllm.serving.reductions import Finish
from k3_nvidia.kernels.skinny_gemm import MAX_ROWS
from k3_nvidia.tuning import skinny as tuning

logger = logging.getLogger("vllm.plugins.k3")

#: (x, weight, tensor to add or None) -> product.
Product = Callable[..., Tensor]
#: vLLM's (layer, x, bias) -> product.
Apply = Callable[..., Tensor]


def _product_config(choice: tuning.Choice) -> Any:
    """The configuration of a table entry."""
    from k3_nvidia.kernels import skinny_cute, skinny_gemm

    return (skinny_cute if choice.kernel == "cute" else skinny_gemm).Config(**dict(choice.config))


@functools.cache
def _product(choice: tuning.Choice) -> Product:
    """The function of a table entry: (x, weight, residual or None) -> x W^T + residual."""
    config = _product_config(choice)
    if choice.kernel == "cute":
        from k3_nvidia.kernels import skinny_cute

        return lambda x, weight, residual=None: skinny_cute.skinny_cute(x, weight, config, residual)
    from k3_nvidia.kernels import skinny_gemm

    return lambda x, weight, residual=None: skinny_gemm.skinny_gemm(x, weight, config, residual)


def products(choices: list[tuning.Choice | None]) -> list[Product | None]:
    """Table entries as functions, by row count."""
    return [None if choice is None else _product(choice) for choice in choices]


class FewRows:
    """Stands before a linear layer's ``apply``: a measured kernel for 1..32 rows, else what was there before."""

    def __init__(self, usual: Apply, size: tuple[int, int], choices: list[tuning.Choice | None]) -> None:
        self.usual, self.size = usual, size
        self.products = products(choices)

    def __call__(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] as the layer's own method; operands that the kernels cannot take go to that."""
        product = None if bias is not None else self._fitting(layer, x)
        if product is None:
            return self.usual(layer, x, bias)
        return product(x, layer.weight)

    def add(self, layer: nn.Module, x: Tensor, residual: Tensor) -> Tensor | None:
        """x W^T + residual [T, N], rounded once; None where no measured kernel takes the operands."""
        product = self._fitting(layer, x)
        if product is None or residual.stride(-1) != 1 or residual.dtype != x.dtype:
            return None
        return product(x, layer.weight, residual)

    def _fitting(self, layer: nn.Module, x: Tensor) -> Product | None:
        rows = x.shape[0]
        product = self.products[rows] if rows <= MAX_ROWS and x.dim() == 2 else None
        if product is None:
            return None
        weight: Tensor = layer.weight  # type: ignore[assignment]
        aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        return product if aligned and weight.shape == self.size and x.dtype == weight.dtype else None


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

    Not with ``K3_FEW_ROWS=0``, and not where the user asked for another product: batch-invariant results or a linear
    backend by name.
    """
    if os.environ.get("K3_FEW_ROWS", "1") in ("", "0"):
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
    _install_sums(model)
    logger.info("Kimi K3: %d linear layers use measured kernels for up to %d rows", count, MAX_ROWS)
    return count


def _install_sums(model: nn.Module) -> None:
    """Let the experts' last product add the shared result, where the form of the reduction has it do so."""
    for module in model.modules():
        finish = getattr(module, "_finish", None)
        up = getattr(finish, "up", None)
        if getattr(module, "form", None) == "sharded":  # adds this rank's columns into the shared result in place
            continue
        if isinstance(finish, Finish) and up is not None and isinstance(up.quant_method.apply, FewRows):
            finish.add = functools.partial(up.quant_method.apply.add, up)


@torch.no_grad()
def warm_up(model: nn.Module) -> None:
    """Compile what the installed layers can meet: every size once at every row count."""
    seen = set()
    finishes = [getattr(module, "_finish", None) for module in model.modules()]
    ups: list[Any] = [finish.up for finish in finishes if isinstance(finish, Finish) and finish.add is not None]
    summed = {up.quant_method.apply.size for up in ups}
    for layer in model.modules():
        apply = getattr(getattr(layer, "quant_method", None), "apply", None)
        if not isinstance(apply, FewRows) or apply.size in seen:
            continue
        seen.add(apply.size)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        for rows in range(1, MAX_ROWS + 1):
            if apply.products[rows] is not None:
                x = torch.zeros(rows, apply.size[1], dtype=weight.dtype, device=weight.device)
                apply(layer, x)
                if apply.size in summed:
                    apply.add(layer, x, torch.zeros(rows, apply.size[0], dtype=weight.dtype, device=weight.device))
