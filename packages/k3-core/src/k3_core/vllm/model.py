"""The multimodal reference model: vision tower and projector in front of our own text model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY

from k3_core.config import load_config
from k3_core.errors import ConfigError
from k3_core.vllm import compat, loading
from k3_core.vllm.layers import cache
from k3_core.vllm.layers.vision import Projector, VisionTower
from k3_core.vllm.processor import MEDIA_PAD, K3DummyInputsBuilder, K3MultiModalProcessor, K3ProcessingInfo
from k3_core.vllm.text_model import KimiLinearForCausalLM


@MULTIMODAL_REGISTRY.register_processor(K3MultiModalProcessor, info=K3ProcessingInfo, dummy_inputs=K3DummyInputsBuilder)
class KimiK3ForConditionalGeneration(nn.Module, SupportsMultiModal, HasInnerState, IsHybrid):
    """Kimi K3 with images, as vLLM serves it."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = load_config(compat.released_config(vllm_config.model_config))
        if self.config.vision is None:
            raise ConfigError("KimiK3ForConditionalGeneration needs a vision_config")
        self.model_config = vllm_config.model_config
        outer = f"{prefix}." if prefix else ""
        self.vision_tower = VisionTower(self.config.vision)
        self.mm_projector = Projector(self.config.vision)
        self.language_model = KimiLinearForCausalLM(
            vllm_config=vllm_config, prefix=f"{outer}language_model", config=self.config
        )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What stands for an image in rendered text."""
        if modality == "image":
            return MEDIA_PAD
        raise ValueError(f"Kimi K3 takes images only, not {modality}")

    def get_language_model(self) -> KimiLinearForCausalLM:
        """The text model; always our own."""
        return self.language_model

    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """Token embeddings of each image: pixel_values [P, 3, 14, 14] and grid_thws [M, 3] -> M of [n, H]."""
        pixel_values, grid_thws = kwargs.get("pixel_values"), kwargs.get("grid_thws")
        if pixel_values is None or grid_thws is None:
            return []
        grids = grid_thws.reshape(-1, 3)
        embeddings = self.mm_projector(self.vision_tower(pixel_values, grids))
        merge = self.vision_tower.config.merge_kernel_size
        counts = (grids[:, 1] // merge[0]) * (grids[:, 2] // merge[1])
        return list(embeddings.split(counts.tolist()))

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Token embeddings [T, H], with image embeddings at the positions that ``is_multimodal`` [T] marks."""
        embedded = self.language_model.embed_input_ids(input_ids)
        if multimodal_embeddings is None or is_multimodal is None or len(multimodal_embeddings) == 0:
            return embedded
        images = torch.cat(list(multimodal_embeddings)).to(embedded.dtype)
        marked = int(is_multimodal.sum())
        if marked != images.shape[0]:
            raise ValueError(f"{images.shape[0]} image embeddings for {marked} positions of the step")
        embedded[is_multimodal.to(embedded.device)] = images
        return embedded

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states [T, H] before the final norm."""
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[n, H] -> [n, vocab]."""
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill all parameters from the checkpoint; see :mod:`k3_core.vllm.loading`."""
        return loading.load(self, self.config, weights, self.model_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> cache.Shapes:
        """Shapes of one request's states, before the model exists."""
        return KimiLinearForCausalLM.get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> cache.Dtypes:
        """Dtypes of one request's states, before the model exists."""
        return KimiLinearForCausalLM.get_mamba_state_dtype_from_config(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, Any]:
        """How prefix caching copies the two states between blocks."""
        return KimiLinearForCausalLM.get_mamba_state_copy_func()
