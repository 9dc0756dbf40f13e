"""Filling the model from a ModelSlim checkpoint: as the released one (:mod:`k3_core.vllm.serving.loading`), but for the
tensors of int4 matrices, which go to the experts' stores; shared experts are a block of one expert."""

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


class Int4Destinations(Destinations):
    """Destinations with int4 shared experts, by the name of their block."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[str, RoutedExperts] = {}

    def wants(self, name: str) -> bool:
        """Whether this rank and pipeline stage has a place for the tensor."""
        shared = _SHARED.match(name)
        return bool(shared and shared[1] in self.shared) or super().wants(name)

    def put(self, name: str, part: Tensor) -> None:
        """Copy a part to its place. Raises CheckpointError, naming the tensor, for what cannot be the values."""
        shared = _SHARED.match(name)
        try:
            if shared and shared[1] in self.shared:
                self.shared[shared[1]].put(0, _MATRIX[shared[2]], shared[3], part)
            else:
                super().put(name, part)
        except CheckpointError as error:
            # An expert is converted when its last tensor has come, which is this one.
            raise CheckpointError(f"{name.rsplit('.', 2)[0] if '.experts.' in name else name}: {error}") from None

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
