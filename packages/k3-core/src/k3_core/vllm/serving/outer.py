"""What vLLM asks of the text model with its head and of the multimodal model; a vendor fills in its layers.

``TextServing`` and ``MultimodalServing`` are vLLM's protocols spelled out once: embedding, logits, hand-off between
pipeline stages, loading, and what the state cache must know before a model exists. They contain no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    SupportsEagle3,
    SupportsMultiModal,
    SupportsPP,
)
from vllm.model_executor.models.utils import PPMissingLayer, _merge_multimodal_embeddings
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from k3_core.checkpoint import Topology
from k3_core.checkpoint.table import text_prefix
from k3_core.config import K3Config, load_config
from k3_core.errors import ConfigError
from k3_core.vllm import compat
from k3_core.vllm.processor import MEDIA_PAD
from k3_core.vllm.serving import isolation, loading, vision
from k3_core.vllm.serving.cache import StateShapes, state_dtypes, state_shapes
from k3_core.vllm.serving.mla_layer import LatentAttention
from k3_core.vllm.serving.modules import Loadable, tp
from k3_core.vllm.serving.stack import TextStack, vocab_rows


class TextServing(nn.Module, SupportsPP, SupportsEagle3, HasInnerState, IsHybrid):
    """A text model with its head, as vLLM serves it; also the text part of Kimi K3."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", config: K3Config | None = None) -> None:
        super().__init__()
        self.config = config or load_config(compat.released_config(vllm_config.model_config))
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        text = self.config.text
        outer = f"{prefix}." if prefix else ""
        self.model = self.make_stack(f"{outer}model")
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = (
                self.model.embed_tokens
                if text.tie_word_embeddings
                else ParallelLMHead(text.vocab_size, text.hidden_size, prefix=f"{outer}lm_head")
            )
        self.logits_processor = LogitsProcessor(text.vocab_size)
        self._cold = not current_platform.is_cpu()
        self._marks = isolation.counting()
        if self._marks and getattr(vllm_config, "use_v2_model_runner", False):  # in the process of the runner
            isolation.guard()
            if vllm_config.speculative_config is not None:
                isolation.count_by_request()

    def make_stack(self, prefix: str) -> TextStack:
        """The vendor's layers in their order, from ``config`` and ``vllm_config``."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Meet every kernel variant once; called by the first forward pass on an accelerator, outside any graph."""
        raise NotImplementedError

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
            self.warm_up()
        if not self.model.first:
            assert intermediate_tensors is not None, "a later pipeline stage needs the hand-off"
            return self.model(intermediate_tensors["hidden_states"], intermediate_tensors)
        if inputs_embeds is None:
            assert input_ids is not None, "either ids or embeddings"
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(inputs_embeds, None)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Final norm and head: [n, H] -> [n, vocab]; NaN where a logit is not finite (see serving.isolation)."""
        norm = cast(Callable[[Tensor], Tensor], self.model.norm)
        logits: Tensor | None = self.logits_processor(self.lm_head, norm(hidden_states))
        return isolation.mark(logits) if self._marks and logits is not None else logits

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
        for index, layer in self.model.own_layers():
            if layer.is_moe:
                result.experts[f"{prefix}model.layers.{index}.block_sparse_moe"] = layer.feed_forward.experts
        return result

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill all parameters from the checkpoint; see :mod:`k3_core.vllm.serving.loading`."""
        return load(self, self, weights, {})

    def fill(
        self,
        model: nn.Module,
        destinations: loading.Destinations,
        weights: Iterable[tuple[str, Tensor]],
        topology: Topology,
        cut: dict[str, int],
    ) -> set[str]:
        """Read the checkpoint into ``destinations``; the vendor's own where it reads other forms than the released."""
        return loading.load(model, destinations, self.config, weights, self.model_config, topology, cut)

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
    text_model: TextServing,
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
    for index, layer in text_model.model.own_layers():
        if layer.is_moe and layer.feed_forward.form == "sharded":
            name = f"{prefix}model.layers.{index}.block_sparse_moe.routed_expert_up_proj.weight"
            cut[name] = layer.feed_forward.up_rows
    loaded = text_model.fill(model, destinations, weights, topology, cut)
    for _, attention in loading.modules_of(text_model, LatentAttention):
        if hasattr(attention.attn, "keep_weight"):
            attention.attn.keep_weight()
    return loaded


class MultimodalServing(nn.Module, SupportsMultiModal, SupportsPP, SupportsEagle3, HasInnerState, IsHybrid):
    """Kimi K3 with images, as vLLM serves it. The text model inside is always the vendor's own.

    A vendor names its text model's class, may give the tower another attention, and registers its class with
    ``MULTIMODAL_REGISTRY``.
    """

    supports_encoder_tp_data = True
    text_class: ClassVar[type[TextServing]]

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = load_config(compat.released_config(vllm_config.model_config))
        if self.config.vision is None:
            raise ConfigError("KimiK3ForConditionalGeneration needs a vision_config")
        outer = f"{prefix}." if prefix else ""
        marks = cast(Any, self)  # methods of vLLM's protocol
        with marks._mark_tower_model(vllm_config, "image"):
            self.vision_tower = vision.VisionTower(self.config.vision, self.vision_attention())
            self.mm_projector = vision.Projector(self.config.vision)
        with marks._mark_language_model(vllm_config):
            self.language_model = self.text_class(
                vllm_config=vllm_config, prefix=f"{outer}language_model", config=self.config
            )

    def vision_attention(self) -> vision.Attend:
        """The tower's attention."""
        return vision.attend_by_item

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What stands for an image in rendered text."""
        if modality == "image":
            return MEDIA_PAD
        raise ValueError(f"Kimi K3 takes images only, not {modality}")

    def text_model(self) -> TextServing:
        """The text model."""
        return self.language_model

    def get_language_model(self) -> TextServing:
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
        return cls.text_class.get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Dtypes of one request's states, before the model exists."""
        return cls.text_class.get_mamba_state_dtype_from_config(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """How prefix caching copies the two states between blocks."""
        return cls.text_class.get_mamba_state_copy_func()
