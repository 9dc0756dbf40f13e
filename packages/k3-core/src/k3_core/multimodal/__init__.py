"""Images: geometry, loading, resizing, transparency, patches, placeholder expansion, limits. No vLLM, no tokenizer."""

from k3_core.multimodal.geometry import Geometry, WorstCase, image_geometry, max_image_tokens
from k3_core.multimodal.loading import checked, open_image, require_image_type
from k3_core.multimodal.pixels import patches_uint8, preprocess_image, resize_to_rgb
from k3_core.multimodal.prompt import (
    IMAGE_PLACEHOLDER,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    check_prompt_images,
    expand_pads,
    fill_placeholders,
    image_prompt,
    split_at_placeholders,
)
from k3_core.multimodal.settings import (
    DEFAULT_MAX_PIXELS,
    MERGE,
    PATCH_SIZE,
    RELEASED,
    ImageSettings,
    TransparentBackground,
    load_image_settings,
)

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "IMAGE_PLACEHOLDER",
    "MEDIA_BEGIN",
    "MEDIA_CONTENT",
    "MEDIA_END",
    "MEDIA_PAD",
    "MERGE",
    "PATCH_SIZE",
    "RELEASED",
    "Geometry",
    "ImageSettings",
    "TransparentBackground",
    "WorstCase",
    "check_prompt_images",
    "checked",
    "expand_pads",
    "fill_placeholders",
    "image_geometry",
    "image_prompt",
    "load_image_settings",
    "max_image_tokens",
    "open_image",
    "patches_uint8",
    "preprocess_image",
    "require_image_type",
    "resize_to_rgb",
    "split_at_placeholders",
]
