"""Everything of the text stack but the order of its layers: embedding, stages, hand-off, auxiliary states, names.

The vendor's ``model.py`` subclasses :class:`TextStack` and writes ``forward``; what each mix reads and where the bank
is written is asked of ``k3_core.contracts.attn_res.Schedule``.

Pipeline stages hand over (hidden_states, residual) = (prefix with the delta added, bank of the blocks written so far),
and the auxiliary hidden states of the layers behind them, so that a draft on the last stage gets all of them.
Auxiliary hidden states (for draft models) come in two readings: the prefix, or the mix that the next layer would see.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.model_executor.models.utils import PPMissingLayer, make_layers
from vllm.sequence import IntermediateTensors

from k3_core.checkpoint import vocab_range
from k3_core.config import K3Config, TextConfig
from k3_core.contracts.attn_res import Schedule
from k3_core.errors import ConfigError
from k3_core.vllm.serving.attn_res import Mix
from k3_core.vllm.serving.dispatch import Choose
from k3_core.vllm.serving.modules import Loadable, below, norm, tp, variant_key, votes

#: Readings of an auxiliary hidden state: the running prefix, or the mix that the next layer would see.
AuxStream = Literal["prefix", "attn_res"]

#: Methods of speculation whose draft reads auxiliary hidden states.
AUX_METHODS = ("eagle3", "dflash", "extract_hidden_states")

#: (index of the layer, schedule or None without attention residuals, prefix of its names) -> the vendor's layer.
MakeLayer = Callable[[int, Schedule | None, str], nn.Module]


class TextStack(Loadable, EagleModelMixin):
    """Embedding, this pipeline stage's layers and, on the last stage, the output mix (``model.`` in the checkpoint)."""

    def __init__(self, config: K3Config, vllm_config: Any, prefix: str, make_layer: MakeLayer, choose: Choose) -> None:
        super().__init__()
        text = config.text
        self.text, self.config = text, config
        stage = get_pp_group()
        self.first, self.last = stage.is_first_rank, stage.is_last_rank
        self.schedule: Schedule | None = None
        if text.attn_res_block_size is not None:
            self.schedule = Schedule(text.num_hidden_layers, text.attn_res_block_size)
        tied = text.tie_word_embeddings and self.last
        self.embed_tokens: nn.Module = PPMissingLayer()
        if self.first or tied:
            self.embed_tokens = VocabParallelEmbedding(
                text.vocab_size, text.hidden_size, prefix=f"{prefix}.embed_tokens"
            )
        self.start_layer, self.end_layer, self.layers = make_layers(
            text.num_hidden_layers,
            lambda prefix: make_layer(int(prefix.rsplit(".", 1)[1]), self.schedule, prefix),
            prefix=f"{prefix}.layers",
        )
        self.stage = None if self.schedule is None else self.schedule.stage(self.start_layer, self.end_layer)
        self.norm: nn.Module = PPMissingLayer()
        if self.last:
            self.norm = norm(text.hidden_size, text.rms_norm_eps)
            if self.schedule is not None:
                self.output_attn_res = Mix(text, self.schedule.output_blocks, choose)
        self._chosen: list[int] | None = None
        self.aux_stream: AuxStream = aux_stream(vllm_config)
        if not self.last:
            # vLLM tells the last stage, where the draft is, and no other; the states have to come from all of them.
            self.aux_hidden_state_layers = declared_aux_layers(vllm_config, text.num_hidden_layers)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Ids of the auxiliary hidden states: id k is the state after k layers."""
        return self.aux_hidden_state_layers

    def receive(self, hidden: Tensor, intermediate: IntermediateTensors | None) -> tuple[Tensor, Tensor]:
        """(prefix, bank with this stage's slots) at the start of a stage.

        Unwritten slots are uninitialised; zeros where not all layers run, and so not all are written before they are
        read.
        """
        assert self.stage is not None
        prefix = hidden if intermediate is None else intermediate["hidden_states"]
        make = prefix.new_empty if self._chosen is None else prefix.new_zeros
        bank = make(prefix.shape[0], self.stage.num_slots, prefix.shape[1])
        if intermediate is not None:
            bank[:, : self.stage.received_blocks] = intermediate["residual"]
        return prefix, bank

    def received_auxiliary(self, intermediate: IntermediateTensors | None) -> list[Tensor]:
        """Auxiliary hidden states that earlier stages handed over, in the order of their ids."""
        if intermediate is None:
            return []
        return [intermediate[f"aux_{k}"] for k in sorted(self.aux_layers) if k < self.start_layer]

    def hand_over(self, hidden: Tensor, residual: Tensor, aux: list[Tensor]) -> IntermediateTensors:
        """What the next stage receives; ``aux`` are all auxiliary hidden states so far."""
        ids = [k for k in sorted(self.aux_layers) if k < self.end_layer]
        carried = {f"aux_{k}": state for k, state in zip(ids, aux, strict=True)}
        return IntermediateTensors({"hidden_states": hidden, "residual": residual, **carried})

    def auxiliary(self, prefix: Tensor, delta: Tensor | None, bank: Tensor, mix: Mix, num_blocks: int) -> Tensor:
        """The auxiliary hidden state before a layer: the whole prefix, or its mix with the bank (no norm)."""
        whole = prefix.clone() if delta is None else prefix + delta
        if self.aux_stream == "prefix":
            return whole
        return mix(whole, None, bank, num_blocks)

    def empty_handoff(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        """What this stage receives, zero-filled, for profiling and graphs."""
        hidden = self.text.hidden_size
        prefix: tuple[int, ...] = (batch_size, hidden)
        residual: tuple[int, ...] = (batch_size, hidden)
        if self.stage is not None:
            prefix, residual = self.stage.payload_shapes(batch_size, hidden)
        shapes = {"hidden_states": prefix, "residual": residual}
        shapes |= {f"aux_{k}": (batch_size, hidden) for k in self.aux_layers if k < self.start_layer}
        return IntermediateTensors(
            {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        )

    def running(self) -> Sequence[int]:
        """Indices of the layers that a forward pass runs: this stage's, or those of :meth:`one_of_each_kind`."""
        return range(self.start_layer, self.end_layer) if self._chosen is None else self._chosen

    @contextmanager
    def one_of_each_kind(self) -> Iterator[list[int]]:
        """Within it a forward pass runs the first layer of each kind only, whose indices it gives.

        For warm-ups: results are meaningless, but every kernel variant of the whole stage is launched. All tensor
        parallel ranks run the same layers.
        """
        self._chosen = self._of_any_rank(self.first_of_each_kind())
        try:
            yield self._chosen
        finally:
            self._chosen = None

    def first_of_each_kind(self) -> list[int]:
        """The first layer of each kind of this stage, as this rank alone sees them."""
        first: dict[Hashable, int] = {}
        for index, layer in self.own_layers():
            first.setdefault(self.kind(index, layer), index)
        return sorted(first.values())

    def _of_any_rank(self, chosen: list[int]) -> list[int]:
        """The layers that some tensor parallel rank has chosen.

        What a rank holds of the weights may make a kind on that rank alone (scales that are wide), and a layer that not
        all run would leave some waiting in its collectives.
        """
        if not chosen:
            return chosen
        indices = range(self.start_layer, self.end_layer)
        counts = votes([index in chosen for index in indices], next(self.layers.parameters()).device)
        return [index for index, count in zip(indices, counts, strict=True) if count]

    def kind(self, index: int, layer: nn.Module) -> tuple[tuple[Hashable, ...], Hashable]:
        """All that decides which kernel variants a layer launches; layers of one kind launch the same.

        Its place: the stage's first layer has no delta before it; blocks that its two mixes read (also their slots);
        whether it writes one; an auxiliary state before it (each a kind of its own, as a hand-over counts them).
        And what it is made of: :func:`~k3_core.vllm.serving.modules.variant_key`.
        """
        place: tuple[Hashable, ...] = (index == self.start_layer, index if index in self.aux_layers else None)
        if self.schedule is not None:
            write = self.schedule.write_index(index) is not None
            place += (self.schedule.attn_blocks(index), self.schedule.mlp_blocks(index), write)
        return place, variant_key(layer)

    def own_layers(self) -> Iterator[tuple[int, Any]]:
        """(index, layer) of this stage."""
        for index in range(self.start_layer, self.end_layer):
            yield index, self.layers[index]

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors below ``model.`` go on this stage, the routed experts apart."""
        if not isinstance(self.embed_tokens, PPMissingLayer):
            yield "embed_tokens.weight", vocab_rows(self.embed_tokens, self.text)
        for index, layer in self.own_layers():
            for name, destination in layer.parts():
                yield f"layers.{index}.{name}", destination
        if self.last:
            yield from below("norm", self.norm)
            if self.schedule is not None:
                yield from self.output_attn_res.named_parts("output_attn_res")


def vocab_rows(embedding: nn.Module, text: TextConfig) -> Tensor:
    """The rows of a sharded embedding or head that hold vocabulary; the padding behind them is set to zero."""
    size, rank = tp()
    rows = vocab_range(text.vocab_size, size, rank)
    weight = cast(Tensor, embedding.weight).data
    weight[len(rows) :].zero_()
    return weight[: len(rows)]


def aux_stream(vllm_config: Any) -> AuxStream:
    """The reading of auxiliary hidden states that the draft's configuration declares; by default the prefix."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    declared = getattr(getattr(draft, "hf_config", None), "aux_hidden_stream", None)
    if declared in (None, "prefix"):
        return "prefix"
    if declared == "attn_res":
        return "attn_res"
    raise ConfigError(f"the draft model's aux_hidden_stream is {declared!r}; known are 'prefix' and 'attn_res'")


def declared_aux_layers(vllm_config: Any, num_layers: int) -> tuple[int, ...]:
    """Ids of the auxiliary hidden states that the draft's configuration asks for, or vLLM's default where it says none.

    Empty without a draft that takes them. The keys and the default are those that vLLM itself goes by on the last stage
    (``_get_eagle3_aux_layers_from_config``, ``get_eagle3_default_aux_hidden_state_layers``).
    """
    speculative = vllm_config.speculative_config
    draft = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    if draft is None or speculative.method not in AUX_METHODS:
        return ()
    ids = getattr(draft, "eagle_aux_hidden_state_layer_ids", None)
    if not ids:
        dflash, eagle = getattr(draft, "dflash_config", None), getattr(draft, "eagle_config", None)
        if isinstance(dflash, dict):
            ids = [i + 1 for i in dflash.get("target_layer_ids") or []]  # counts layers from their outputs
        if isinstance(eagle, dict):
            ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    return tuple(sorted(set(ids or (2, num_layers // 2, num_layers - 3))))
