"""From a released configuration (file, folder, mapping or transformers object) to a checked `K3Config`.

The steps: read, split into outer and text parts, resolve aliases, decide the family, require the family's keys, check
the constants that the arithmetic assumes, build the typed objects, check the relations between values.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ValidationError

from k3_core.config import keys
from k3_core.config.checks import check_relations
from k3_core.config.model import Dtype, K3Config, LinearAttnConfig, TextConfig, VisionConfig
from k3_core.config.quantization import QuantizationConfig, parse_quantization
from k3_core.errors import ConfigError

_M = TypeVar("_M", bound=BaseModel)


def load_config(source: Any) -> K3Config:
    """Read and check a configuration.

    Args:
        source: a checkpoint folder, a `config.json` path, the parsed mapping, an object with `to_dict()` such as a
            transformers config, or a `K3Config` (returned as it is). The outer Kimi K3 configuration, its
            `text_config` alone and Kimi-Linear's configuration are all accepted; keys that do not shape the
            arithmetic are ignored.

    Returns:
        The immutable configuration.

    Raises:
        ConfigError: unreadable file, missing key, value of the wrong type or out of range, contradiction between
            values, or anything that this project does not support. The message names the key and the value.
    """
    if isinstance(source, K3Config):
        return source
    raw = _read(source)
    try:
        return _load(raw)
    except ConfigError as error:
        if not isinstance(source, str | Path):
            raise
        raise ConfigError(f"{_file(source)}: {error}") from None


def _load(raw: Mapping[str, Any]) -> K3Config:
    model_type = raw.get("model_type")
    if "text_config" in raw or model_type == "kimi_k3":
        return _load_outer(raw)
    return _load_inner(raw)


def _read(source: Any) -> Mapping[str, Any]:
    if isinstance(source, str | Path):
        path = Path(source)
        try:
            path = _file(source)
            source = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; give a checkpoint folder or its config.json") from None
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{path}: cannot be read ({reason}); check the path and its permissions") from error
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deeply, no file name
            raise ConfigError(f"{path}: cannot be read as JSON ({error}); fetch it again") from error
        if not isinstance(source, Mapping):
            raise ConfigError(f"{path}: holds a {type(source).__name__}; expected a JSON object")
        return source
    return _as_mapping(source, "configuration")


def _file(source: str | Path) -> Path:
    path = Path(source)
    return path / "config.json" if path.is_dir() else path


def _as_mapping(value: Any, path: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        return cast(Mapping[str, Any], to_dict())
    raise ConfigError(f"{path} = {value!r}: expected an object")


def _load_outer(raw: Mapping[str, Any]) -> K3Config:
    _one_of(raw, "model_type", ("kimi_k3",), "")
    for key in keys.OUTER_REQUIRED:
        _require(raw, key, "")
    text_raw = _resolve_aliases(_as_mapping(raw["text_config"], "text_config"), "text_config.")
    if text_raw.get("model_type") is not None:  # objects made in code may not state it
        _one_of(text_raw, "model_type", ("kimi_linear",), "text_config.")
    text = _load_text(text_raw, "text_config.")
    vision = _load_vision(_as_mapping(raw["vision_config"], "vision_config"))
    return _assemble(raw, text_raw, text, vision)


def _load_inner(raw: Mapping[str, Any]) -> K3Config:
    _one_of(raw, "model_type", ("kimi_k3", "kimi_linear"), "")
    text_raw = _resolve_aliases(raw, "")
    return _assemble({}, text_raw, _load_text(text_raw, ""), None)


def _assemble(
    outer: Mapping[str, Any], inner: Mapping[str, Any], text: TextConfig, vision: VisionConfig | None
) -> K3Config:
    """Join the parts; what both levels may state (token ids, dtype, quantisation) must agree."""
    is_outer = bool(outer)
    path = "text_config." if is_outer else ""
    outer = _resolve_aliases(outer, "")
    fields: dict[str, Any] = {
        "text": text,
        "vision": vision,
        "quantization": _quantization(outer, inner, path),
        "architecture": _architecture(outer if is_outer else inner, is_outer),
        "dtype": _dtype(outer, inner, path),
        "media_placeholder_token_id": outer.get("media_placeholder_token_id"),
        "image_placeholder": outer.get("image_placeholder"),
    }
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields[key] = _shared(outer, inner, key, path)
    _shared(outer, inner, "tie_word_embeddings", path)
    config = _build(K3Config, fields, "")
    check_relations(config, path)
    return config


def _load_text(raw: Mapping[str, Any], path: str) -> TextConfig:
    family = _family(raw, path)
    linear_raw = _as_mapping(_require(raw, "linear_attn_config", path), path + "linear_attn_config")
    values: dict[str, Any] = {}
    for key in keys.TEXT_REQUIRED:
        values[key] = _require(raw, key, path)
    for key in keys.TEXT_NULLABLE:
        if key not in raw:
            raise ConfigError(f"{path}{key} is missing: give a number, or null where the model has none")
        values[key] = raw[key]
    for key, absent in keys.TEXT_K3_ONLY.items():
        values[key] = _require(raw, key, path) if family == "k3" else absent
    for key, expected in keys.TEXT_CONSTANTS.items():
        _constant(raw, key, expected, path, required=key in keys.TEXT_CONSTANTS_REQUIRED)
    values["linear_attn"] = _load_linear(linear_raw, path + "linear_attn_config.", family)
    return _build(TextConfig, values, path, {"linear_attn": "linear_attn_config"})


def _family(raw: Mapping[str, Any], path: str) -> Literal["k3", "linear"]:
    """Kimi K3 if any key only K3 has is set (then all are required), Kimi-Linear if none is.

    A K3 text configuration and Kimi-Linear's share model_type and architecture, so a K3 file that lost one key must
    not pass for the other family.
    """
    linear = raw.get("linear_attn_config")
    linear = linear if isinstance(linear, Mapping) else {}
    marks = [key for key in keys.TEXT_K3_ONLY if raw.get(key) not in (None, False)]
    marks += [f"linear_attn_config.{key}" for key in keys.LINEAR_K3_ONLY if linear.get(key) not in (None, False)]
    activation = _require(raw, "hidden_act", path)
    if activation not in ("situ", "silu"):
        raise ConfigError(f"{path}hidden_act = {activation!r}: unknown activation; expected 'situ' or 'silu'")
    if activation == "silu" and marks:
        raise ConfigError(
            f"{path}hidden_act = 'silu' contradicts {', '.join(path + mark for mark in marks)}, which only Kimi K3 "
            f"(hidden_act 'situ') has"
        )
    return "k3" if activation == "situ" or marks or path else "linear"


def _load_linear(raw: Mapping[str, Any], path: str, family: str) -> LinearAttnConfig:
    values: dict[str, Any] = {}
    for key in keys.LINEAR_REQUIRED:
        values[key] = _require(raw, key, path)
    for key in ("kda_layers", "full_attn_layers"):
        if not isinstance(values[key], list | tuple):
            raise ConfigError(f"{path}{key} = {values[key]!r}: expected a list of 1-based layer numbers")
        values[key] = tuple(values[key])
    for key, absent in keys.LINEAR_K3_ONLY.items():
        if family == "k3" and key not in raw:
            raise ConfigError(f"{path}{key} is missing")
        values[key] = raw.get(key, absent) if family == "k3" else absent
    return _build(LinearAttnConfig, values, path)


def _load_vision(raw: Mapping[str, Any]) -> VisionConfig:
    path = "vision_config."
    values = {key: _require(raw, key, path) for key in keys.VISION_REQUIRED}
    if isinstance(values["merge_kernel_size"], list):
        values["merge_kernel_size"] = tuple(values["merge_kernel_size"])
    for key, expected in keys.VISION_CONSTANTS.items():
        _constant(raw, key, expected, path, required=True)
    return _build(VisionConfig, values, path)


def _quantization(outer: Mapping[str, Any], inner: Mapping[str, Any], path: str) -> QuantizationConfig | None:
    """The scheme, wherever it stands; two copies may differ only by the rewrite of quant_method to "mxfp4"."""
    found = []
    for raw, where in ((outer, ""), (inner, path)):
        value = raw.get("quantization_config")
        if value is not None:
            value = value if isinstance(value, Mapping) else _as_mapping(value, where + "quantization_config")
            found.append(parse_quantization(value, where + "quantization_config"))
    return found[0] if found else None


def _architecture(raw: Mapping[str, Any], is_outer: bool) -> str:
    expected = keys.OUTER_ARCHITECTURE if is_outer else keys.TEXT_ARCHITECTURE
    found = raw.get("architectures")
    if found is None:  # a transformers object made in code has none; model_type has been checked already
        return expected
    if not isinstance(found, list | tuple) or list(found) != [expected]:
        raise ConfigError(f"architectures = {found!r}: expected ['{expected}']")
    return expected


def _dtype(outer: Mapping[str, Any], inner: Mapping[str, Any], path: str) -> Dtype:
    value = _shared(
        {k: _dtype_name(v) for k, v in outer.items() if k == "dtype"},
        {k: _dtype_name(v) for k, v in inner.items() if k == "dtype"},
        "dtype",
        path,
    )
    if value is None:
        raise ConfigError(f"{path}dtype is missing: expected 'bfloat16', as released")
    if value not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"{path}dtype = {value!r}: expected 'bfloat16', 'float16' or 'float32'")
    return cast(Dtype, value)


def _dtype_name(value: Any) -> Any:
    return value if value is None else str(value).removeprefix("torch.")


def _shared(outer: Mapping[str, Any], inner: Mapping[str, Any], key: str, path: str) -> Any:
    """A value that both levels may state: they must agree; null counts as not stated."""
    first, second = outer.get(key), inner.get(key)
    if first is not None and second is not None and first != second:
        raise ConfigError(f"{key} = {first!r} contradicts {path}{key} = {second!r}")
    return second if first is None else first


def _resolve_aliases(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Replace other families' spellings by the released ones; both may appear if they agree."""
    resolved = dict(raw)
    for alias, key in keys.ALIASES.items():
        if raw.get(alias) is None:
            continue
        value, released = raw[alias], raw.get(key)
        if key == "dtype":
            value, released = _dtype_name(value), _dtype_name(released)
        if released is not None and released != value:
            raise ConfigError(f"{path}{key} = {released!r} contradicts its alias {path}{alias} = {value!r}")
        resolved[key] = value
    # Kimi-Linear states its context as model_max_length only; transformers classes add their own smaller default under
    # the other name. Without positions in the model neither shapes the arithmetic, so the larger statement holds.
    lengths = [resolved.get("max_position_embeddings"), raw.get("model_max_length")]
    stated = [value for value in lengths if isinstance(value, int)]
    if stated and (lengths[0] is None or len(stated) == 2):
        resolved["max_position_embeddings"] = max(stated)
    return resolved


def _require(raw: Mapping[str, Any], key: str, path: str) -> Any:
    if raw.get(key) is None:
        state = "is null" if key in raw else "is missing"
        raise ConfigError(f"{path}{key} {state}: the model's arithmetic depends on it; take it from the released file")
    return raw[key]


def _constant(raw: Mapping[str, Any], key: str, expected: Any, path: str, *, required: bool) -> None:
    """A key whose only supported value is built into the arithmetic."""
    if key not in raw or raw[key] is None:
        if required:
            raise ConfigError(f"{path}{key} is missing: expected {expected!r}")
        return
    if raw[key] != expected or type(raw[key]) is not type(expected):
        raise ConfigError(f"{path}{key} = {raw[key]!r}: only {expected!r} is supported")


def _one_of(raw: Mapping[str, Any], key: str, allowed: tuple[str, ...], path: str) -> None:
    if raw.get(key) not in allowed:
        state = f"= {raw[key]!r}" if key in raw else "is missing"
        raise ConfigError(f"{path}{key} {state}: expected {' or '.join(map(repr, allowed))}")


def _build(model: type[_M], values: dict[str, Any], path: str, rename: Mapping[str, str] | None = None) -> _M:
    """Construct `model`; a pydantic complaint becomes one ConfigError naming the released key."""
    try:
        return model(**values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = problems[0]
        location = [str(part) for part in first["loc"]]
        location[0] = (rename or {}).get(location[0], location[0])
        more = f" (and {len(problems) - 1} more problem(s))" if len(problems) > 1 else ""
        raise ConfigError(f"{path}{'.'.join(location)} = {first['input']!r}: {first['msg']}{more}") from None
