"""Where the routed experts of one layer and rank live: in the layout of the implementation that computes with them."""

from __future__ import annotations

import torch

from k3_amd import dispatch
from k3_core.errors import ConfigError
from k3_core.operators import Implementation
from k3_core.vllm.serving.experts import RearrangedStore, ReleasedStore, Store


def make_store(
    implementation: Implementation, count: int, width: int, latent: int, quantised: bool, form: str | None = None
) -> Store:
    """Storage in the layout that ``implementation`` computes with; its kernels' layout pads the unpadded width.

    form: of the kernels' layout (``k3_experts``); None for the device's exact one. Raises ConfigError for a form where
    another implementation computes.
    """
    if implementation.name != dispatch.KERNEL:
        if form is not None:
            raise ConfigError(
                f"k3_experts {form!r} is a form of the Triton kernels' weights, and {implementation.name!r} computes "
                "the experts here; leave it out"
            )
        return ReleasedStore(count, width, latent, quantised)
    from k3_amd.kernels.experts_layout import empty_packed, pack_expert_

    return RearrangedStore(empty_packed(count, width, latent, torch.empty(0).device, form), pack_expert_)
