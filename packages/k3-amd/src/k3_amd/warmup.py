"""The variants of this wheel's kernels that serving can meet; how they are met: :mod:`k3_core.vllm.serving.warmup`.

The kernels' profiles name the token counts at which a tile changes; rows and heads of the step kernels are numbers of
one variant. A prompt cut into several segments is met whatever the cost model would do with the lengths tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from k3_amd import dispatch
from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.warmup import Limits, WarmUp

__all__ = ["WARM_UP", "Limits"]

#: Chunks of this many tokens are the unit in which a prompt is cut.
CHUNK = 64


def _plans(layer: KdaLayer, longest: int, device: torch.device) -> Iterator[Any]:
    """One prompt uncut, and cut into segments of one chunk."""
    if layer._prefill.name != dispatch.KERNEL:
        return
    from k3_amd.kernels.kda_prefill import plan_prefill

    for segment_chunks in (0, 1) if longest > 4 * CHUNK else (0,):
        yield plan_prefill([0, longest], layer.num_heads, device, dim=layer.head_dim, segment_chunks=segment_chunks)


WARM_UP = WarmUp(dispatch.warmup_profiles, plans=_plans)
