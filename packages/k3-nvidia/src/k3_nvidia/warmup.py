"""The variants of this wheel's kernels that serving can meet; how they are met: :mod:`k3_core.vllm.serving.warmup`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.warmup import Limits, WarmUp
from k3_nvidia import dispatch
from k3_nvidia.tuning import kda as tuning

__all__ = ["WARM_UP", "Limits"]


def _attn_res_edges() -> Iterator[int]:
    from k3_nvidia.tuning import attn_res

    for max_tokens, _, config in attn_res._table():
        if max_tokens < 1 << 20:
            yield max_tokens
        if config.programs and torch.cuda.is_available():  # from here on rows are loaded ahead
            yield config.programs * attn_res.multiprocessors(torch.device("cuda", torch.cuda.current_device()))


def _segments_of_one_chunk(layer: KdaLayer, longest: int, device: torch.device) -> Iterator[Any]:
    if layer._prefill.name == dispatch.KERNEL and longest > 4 * 64:
        from k3_nvidia.kernels.kda_plan import plan_prefill

        yield plan_prefill([0, longest], layer.num_heads, device, dim=layer.head_dim, segment_chunks=1)


WARM_UP = WarmUp(dispatch.warmup_profiles, _attn_res_edges, tuning.step_rows, _segments_of_one_chunk)


def run(text_model: Any) -> None:
    """Meet every variant once: this wheel's operators, then the products for few rows."""
    WARM_UP.run(text_model)
    if os.environ.get("K3_WARMUP", "1") != "0" and dispatch.device()[0] == "cuda":
        from k3_nvidia import few_rows

        few_rows.warm_up(text_model)
