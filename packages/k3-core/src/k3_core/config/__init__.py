"""Released `config.json` files as one typed, validated, immutable object.

`load_config` accepts the released Kimi K3 configuration (outer, with `text_config` and `vision_config`), the text
configuration alone, and the configuration of Kimi-Linear-48B-A3B. Whatever shapes the arithmetic must be present and
free of contradictions; otherwise `k3_core.errors.ConfigError` names the key and the value.
"""

from k3_core.config.load import load_config
from k3_core.config.model import K3Config, LinearAttnConfig, TextConfig, VisionConfig
from k3_core.config.quantization import QuantizationConfig, is_routed_expert

__all__ = [
    "K3Config",
    "LinearAttnConfig",
    "QuantizationConfig",
    "TextConfig",
    "VisionConfig",
    "is_routed_expert",
    "load_config",
]
