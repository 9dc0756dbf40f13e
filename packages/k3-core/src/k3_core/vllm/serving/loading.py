"""Filling the model from a checkpoint that was verified first, every tensor straight to its final place.

vLLM's loader finds the shards, or downloads them; ``k3_core.checkpoint`` compares every header with the table of
tensors that the configuration implies before it reads the first weight, cuts each tensor to this rank's part while it
is still a mapped file, and refuses NaN scales as they pass. Routed experts go to the layout of their kernel one by one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from k3_core.checkpoint import CheckpointReader, Topology
from k3_core.checkpoint.slicing import Shard, shard_plan
from k3_core.config import K3Config
from k3_core.errors import CheckpointError
from k3_core.vllm import compat
from k3_core.vllm.serving.experts import RoutedExperts, release_staging

_EXPERT = re.compile(r"(.*\.block_sparse_moe)\.experts\.(\d+)\.(w[123])\.(\w+)$")


#: Opens a checkpoint in another form than the released one: folder -> (verified reader, parts of this rank).
Source = Callable[[Path], tuple[CheckpointReader, dict[str, Shard]]]


class Destinations:
    """Where this rank's part of every tensor goes: plain destinations by released name, and layers with experts."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.experts: dict[str, RoutedExperts] = {}
        self._filled: set[str] = set()

    def add(self, prefix: str, parts: Iterable[tuple[str, Tensor]]) -> None:
        """Take destinations under a prefix of the released names (``""`` or ``"model."``)."""
        for name, destination in parts:
            self.tensors[prefix + name] = destination.detach()

    def wants(self, name: str) -> bool:
        """Whether this rank and pipeline stage has a place for the tensor."""
        expert = _EXPERT.match(name)
        if expert:
            block = self.experts.get(expert[1])
            return block is not None and int(expert[2]) in block.ids
        return name in self.tensors

    def put(self, name: str, part: Tensor) -> None:
        """Copy a part to its place. Raises CheckpointError where the shapes differ."""
        expert = _EXPERT.match(name)
        if expert:
            block, index, matrix, kind = expert.groups()
            self.experts[block].put(int(index), matrix, kind, part)
            return
        destination = self.tensors[name]
        if destination.shape != part.shape:
            raise CheckpointError(
                f"{name}: this rank's part has shape {list(part.shape)}, its place {list(destination.shape)}"
            )
        destination.copy_(part)
        self._filled.add(name)

    def missing(self) -> list[str]:
        """Names whose place was not filled."""
        plain = sorted(self.tensors.keys() - self._filled)
        return plain + [f"{block}.experts.{i}" for block, experts in self.experts.items() for i in experts.missing()]


def load(
    model: nn.Module,
    destinations: Destinations,
    config: K3Config,
    weights: Iterable[tuple[str, Tensor]],
    model_config: Any,
    topology: Topology,
    padded_columns: dict[str, int] | None = None,
    source: Source | None = None,
) -> set[str]:
    """Fill ``destinations`` from the checkpoint of ``model_config``.

    Args:
        model: for the names of its parameters, all of which are loaded afterwards.
        destinations: what this rank and pipeline stage holds.
        config: what the checkpoint must hold.
        weights: vLLM's own iterator; its first step downloads what is not there yet, its tensors are not used.
        model_config: vLLM's, for the place of the checkpoint.
        topology: this rank's place.
        padded_columns: not cut by ``shard_plan`` but here: name -> rows of this rank (the up-projection of form (c)).
        source: folder -> (reader, parts of this rank), for a checkpoint whose tensors are not the released ones.

    Returns:
        The names of all parameters.

    Raises:
        CheckpointError: a shard or tensor is missing, unknown, damaged, or of the wrong shape or dtype; one message.
    """
    next(iter(weights), None)
    started = time.monotonic()
    folder = compat.checkpoint_folder(model_config)
    if source is None:
        reader, plan = CheckpointReader(folder, config), shard_plan(config, topology)
    else:
        reader, plan = source(folder)
    for name, rows in (padded_columns or {}).items():
        plan[name] = Shard(0, ((topology.tp_rank * rows, (topology.tp_rank + 1) * rows),))
    taken = 0
    try:
        for name, part in reader.tensors(plan, wanted=destinations.wants, progress=topology.tp_rank == 0):
            destinations.put(name, part)
            taken += part.numel() * part.element_size()
    finally:
        release_staging()
    missing = destinations.missing()
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(f"the checkpoint left places of this model empty: {shown}")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    _say(taken, time.monotonic() - started)
    return {name for name, _ in model.named_parameters()}


def _say(taken: int, seconds: float) -> None:
    import logging

    logging.getLogger("vllm.plugins.k3").info(
        "Kimi K3: loaded %.2f GiB of this rank's weights in %.1f s", taken / 2**30, seconds
    )


def modules_of(model: nn.Module, kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """All modules of a class with their paths."""
    for name, module in model.named_modules():
        if isinstance(module, kind):
            yield name, module
