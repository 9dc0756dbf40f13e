"""Where the routed experts of one layer and rank live: in the layout of the implementation that computes with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_amd import dispatch
from k3_core.operators import Implementation
from k3_core.vllm.serving.experts import ReleasedStore, Store


class PackedStore:
    """MXFP4 codes in the layout of this wheel's kernels, which pads the width: once, and from the unpadded width."""

    def __init__(self, count: int, width: int, latent: int) -> None:
        from k3_amd.kernels.experts_layout import empty_packed

        self._experts = empty_packed(count, width, latent, torch.empty(0).device)

    def put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        """Re-arrange one expert into its place."""
        from k3_amd.kernels.experts_layout import pack_expert_

        device = self._experts.w13.device
        moved = {key: part.to(device, non_blocking=True) for key, part in parts.items()}
        matrices = [(moved[name, "weight_packed"], moved[name, "weight_scale"]) for name in ("w1", "w3", "w2")]
        pack_expert_(self._experts, index, *matrices)

    def weights(self) -> Any:
        """The packed experts."""
        return self._experts

    def tensors(self) -> dict[str, Tensor]:
        """Codes and scales."""
        e = self._experts
        return {"w13": e.w13, "s13": e.s13, "w2": e.w2, "s2": e.s2}


def make_store(implementation: Implementation, count: int, width: int, latent: int, quantised: bool) -> Store:
    """Storage in the layout that ``implementation`` computes with."""
    if implementation.name == dispatch.KERNEL:
        return PackedStore(count, width, latent)
    return ReleasedStore(count, width, latent, quantised)
