"""Configuration classes for releases of vLLM that know no ``kimi_k3`` (before 0.27).

They only carry the released keys to vLLM's own bookkeeping (sizes, context length, dtype). What shapes the arithmetic
is read by ``k3_core.config``, which has no defaults.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class KimiLinearConfig(PretrainedConfig):
    """The text configuration (``model_type: kimi_linear``): every released key becomes an attribute."""

    model_type = "kimi_linear"


class KimiK3VisionConfig(PretrainedConfig):
    """The vision configuration."""

    model_type = "kimi_k3_vision"

    def __init__(self, **kwargs: Any) -> None:
        kwargs.pop("_attn_implementation", None)  # a property of the base class; the tower here has one form
        super().__init__(**kwargs)


class KimiK3Config(PretrainedConfig):
    """The outer configuration (``model_type: kimi_k3``)."""

    model_type = "kimi_k3"

    def __init__(
        self,
        text_config: dict[str, Any] | KimiLinearConfig | None = None,
        vision_config: dict[str, Any] | KimiK3VisionConfig | None = None,
        **kwargs: Any,
    ) -> None:
        text = text_config or {}
        vision = vision_config or {}
        self.text_config = KimiLinearConfig(**text) if isinstance(text, dict) else text
        self.vision_config = KimiK3VisionConfig(**vision) if isinstance(vision, dict) else vision
        super().__init__(**kwargs)


CLASSES: dict[str, type[PretrainedConfig]] = {"kimi_linear": KimiLinearConfig, "kimi_k3": KimiK3Config}
