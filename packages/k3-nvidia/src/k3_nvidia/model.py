"""Kimi K3 and Kimi-Linear on NVIDIA GPUs: decoder layer, text model, multimodal model, in the order the data flows.

Attention residuals run in the lazy form (:mod:`k3_core.vllm.serving.attn_res`): between sublayers travel the running
``prefix`` [T, H], the last sublayer's output ``delta`` [T, H], not yet added, and the ``bank`` of block sums
[T, slots, H]. What each mix reads and where the bank is written is asked of ``k3_core.contracts.attn_res.Schedule``.
The final norm is applied where logits are computed, so the hidden states handed out are those before it.

Pipeline stages hand over (hidden_states, residual) = (prefix with the delta added, bank of the blocks written so far).
Auxiliary hidden states (for draft models) come in two readings: the prefix, or the mix that the next layer would see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import (
    EagleModelMixin,
    HasInnerState,
    IsHybrid,
    SupportsEagle3,
    SupportsMultiModal,
    SupportsPP,
)
from vllm.model_executor.models.utils import PPMissingLayer, _merge_multimodal_embeddings, make_layers
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from k3_core.checkpoint import Topology, vocab_range
from k3_core.checkpoint.table import text_prefix
from k3_core.config import K3Config, TextConfig, load_config
from k3_core.contracts.attn_res import Schedule
from k3_core.errors import ConfigError
from k3_core.vllm import compat
from k3_core.vllm.processor import MEDIA_PAD, K3DummyInputsBuilder, K3MultiModalProcessor, K3ProcessingInfo
from k3_core.vllm.serving import loading, vision
from k3_core.vllm.serving.attn_res import Mix
from k3_core.vllm.serving.cache import StateShapes, state_dtypes, state_shapes
from k3_core.vllm.serving.mla_layer import LatentAttention
from k3_core.vllm.serving.modules import GatedMLP, Loadable, below, norm, tp
from k3_nvidia import dispatch, warmup
from k3_nvidia.kda import KimiDeltaAttention
from k3_nvidia.moe import MoE

#: Readings of an auxiliary hidden state: the running prefix, or the mix that the next layer would see.
AuxStream = Literal["prefix", "attn_res"]


# ------------------------------------------------------------------------------------------------------ decoder layer


class DecoderLayer(Loadable):
    """One layer: attention (KDA or MLA) and feed-forward (dense or experts), each behind a mix and a norm."""

    def __init__(self, config: K3Config, index: int, schedule: Schedule | None, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        text = config.text
        self.index, self.schedule, self.eps = index, schedule, text.rms_norm_eps
        attention = KimiDeltaAttention if text.layer_kind(index) == "kda" else LatentAttention
        self.self_attn = attention(text, vllm_config, f"{prefix}.self_attn")
        self.input_layernorm = norm(text.hidden_size, self.eps)
        self.post_attention_layernorm = norm(text.hidden_size, self.eps)
        self.is_moe = text.is_moe_layer(index)
        if self.is_moe:
            self.feed_forward: nn.Module = MoE(config, vllm_config, f"{prefix}.block_sparse_moe")
        else:
            self.feed_forward = GatedMLP(text, text.intermediate_size, f"{prefix}.mlp", dispatch.choose)
        if schedule is not None:
            slots = schedule.mlp_blocks(index)
            self.self_attention_res = Mix(text, slots, dispatch.choose)
            self.mlp_res = Mix(text, slots, dispatch.choose)

    def forward(self, prefix: Tensor, delta: Tensor | None, bank: Tensor) -> tuple[Tensor, Tensor]:
        """Attention residuals: (prefix, delta) in and out; ``bank`` and the prefix are changed in place."""
        schedule, i = self.schedule, self.index
        assert schedule is not None
        write = schedule.write_index(i)
        h = self.self_attention_res(
            prefix,
            delta,
            bank,
            schedule.attn_blocks(i),
            write_block=write,
            output_norm=(self.input_layernorm.weight, self.eps),
        )
        attention = self.self_attn(h)
        # Where the prefix was written to the bank, the attention's output begins a new one.
        prefix, delta = (prefix, attention) if write is None else (attention, None)
        h = self.mlp_res(
            prefix,
            delta,
            bank,
            schedule.mlp_blocks(i),
            output_norm=(self.post_attention_layernorm.weight, self.eps),
        )
        return prefix, self.feed_forward(h)

    def forward_plain(self, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ordinary pre-norm residuals (Kimi-Linear): (output not yet added, residual) in and out."""
        if residual is None:
            residual = delta
            h = self.input_layernorm(delta)
        else:
            h, residual = self.input_layernorm(delta, residual)
        h, residual = self.post_attention_layernorm(self.self_attn(h), residual)
        return self.feed_forward(h), residual

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors of this layer go, the routed experts apart."""
        yield from below("self_attn", self.self_attn)
        yield from below("input_layernorm", self.input_layernorm)
        yield from below("post_attention_layernorm", self.post_attention_layernorm)
        yield from below("block_sparse_moe" if self.is_moe else "mlp", self.feed_forward)
        if self.schedule is not None:
            yield from self.self_attention_res.named_parts("self_attention_res")
            yield from self.mlp_res.named_parts("mlp_res")


# --------------------------------------------------------------------------------------------------------- text model


class KimiLinearModel(Loadable, EagleModelMixin):
    """Embedding, this pipeline stage's layers and, on the last stage, the output mix (``model.`` in the checkpoint)."""

    def __init__(self, config: K3Config, vllm_config: Any, prefix: str) -> None:
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
            lambda prefix: DecoderLayer(config, int(prefix.rsplit(".", 1)[1]), self.schedule, vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.stage = None if self.schedule is None else self.schedule.stage(self.start_layer, self.end_layer)
        self.norm: nn.Module = PPMissingLayer()
        if self.last:
            self.norm = norm(text.hidden_size, text.rms_norm_eps)
            if self.schedule is not None:
                self.output_attn_res = Mix(text, self.schedule.output_blocks, dispatch.choose)
        self.aux_stream: AuxStream = aux_stream(vllm_config)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Ids of the auxiliary hidden states: id k is the state after k layers."""
        return cast(tuple[int, ...], self.aux_hidden_state_layers)

    def forward(
        self, hidden: Tensor, intermediate: IntermediateTensors | None
    ) -> Tensor | IntermediateTensors | tuple[Tensor, list[Tensor]]:
        """Embeddings [T, H] (first stage) or the hand-off -> hidden states before the final norm, or a hand-off."""
        if self.schedule is None:
            return self._forward_plain(hidden, intermediate)
        prefix, bank = self._receive(hidden, intermediate)
        delta: Tensor | None = None
        aux: list[Tensor] = []
        for index in range(self.start_layer, self.end_layer):
            layer = cast(DecoderLayer, self.layers[index])
            if index in self.aux_layers:
                aux.append(self._aux(prefix, delta, bank, layer.self_attention_res, self.schedule.attn_blocks(index)))
            prefix, delta = layer(prefix, delta, bank)
        if not self.last:
            assert delta is not None
            return IntermediateTensors({"hidden_states": prefix + delta, "residual": bank})
        mixed = self.output_attn_res(prefix, delta, bank, self.schedule.output_blocks)
        if self.text.num_hidden_layers in self.aux_layers:
            aux.append(mixed)  # in both readings: a draft that asks for the last state wants the output mix
        return (mixed, aux) if aux else mixed

    def _receive(self, hidden: Tensor, intermediate: IntermediateTensors | None) -> tuple[Tensor, Tensor]:
        """(prefix, bank with this stage's slots) at the start of a stage. Unwritten slots are uninitialised."""
        assert self.stage is not None
        prefix = hidden if intermediate is None else intermediate["hidden_states"]
        bank = prefix.new_empty(prefix.shape[0], self.stage.num_slots, prefix.shape[1])
        if intermediate is not None:
            bank[:, : self.stage.received_blocks] = intermediate["residual"]
        return prefix, bank

    def _aux(self, prefix: Tensor, delta: Tensor | None, bank: Tensor, mix: Mix, num_blocks: int) -> Tensor:
        """The auxiliary hidden state before a layer: the whole prefix, or its mix with the bank (no norm)."""
        whole = prefix.clone() if delta is None else prefix + delta
        if self.aux_stream == "prefix":
            return whole
        return mix(whole, None, bank, num_blocks)

    def _forward_plain(
        self, hidden: Tensor, intermediate: IntermediateTensors | None
    ) -> Tensor | IntermediateTensors | tuple[Tensor, list[Tensor]]:
        """Kimi-Linear: ordinary residuals."""
        residual: Tensor | None = None
        if intermediate is not None:
            hidden, residual = intermediate["hidden_states"], intermediate["residual"]
        aux: list[Tensor] = []
        for index in range(self.start_layer, self.end_layer):
            if index in self.aux_layers:
                aux.append(hidden.clone() if residual is None else hidden + residual)
            hidden, residual = cast(DecoderLayer, self.layers[index]).forward_plain(hidden, residual)
        assert residual is not None
        if not self.last:
            return IntermediateTensors({"hidden_states": hidden, "residual": residual})
        hidden = hidden + residual
        if self.text.num_hidden_layers in self.aux_layers:
            aux.append(hidden)
        return (hidden, aux) if aux else hidden

    def empty_handoff(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        """What this stage receives, zero-filled, for profiling and graphs."""
        hidden = self.text.hidden_size
        prefix: tuple[int, ...] = (batch_size, hidden)
        residual: tuple[int, ...] = (batch_size, hidden)
        if self.stage is not None:
            prefix, residual = self.stage.payload_shapes(batch_size, hidden)
        return IntermediateTensors(
            {
                "hidden_states": torch.zeros(prefix, dtype=dtype, device=device),
                "residual": torch.zeros(residual, dtype=dtype, device=device),
            }
        )

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors below ``model.`` go on this stage, the routed experts apart."""
        if not isinstance(self.embed_tokens, PPMissingLayer):
            yield "embed_tokens.weight", vocab_rows(self.embed_tokens, self.text)
        for index in range(self.start_layer, self.end_layer):
            for name, destination in cast(DecoderLayer, self.layers[index]).parts():
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


class KimiLinearForCausalLM(nn.Module, SupportsPP, SupportsEagle3, HasInnerState, IsHybrid):
    """The text model with its head, as vLLM serves it; also the text part of Kimi K3."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", config: K3Config | None = None) -> None:
        super().__init__()
        self.config = config or load_config(compat.released_config(vllm_config.model_config))
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        text = self.config.text
        outer = f"{prefix}." if prefix else ""
        self.model = KimiLinearModel(self.config, vllm_config, f"{outer}model")
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = (
                self.model.embed_tokens
                if text.tie_word_embeddings
                else ParallelLMHead(text.vocab_size, text.hidden_size, prefix=f"{outer}lm_head")
            )
        self.logits_processor = LogitsProcessor(text.vocab_size)
        self._cold = dispatch.device()[0] == "cuda"

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token embeddings [T, H] of ids [T]."""
        embed = cast(Callable[[Tensor], Tensor], self.model.embed_tokens)
        return embed(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Hidden states [T, H] before the final norm (or what this pipeline stage hands over).

        ``positions`` is not used: the model has none.
        """
        if self._cold and get_forward_context().attn_metadata is None:
            self._cold = False
            warmup.run(self)
        if not self.model.first:
            assert intermediate_tensors is not None, "a later pipeline stage needs the hand-off"
            return self.model(intermediate_tensors["hidden_states"], intermediate_tensors)
        if inputs_embeds is None:
            assert input_ids is not None, "either ids or embeddings"
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(inputs_embeds, None)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Final norm and head: [n, H] -> [n, vocab]."""
        norm = cast(Callable[[Tensor], Tensor], self.model.norm)
        logits: Tensor | None = self.logits_processor(self.lm_head, norm(hidden_states))
        return logits

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """A zero-filled hand-off of the shapes this stage receives."""
        return self.model.empty_handoff(batch_size, dtype, device)

    def destinations(self, prefix: str) -> loading.Destinations:
        """Where the text tensors go, by released name; ``prefix`` is what those names start with."""
        result = loading.Destinations()
        result.add(f"{prefix}model.", self.model.parts())
        if get_pp_group().is_last_rank and not self.config.text.tie_word_embeddings:
            result.add(prefix, [("lm_head.weight", vocab_rows(self.lm_head, self.config.text))])
        for index in range(self.model.start_layer, self.model.end_layer):
            layer = cast(DecoderLayer, self.model.layers[index])
            if layer.is_moe:
                experts = cast(MoE, layer.feed_forward).experts
                result.experts[f"{prefix}model.layers.{index}.block_sparse_moe"] = experts
        return result

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill all parameters from the checkpoint; see :mod:`k3_core.vllm.serving.loading`."""
        return load(self, self, weights, {})

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> StateShapes:
        """Shapes of one request's states, before the model exists."""
        text = load_config(compat.released_config(vllm_config.model_config)).text
        return state_shapes(text, vllm_config.parallel_config.tensor_parallel_size, vllm_config.num_speculative_tokens)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Dtypes of one request's states, before the model exists."""
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """How prefix caching copies the two states between blocks: window and state at the accepted offset."""
        return MambaStateCopyFuncCalculator.kda_state_copy_func()


def load(
    model: nn.Module,
    text_model: KimiLinearForCausalLM,
    weights: Iterable[tuple[str, Tensor]],
    more: dict[str, Loadable],
) -> set[str]:
    """Load a text model and, for the multimodal one, the modules of ``more`` by their released prefixes."""
    config, vllm_config = text_model.config, text_model.vllm_config
    size, rank = tp()
    expert_parallel = size > 1 and bool(vllm_config.parallel_config.enable_expert_parallel)
    topology = Topology(
        tp_size=size,
        tp_rank=rank,
        ep_size=size if expert_parallel else 1,
        ep_rank=rank if expert_parallel else 0,
        vision_data_parallel=True,
    )
    prefix = text_prefix(config)
    destinations = text_model.destinations(prefix)
    for name, module in more.items():
        destinations.add(f"{name}.", module.parts())
    cut = {}
    for index in range(text_model.model.start_layer, text_model.model.end_layer):
        layer = cast(DecoderLayer, text_model.model.layers[index])
        if layer.is_moe and cast(MoE, layer.feed_forward).form == "sharded":
            name = f"{prefix}model.layers.{index}.block_sparse_moe.routed_expert_up_proj.weight"
            cut[name] = cast(MoE, layer.feed_forward).up_rows
    loaded = loading.load(model, destinations, config, weights, text_model.model_config, topology, cut)
    for _, attention in loading.modules_of(text_model, LatentAttention):
        if hasattr(attention.attn, "keep_weight"):
            attention.attn.keep_weight()
    return loaded


# --------------------------------------------------------------------------------------------------- multimodal model


@MULTIMODAL_REGISTRY.register_processor(K3MultiModalProcessor, info=K3ProcessingInfo, dummy_inputs=K3DummyInputsBuilder)
class KimiK3ForConditionalGeneration(
    nn.Module, SupportsMultiModal, SupportsPP, SupportsEagle3, HasInnerState, IsHybrid
):
    """Kimi K3 with images, as vLLM serves it. The text model inside is always our own."""

    supports_encoder_tp_data = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = load_config(compat.released_config(vllm_config.model_config))
        if self.config.vision is None:
            raise ConfigError("KimiK3ForConditionalGeneration needs a vision_config")
        outer = f"{prefix}." if prefix else ""
        marks = cast(Any, self)  # methods of vLLM's protocol
        with marks._mark_tower_model(vllm_config, "image"):
            self.vision_tower = vision.VisionTower(self.config.vision)
            self.mm_projector = vision.Projector(self.config.vision)
        with marks._mark_language_model(vllm_config):
            self.language_model = KimiLinearForCausalLM(
                vllm_config=vllm_config, prefix=f"{outer}language_model", config=self.config
            )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What stands for an image in rendered text."""
        if modality == "image":
            return MEDIA_PAD
        raise ValueError(f"Kimi K3 takes images only, not {modality}")

    def text_model(self) -> KimiLinearForCausalLM:
        """The text model."""
        return self.language_model

    def get_language_model(self) -> KimiLinearForCausalLM:
        """The text model, by vLLM's name for it."""
        return self.text_model()

    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """Token embeddings of each image: pixel_values [P, 3, 14, 14] and grid_thws [M, 3] -> M of [n, H]."""
        pixel_values, grid_thws = kwargs.get("pixel_values"), kwargs.get("grid_thws")
        if pixel_values is None or grid_thws is None:
            return []
        return vision.encode(self.vision_tower, self.mm_projector, pixel_values, grid_thws)

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *, is_multimodal: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Token embeddings [T, H], with image embeddings at the positions that ``is_multimodal`` [T] marks."""
        embedded = self.text_model().embed_input_ids(input_ids)
        if multimodal_embeddings is None or is_multimodal is None or len(multimodal_embeddings) == 0:
            return embedded
        merged: Tensor = _merge_multimodal_embeddings(embedded, multimodal_embeddings, is_multimodal)
        return merged

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Hidden states [T, H] before the final norm (or what this pipeline stage hands over)."""
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """A zero-filled hand-off of the shapes this pipeline stage receives."""
        return self.text_model().make_empty_intermediate_tensors(batch_size, dtype, device)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """[n, H] -> [n, vocab]."""
        return self.text_model().compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill all parameters from the checkpoint; see :mod:`k3_core.vllm.serving.loading`."""
        more = {"vision_tower": self.vision_tower, "mm_projector": self.mm_projector}
        present = {name: module for name, module in more.items() if isinstance(module, Loadable)}
        return load(self, self.text_model(), weights, present)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> StateShapes:
        """Shapes of one request's states, before the model exists."""
        return KimiLinearForCausalLM.get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Dtypes of one request's states, before the model exists."""
        return KimiLinearForCausalLM.get_mamba_state_dtype_from_config(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """How prefix caching copies the two states between blocks."""
        return KimiLinearForCausalLM.get_mamba_state_copy_func()
