"""Images in vLLM's multimodal pipeline: a thin layer over ``k3_core.multimodal``. Used by every wheel's model.

Prompts arrive as token ids. An image stands in them either as the single ``<|media_pad|>`` of its media block (what
:mod:`k3_core.vllm.renderer` writes), which becomes as many pads as the image costs tokens, or as the text
``<|kimi_image_placeholder|>`` (what users of raw prompts type), which becomes the whole media block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from k3_core.errors import ImageError, UnsupportedError
from k3_core.multimodal import (
    IMAGE_PLACEHOLDER,
    MEDIA_PAD,
    ImageSettings,
    image_geometry,
    image_prompt,
    load_image_settings,
    max_image_tokens,
    preprocess_image,
)
from k3_core.vllm import compat

#: Largest image that warm-up processes where memory is not profiled with it: large enough to load every code path.
_SMALL = (448, 448)


class ImagePatcher:
    """What vLLM calls the model's processor: images to patches. It reads no text."""

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings

    def __call__(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """``pixel_values`` [P, 3, 14, 14] float32 of all images and ``grid_thws`` [M, 3] int64.

        Raises ImageError naming the first image that cannot be used.
        """
        pixels, grids = [], []
        for index, image in enumerate(images):
            try:
                values, grid = preprocess_image(plain_image(image), self.settings)
            except ImageError as error:
                raise ImageError(f"image {index + 1} of the prompt: {error}") from error
            pixels.append(values)
            grids.append(grid)
        return {"pixel_values": torch.cat(pixels), "grid_thws": torch.tensor(grids, dtype=torch.int64)}


class K3DataParser(MultiModalDataParser):
    """Takes images as they are: vLLM's own parser would flatten transparency onto white."""

    def _parse_image_data(self, data: Any) -> ImageProcessorItems | None:
        if data is None:
            return None
        if self.is_embeddings(data):
            raise UnsupportedError("precomputed image embeddings are not supported by Kimi K3; send the image")
        items = list(data) if isinstance(data, list | tuple) else [data]
        # None stands for an image that a cache holds.
        return ImageProcessorItems([item if item is None else _hashable(item) for item in items])


class K3ProcessingInfo(BaseProcessingInfo):
    """What vLLM may know about Kimi K3's inputs: images only, and what they cost."""

    @cached_property
    def settings(self) -> ImageSettings:
        """Settings of the checkpoint's ``preprocessor_config.json``. Raises ConfigError where it cannot be used."""
        return load_image_settings(compat.repository_json(self.ctx.model_config, "preprocessor_config.json"))

    def get_hf_processor(self, **kwargs: object) -> Any:
        """Our own processor; no remote code."""
        if kwargs:
            raise UnsupportedError(
                f"mm_processor_kwargs {sorted(kwargs)} are not supported: preprocessor_config.json fixes how images "
                "are processed"
            )
        return ImagePatcher(self.settings)

    def get_data_parser(self) -> K3DataParser:
        """Our own parser, which keeps alpha channels and palettes."""
        return K3DataParser()

    def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        """None."""
        return {"images_kwargs": set()}

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of images; ``--limit-mm-per-prompt`` sets one. Video and audio are refused by vLLM."""
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Tokens of the most expensive image that fits a sequence."""
        return {"image": min(seq_len, max_image_tokens(self.settings).num_tokens)}


class K3DummyInputsBuilder(BaseDummyInputsBuilder[K3ProcessingInfo]):
    """Inputs for memory profiling: the most expensive image there is."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """One placeholder an image."""
        return IMAGE_PLACEHOLDER * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Images of the worst-case size; small ones where profiling is switched off."""
        profiled = not self.info.ctx.model_config.get_multimodal_config().skip_mm_profiling
        width, height = max_image_tokens(self.info.settings).size if profiled else _SMALL
        overrides = mm_options.get("image") if mm_options else None
        count = mm_counts.get("image", 0)
        return {"image": self._get_dummy_images(width=width, height=height, num_images=count, overrides=overrides)}


class K3MultiModalProcessor(BaseMultiModalProcessor[K3ProcessingInfo]):
    """Patches for the model and pads for the prompt."""

    def _call_hf_processor(self, *args: Any, **kwargs: Any) -> BatchFeature:
        call = compat.processor_call(args, kwargs)
        processor = self.info.get_hf_processor(**call.options)
        data: dict[str, Any] = dict(processor(call.images)) if call.images else {}
        if call.text is not None:
            data["input_ids"] = [self.info.get_tokenizer().encode(call.text, add_special_tokens=False)]
        return BatchFeature(data)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's processing of one prompt.

        Raises ImageError for the id of ``[PAD]`` beside an image: the released model embeds it as zeros there and as an
        ordinary token without images, and vLLM embeds a step's requests together. No chat contains it.
        """
        result = super().apply(*args, **kwargs)
        pad = getattr(self.info.get_hf_config(), "pad_token_id", None)
        if result["mm_placeholders"].get("image") and pad is not None and pad in result["prompt_token_ids"]:
            at = result["prompt_token_ids"].index(pad)
            raise ImageError(f"the prompt holds pad_token_id = {pad} beside an image (position {at}); leave it out")
        return result

    def _hf_processor_applies_updates(self, *args: Any, **kwargs: Any) -> bool:
        return False  # releases up to 0.27 ask; the pads are always inserted by the updates below

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        grids = hf_inputs.get("grid_thws", torch.empty((0, 3), dtype=torch.int64))
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "grid_thws": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        tokenizer = self.info.get_tokenizer()
        pad_id = self.info.get_hf_config().media_placeholder_token_id

        def size(index: int) -> tuple[int, int]:
            return plain_image(mm_items.get_items("image", ImageProcessorItems).get(index)).size

        def pads(index: int) -> PromptUpdateDetails:
            count = image_geometry(*size(index), self.info.settings).num_tokens
            return PromptUpdateDetails.select_token_id([pad_id] * count, pad_id)

        def block(index: int) -> PromptUpdateDetails:
            count = image_geometry(*size(index), self.info.settings).num_tokens
            text = image_prompt(*size(index), count)
            return PromptUpdateDetails.select_token_id(tokenizer.encode(text, add_special_tokens=False), pad_id)

        placeholder = tokenizer.encode(IMAGE_PLACEHOLDER, add_special_tokens=False)
        return [
            PromptReplacement(modality="image", target=[pad_id], replacement=pads),
            PromptReplacement(modality="image", target=placeholder, replacement=block),
        ]


def _hashable(image: Any) -> Any:
    """``image`` in a form whose cache key depends on all that decides its pixels.

    vLLM's key of a bare PIL image leaves out a transparency entry, so two images could share one result. An encoded
    file is keyed by its bytes already. Raises UnsupportedError for anything but images.
    """
    plain = plain_image(image)
    if image is not plain or "transparency" not in plain.info:
        return image
    palette = plain.palette.palette if plain.palette is not None else b""
    facts = repr((plain.mode, plain.size, plain.info["transparency"])).encode()
    return MediaWithBytes(plain, b"\0".join([facts, bytes(palette), plain.tobytes()]))


def plain_image(image: Any) -> Image.Image:
    """The PIL image inside vLLM's wrapper for decoded media, if there is one.

    Raises UnsupportedError for arrays and tensors: their mode is unknown, and the rules depend on it.
    """
    image = getattr(image, "media", image)
    if image is None:
        raise ImageError("an image part holds no image: its URL is empty or it gives a uuid alone; send the image")
    if not isinstance(image, Image.Image):
        raise UnsupportedError(f"an image must be a PIL image or an encoded file, not {type(image).__name__}")
    return image


__all__ = [
    "MEDIA_PAD",
    "ImagePatcher",
    "K3DummyInputsBuilder",
    "K3MultiModalProcessor",
    "K3ProcessingInfo",
    "plain_image",
]
