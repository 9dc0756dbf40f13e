"""Writing a configuration in the layout of the released files, the inverse of `load_config`."""

from typing import Any

from k3_core.config import keys
from k3_core.config.model import K3Config, TextConfig, VisionConfig
from k3_core.config.quantization import released_quantization


def to_released(config: K3Config) -> dict[str, Any]:
    """A JSON-ready dict: nested for `KimiK3ForConditionalGeneration`, flat for `KimiLinearForCausalLM`.

    `load_config` of the result equals `config`. Quantisation is written in the released spelling.
    """
    text = _text(config)
    if config.vision is None:
        return text
    return {
        "architectures": [config.architecture],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        },
        "bos_token_id": config.bos_token_id,
        "dtype": config.dtype,
        "eos_token_id": config.eos_token_id,
        "ignore_index": -100,
        "image_placeholder": config.image_placeholder,
        "media_placeholder_token_id": config.media_placeholder_token_id,
        "model_type": "kimi_k3",
        "pad_token_id": config.pad_token_id,
        "text_config": text,
        "tie_word_embeddings": config.text.tie_word_embeddings,
        "vision_config": _vision(config.vision),
    }


def _text(config: K3Config) -> dict[str, Any]:
    text = config.text
    values: dict[str, Any] = {
        "architectures": [keys.TEXT_ARCHITECTURE],
        "bos_token_id": config.bos_token_id,
        "dtype": config.dtype,
        "eos_token_id": config.eos_token_id,
        "initializer_range": 0.02,
        "model_type": "kimi_linear",
        "pad_token_id": config.pad_token_id,
        "use_cache": True,
        **{key: getattr(text, key) for key in (*keys.TEXT_REQUIRED, *keys.TEXT_NULLABLE)},
        "mla_use_nope": True,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": _linear(text),
    }
    if not config.is_kimi_linear:
        values |= {key: getattr(text, key) for key in keys.TEXT_K3_ONLY}
        values["topk_method"] = "noaux_tc"
    if config.quantization is not None:
        values["quantization_config"] = released_quantization()
    return dict(sorted(values.items()))


def _linear(text: TextConfig) -> dict[str, Any]:
    linear = text.linear_attn
    values: dict[str, Any] = {key: getattr(linear, key) for key in keys.LINEAR_REQUIRED}
    values |= {key: list(values[key]) for key in ("kda_layers", "full_attn_layers")}
    if text.attn_res_block_size is not None:
        values |= {key: getattr(linear, key) for key in keys.LINEAR_K3_ONLY}
    return dict(sorted(values.items()))


def _vision(vision: VisionConfig) -> dict[str, Any]:
    values: dict[str, Any] = {key: getattr(vision, key) for key in keys.VISION_REQUIRED}
    values["merge_kernel_size"] = list(vision.merge_kernel_size)
    return dict(sorted((values | keys.VISION_CONSTANTS).items()))
