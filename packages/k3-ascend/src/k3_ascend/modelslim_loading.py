"""Filling the model from a ModelSlim checkpoint: as the released one (:mod:`k3_core.vllm.serving.loading`), but for the
tensors of int4 matrices, which go to the experts' stores (int4 shared experts are a block of one expert), and of int8
matrices, which become bfloat16 when the last of their tensors has come."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from k3_ascend import modelslim
from k3_core.checkpoint import CheckpointReader, Shard, Topology
from k3_core.config import K3Config
from k3_core.errors import CheckpointError
from k3_core.vllm.serving.experts import RoutedExperts
from k3_core.vllm.serving.loading import Destinations

_SHARED = re.compile(r"(.*\.block_sparse_moe\.shared_experts)\.(gate|up|down)_proj\.(\w+)$")
_MATRIX = {"gate": "w1", "up": "w3", "down": "w2"}


class ModelSlimDestinations(Destinations):
    """Destinations with int4 shared experts, by the name of their block, and of int8 matrices.

    layout: how the checkpoint is stored; None for one that ModelSlim did not make.
    """

    def __init__(self, layout: modelslim.Layout | None) -> None:
        super().__init__()
        self.shared: dict[str, RoutedExperts] = {}
        self._int8 = layout.int8 if layout is not None else frozenset()
        self._parts: dict[str, dict[str, Tensor]] = {}

    def _int8_weight(self, name: str) -> str | None:
        """The int8 matrix that the tensor belongs to."""
        stem, _, kind = name.rpartition(".")
        weight = f"{stem}.weight"
        return weight if weight in self._int8 and kind in modelslim.INT8_KINDS else None

    def wants(self, name: str) -> bool:
        """Whether this rank and pipeline stage has a place for the tensor."""
        weight = self._int8_weight(name)
        if weight is not None:
            return weight in self.tensors
        shared = _SHARED.match(name)
        return bool(shared and shared[1] in self.shared) or super().wants(name)

    def put(self, name: str, part: Tensor) -> None:
        """Copy a part to its place. Raises CheckpointError, naming the tensor, for what cannot be the values."""
        weight = self._int8_weight(name)
        if weight is not None:
            self._put_int8(weight, name, part)
            return
        shared = _SHARED.match(name)
        try:
            if shared and shared[1] in self.shared:
                self.shared[shared[1]].put(0, _MATRIX[shared[2]], shared[3], part)
            else:
                super().put(name, part)
        except CheckpointError as error:
            # An expert is converted when its last tensor has come, which is this one.
            raise CheckpointError(f"{name.rsplit('.', 2)[0] if '.experts.' in name else name}: {error}") from None

    def _put_int8(self, weight: str, name: str, part: Tensor) -> None:
        parts = self._parts.setdefault(weight, {})
        parts[name.rpartition(".")[2]] = part.clone()  # the mapped file may go away before the last one comes
        if len(parts) < len(modelslim.INT8_KINDS):
            return
        place = self.tensors[weight]
        moved = {kind: tensor.to(place.device) for kind, tensor in self._parts.pop(weight).items()}
        try:
            values = modelslim.dequantised(moved, place.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{weight}: {error}") from None
        super().put(weight, values)

    def missing(self) -> list[str]:
        """Names whose place was not filled."""
        return super().missing() + [block for block, experts in self.shared.items() if experts.missing()]


def source(
    config: K3Config, found: modelslim.Layout, topology: Topology
) -> Callable[[Path], tuple[CheckpointReader, dict[str, Shard]]]:
    """What opens the checkpoint: its headers are compared before the first weight is read."""

    def open_folder(folder: Path) -> tuple[CheckpointReader, dict[str, Shard]]:
        manifest = modelslim.verify(folder, config, found)
        return CheckpointReader(folder, config, manifest=manifest), modelslim.plan(config, found, topology)

    return open_folder
