"""The variants of this wheel's kernels that serving can meet; how they are met: :mod:`k3_core.vllm.serving.warmup`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.warmup import Limits, WarmUp
from k3_nvidia import dispatch
from k3_nvidia.tuning import kda as tuning

__all__ = ["WARM_UP", "Limits"]


def _edges() -> dict[str, list[int]]:
    if importlib.util.find_spec("triton") is None:
        return {}
    from k3_nvidia.kernels import glue

    return {"attn_res": sorted(_attn_res_edges()), "glue": glue.row_edges()}


def _multiprocessors() -> int:
    from k3_nvidia.tuning import attn_res

    here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return attn_res.multiprocessors(here)


def _attn_res_edges() -> Iterator[int]:
    from k3_nvidia.tuning import attn_res

    for max_tokens, _, config in attn_res._table():
        if max_tokens < 1 << 20:
            yield max_tokens
        if config.programs:  # beyond one token a program rows are loaded ahead
            yield config.programs * _multiprocessors()


def _more_plans(layer: KdaLayer, longest: int, device: torch.device) -> Iterator[Any]:
    """One chunk a segment, and each prefill implementation whichever the measurements favour for these lengths."""
    if layer._prefill.name != dispatch.KERNEL:
        return
    from k3_nvidia.kernels import kda_flash
    from k3_nvidia.kernels.kda_plan import CHUNKS, FLASH, plan_prefill

    heads, dim = layer.num_heads, layer.head_dim
    if longest > 4 * 64:
        yield plan_prefill([0, longest], heads, device, dim=dim, segment_chunks=1)
    # The layer's dtype, not the default one: that is the model's only while the model is being built.
    if not kda_flash.refusal(dim, layer.dtype, layer.get_state_dtype()[1], layer.lower_bound):
        for engine in (CHUNKS, FLASH):
            yield plan_prefill([0, longest], heads, device, dim=dim, engine=engine)


def _few_rows(text_model: Any) -> None:
    if dispatch.device()[0] == "cuda":
        from k3_nvidia import few_rows

        few_rows.warm_up(text_model)


def _only_our_experts(text_model: Any) -> bool:
    """A library's experts would read the ids that our router has not written yet."""
    layers = [layer for _, layer in text_model.model.own_layers() if layer.is_moe]
    return all(layer.feed_forward.operator.name == dispatch.KERNEL for layer in layers)


# No kernel is specialised on a token count, as test_nvidia_warmup.py finds by trying all of them.
WARM_UP = WarmUp(
    dispatch.warmup_profiles, _edges, tuning.step_rows, _more_plans, _few_rows, _only_our_experts, by_number=False
)


def run(text_model: Any) -> None:
    """Meet every variant once: this wheel's operators, then the products for few rows."""
    WARM_UP.run(text_model)
