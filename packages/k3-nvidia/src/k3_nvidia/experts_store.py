"""Where the routed experts of one layer and rank live: in the layout of the implementation that computes with them."""

from __future__ import annotations

import torch

from k3_core.operators import Implementation
from k3_core.vllm.serving.experts import RearrangedStore, ReleasedStore, Store
from k3_nvidia import dispatch


def make_store(implementation: Implementation, count: int, width: int, latent: int, quantised: bool) -> Store:
    """Storage in the layout that ``implementation`` computes with; its kernels' layout pads the unpadded width."""
    if implementation.name != dispatch.KERNEL:
        return ReleasedStore(count, width, latent, quantised)
    from k3_nvidia.kernels.moe_layout import empty_swizzled, pack_expert_

    return RearrangedStore(empty_swizzled(count, width, latent, torch.empty(0).device), pack_expert_)
