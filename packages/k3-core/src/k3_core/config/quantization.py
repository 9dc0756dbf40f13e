"""What is stored packed, and what only looks as if it were.

The released `quantization_config` (compressed-tensors, format `mxfp4-pack-quantized`) targets every Linear and ignores
a list of patterns. That list does **not** match `block_sparse_moe.gate`, `routed_expert_{down,up}_proj`,
`self_attention_res_proj`, `mlp_res_proj` and `output_attn_res_proj`, and yet all six are stored as plain BF16 (K3-SPEC
1.3). So the ignore list is not evaluated here at all: in every known checkpoint exactly the routed experts' w1, w2 and
w3 are packed, and `QuantizationConfig.is_packed` says so once for everybody.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from k3_core.errors import ConfigError

FORMAT: Literal["mxfp4-pack-quantized"] = "mxfp4-pack-quantized"
GROUP_SIZE: Literal[32] = 32

_ROUTED_EXPERT = re.compile(
    r"(?:^|\.)(?:block_sparse_moe|mlp)\.experts(?:\.\d+)?(?:\.w(?:1|2|3|13))?(?:\.weight(?:_packed|_scale)?)?$"
)

# What the released file says of the one group of weights; another value would be another arithmetic.
_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": GROUP_SIZE,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
}
_WEIGHTS_NULL = ("zp_dtype", "actorder", "block_structure")
_REQUIRED_WEIGHTS = ("num_bits", "type", "group_size")


def is_routed_expert(name: str) -> bool:
    """Whether a tensor or module name belongs to the routed experts' w1, w2 or w3 (or their fused module).

    True for `...block_sparse_moe.experts.7.w1.weight_packed`, `...experts.7.w2`, the fused `...experts` and
    `...experts.w13`; false for the router, the latent projections, the shared experts and everything else.
    """
    return _ROUTED_EXPERT.search(name) is not None


class QuantizationConfig(BaseModel):
    """MXFP4 of the routed experts: e2m1 codes, two a byte, one e8m0 scale byte for 32 input columns.

    Which of the two spellings the file used is not kept: both describe the same model.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal["mxfp4-pack-quantized"] = FORMAT
    num_bits: Literal[4] = 4
    group_size: Literal[32] = GROUP_SIZE

    def is_packed(self, name: str) -> bool:
        """Whether the tensor or module `name` is stored packed: only the routed experts' w1, w2, w3 are."""
        return is_routed_expert(name)


def parse_quantization(raw: Any, path: str) -> QuantizationConfig:
    """Read one `quantization_config`: the released compressed-tensors form, or its rewrite to "mxfp4".

    `path` is where the mapping was found (for messages). Raises ConfigError for any other scheme.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} = {raw!r}: expected an object with quant_method and format")
    method = raw.get("quant_method")
    if method not in ("compressed-tensors", "mxfp4"):
        raise ConfigError(
            f"{path}.quant_method = {method!r}: only 'compressed-tensors' with format '{FORMAT}' and its rewrite "
            f"'mxfp4' are supported; use the released checkpoint or one without quantization_config"
        )
    groups = raw.get("config_groups")
    if method == "compressed-tensors":
        _expect(raw, "format", FORMAT, path)
        if not isinstance(groups, Mapping) or not groups:
            raise ConfigError(f"{path}.config_groups = {groups!r}: missing or empty; expected the released group_0")
    else:
        if raw.get("format") is not None:
            _expect(raw, "format", FORMAT, path)
        if not (groups is None or isinstance(groups, Mapping)):
            raise ConfigError(f"{path}.config_groups = {groups!r}: expected an object")
    if raw.get("kv_cache_scheme") is not None:
        raise ConfigError(
            f"{path}.kv_cache_scheme = {raw['kv_cache_scheme']!r}: must be null; choose the cache dtype when serving"
        )
    if isinstance(groups, Mapping):
        if len(groups) != 1:
            raise ConfigError(f"{path}.config_groups has {len(groups)} groups {sorted(groups)}: expected exactly one")
        for name, group in groups.items():
            _check_group(group, f"{path}.config_groups.{name}")
    return QuantizationConfig()


def _check_group(group: Any, path: str) -> None:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ConfigError(f"{path} = {group!r}: expected an object with 'weights'")
    if group.get("format") is not None:
        _expect(group, "format", FORMAT, path)
    if group.get("targets") is not None:
        _expect(group, "targets", ["Linear"], path)
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise ConfigError(f"{path}.{key} = {group[key]!r}: activation quantisation is not supported; must be null")
    weights = group["weights"]
    for key, value in _WEIGHTS.items():
        if key in _REQUIRED_WEIGHTS or weights.get(key) is not None:
            _expect(weights, key, value, f"{path}.weights")
    for key in _WEIGHTS_NULL:
        if weights.get(key) is not None:
            raise ConfigError(f"{path}.weights.{key} = {weights[key]!r}: must be null")


def _expect(raw: Mapping[str, Any], key: str, value: Any, path: str) -> None:
    if key not in raw:
        raise ConfigError(f"{path}.{key} is missing: expected {value!r}")
    found = list(raw[key]) if isinstance(raw[key], tuple) else raw[key]
    if found != value or type(found) is not type(value):
        raise ConfigError(f"{path}.{key} = {raw[key]!r}: expected {value!r}; no other scheme is supported")


def released_quantization() -> dict[str, Any]:
    """The `quantization_config` object of the released checkpoint."""
    return {
        "config_groups": {
            "group_0": {
                "format": FORMAT,
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": GROUP_SIZE,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                    "zp_dtype": None,
                },
            }
        },
        "format": FORMAT,
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
