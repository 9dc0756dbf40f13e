"""Two opaque operators for traced graphs: ``k3_ascend::kda_state_gather`` and ``k3_ascend::kda_state_scatter``.

A traced graph knows a layer by its name; at run time the operator finds the layer, and its sealed plan, in vLLM's
forward context. There is no registry. Fake implementations look at metadata only. The scatter declares that it mutates
the cache and returns nothing, so functionalisation keeps the write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_ascend.state_copy import layout, plan

_LIBRARY = torch.library.Library("k3_ascend", "FRAGMENT")
_LIBRARY.define(
    "kda_state_gather(Tensor cache, Tensor indices, Tensor? has_initial_state, str layer_name) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "kda_state_scatter(Tensor(a!) cache, Tensor indices, Tensor packed, str layer_name) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _binding(layer_name: str) -> plan.StateCopy:
    """The plan of a layer of the running forward pass. RuntimeError if the context has no such layer."""
    from vllm.forward_context import get_forward_context

    layer = get_forward_context().no_compile_layers.get(layer_name)
    if not isinstance(layer, plan.StateCopyLayer):
        raise RuntimeError(f"the forward context has no KDA layer {layer_name!r} (found {type(layer).__name__})")
    return plan.of(layer)


def _gather(cache: Tensor, indices: Tensor, has_initial_state: Tensor | None, layer_name: str) -> Tensor:
    return _binding(layer_name).launch_gather(cache, indices, has_initial_state)


def _scatter(cache: Tensor, indices: Tensor, packed: Tensor, layer_name: str) -> None:
    _binding(layer_name).launch_scatter(cache, indices, packed)


def _gather_fake(cache: Tensor, indices: Tensor, has_initial_state: Tensor | None, layer_name: str) -> Tensor:
    layout.check_metadata(cache, indices)
    layout.check_dense(cache)
    layout.check_flags(indices, has_initial_state)
    return torch.empty((indices.shape[0], *cache.shape[1:]), dtype=cache.dtype, device=cache.device)


def _scatter_fake(cache: Tensor, indices: Tensor, packed: Tensor, layer_name: str) -> None:
    layout.check_metadata(cache, indices)
    layout.check_dense(cache)
    layout.check_packed(cache, indices, packed)


_LIBRARY.impl("kda_state_gather", _gather, "CompositeExplicitAutograd")
_LIBRARY.impl("kda_state_scatter", _scatter, "CompositeExplicitAutograd")
torch.library.register_fake("k3_ascend::kda_state_gather", _gather_fake, lib=_LIBRARY)
torch.library.register_fake("k3_ascend::kda_state_scatter", _scatter_fake, lib=_LIBRARY)
