"""Bytes of weights that one rank holds, by part, from the tensor table and the slicing functions the loader uses.

A model has at most four kinds of layer (KDA or MLA, experts or dense), and all routed experts of a layer have the same
size, so one layer of each kind and one expert are enough: planning K3 takes milliseconds and no half a million names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from math import prod

from k3_core.checkpoint import TensorSpec, Topology, expert_range, expert_width, tensor_shard, tensor_table
from k3_core.checkpoint.names import layer_of
from k3_core.config import K3Config

#: The parts of a plan, in the order they are shown.
PARTS = ("routed experts", "attention", "shared and dense MLP", "embeddings", "vision", "replicated")

_EXPERT = re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.")
_LOW_RANK = re.compile(r"\.self_attn\.(?:f_a_proj|g_a_proj|q_a_|kv_a_|o_norm)")


def part_of(name: str) -> str:
    """The part of a plan that a tensor is counted in."""
    if _EXPERT.search(name):
        return "routed experts"
    if name.startswith(("vision_tower.", "mm_projector.")):
        return "vision"
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return "embeddings"
    if ".shared_experts." in name or ".mlp." in name:
        return "shared and dense MLP"
    if ".self_attn." in name and not _LOW_RANK.search(name):
        return "attention"
    return "replicated"


class WeightModel:
    """The weights of one configuration, ready to be asked for any topology and any run of layers."""

    def __init__(self, config: K3Config) -> None:
        self.config = config
        self._outside: dict[str, TensorSpec] = {}
        self._kinds: dict[tuple[str, bool], dict[str, TensorSpec]] = {}
        text = config.text
        first = {self._kind(i): i for i in reversed(range(text.num_hidden_layers))}
        layers = {i: kind for kind, i in first.items()}
        # The table of the first layers, up to the last kind to appear; nothing outside layers depends on their number.
        short = text.model_copy(update={"num_hidden_layers": max(layers) + 1})
        for name, spec in tensor_table(config.model_copy(update={"text": short})).items():
            layer = layer_of(name)
            if layer is None:
                self._outside[name] = spec
            elif layer in layers and ((expert := _EXPERT.search(name)) is None or expert[1] == "0"):
                self._kinds.setdefault(layers[layer], {})[name] = spec

    def _kind(self, i: int) -> tuple[str, bool]:
        return self.config.text.layer_kind(i), self.config.text.is_moe_layer(i)

    def rank_bytes(
        self,
        topology: Topology,
        layers: Iterable[int],
        *,
        first: bool = True,
        last: bool = True,
        floor: int = 256,
        expert: int | None = None,
    ) -> dict[str, int]:
        """Bytes by part of the rank at ``topology`` whose pipeline stage has ``layers``.

        Args:
            topology: the rank's place; its vision flag decides whether the tower is cut.
            layers: 0-based layers of the stage.
            first, last: whether the stage holds the embedding and vision, and the output head.
            floor: least width of cut experts (narrower ones are padded, as vLLM does).
            expert: bytes of one expert as the rank stores it; None for the released form with ``floor``.

        Raises ConfigError where the sizes do not divide the model.
        """
        total: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
        for kind, count in Counter(self._kind(i) for i in layers).items():
            for part, size in self._layer_bytes(kind, topology, floor, expert).items():
                total[part] += size * count
        for name, spec in self._outside.items():
            on_first = part_of(name) == "vision" or name.endswith("embed_tokens.weight")
            if first if on_first else last:
                total[part_of(name)] += self._tensor_bytes(name, spec, topology)
        return dict(total)

    def _layer_bytes(self, kind: tuple[str, bool], topology: Topology, floor: int, expert: int | None) -> Counter[str]:
        total: Counter[str] = Counter()
        if expert is not None and kind[1]:
            total["routed experts"] = expert * self._held(topology)
        for name, spec in self._kinds[kind].items():
            if _EXPERT.search(name):
                total["routed experts"] += self._experts_bytes(spec, topology, floor) if expert is None else 0
            else:
                total[part_of(name)] += self._tensor_bytes(name, spec, topology)
        return total

    def _held(self, topology: Topology) -> int:
        """Experts of a layer on this rank."""
        held = expert_range(self.config, topology.ep_size, topology.ep_rank)
        return len(held) if topology.ep_size > 1 else self.config.text.num_experts

    def _experts_bytes(self, spec: TensorSpec, topology: Topology, floor: int) -> int:
        """All experts of the rank for one of an expert's tensors, padding included. Width counts in every tensor."""
        _, padded = expert_width(self.config, topology.tp_size, topology.ep_size, topology.dp_size, floor)
        return spec.nbytes * padded // self.config.text.moe_intermediate_size * self._held(topology)

    def _tensor_bytes(self, name: str, spec: TensorSpec, topology: Topology) -> int:
        if name.endswith(".A_log"):  # kept normalised: one fp32 value a local head, whatever the stored shape
            return self.config.text.linear_attn.num_heads // topology.tp_size * spec.dtype.itemsize
        shard = tensor_shard(name, spec.shape, self.config, topology)
        return prod(shard.shape(spec.shape)) * spec.dtype.itemsize
