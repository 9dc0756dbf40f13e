"""Image settings of `preprocessor_config.json` (`media_proc_cfg`) as one validated, hashable object.

Source of the values: the released preprocessor_config.json of moonshotai/Kimi-K3. Keys that decide pixels are required
when a file is read; keys of the video path are known and unused, because the released processor accepts images only.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, cast

from k3_core.errors import ConfigError

logger = logging.getLogger(__name__)

PATCH_SIZE: Final = 14
"""Side of a patch in pixels; fixed by the shape of the released patch embedding [H, 3, 14, 14]."""
MERGE: Final = 2
"""Patches merged per side into one token; fixed by the released projector (4 patches to a token)."""
DEFAULT_MAX_PIXELS: Final = 89_478_485
"""Decoded pixels accepted per image: above it Pillow warns of a decompression bomb, here the image is refused."""

_VIDEO_KEYS: Final = frozenset(
    {
        "config_type",
        "in_patch_limit_each_frame",
        "in_patch_limit_video",
        "max_num_frames_each_video",
        "sample_fps",
        "temporal_merge_kernel_size",
        "timestamp_mode",
    }
)
_REQUIRED: Final = (
    "in_patch_limit",
    "patch_limit_on_one_side",
    "patch_size",
    "merge_kernel_size",
    "image_mean",
    "image_std",
    "transparent_bg_config",
)
_OPTIONAL: Final = frozenset({"fixed_output_tokens", "transparent_bg_fill_stage"})


def _require_channels(name: str, values: tuple[float, ...]) -> None:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    if len(values) != 3 or len(numbers) != 3:
        raise ConfigError(f"{name} is {list(values)!r}; it must hold three finite numbers")


def _require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} is {value!r}; it must be an integer {bounds}")


@dataclass(frozen=True)
class TransparentBackground:
    """What shows through transparent pixels (`transparent_bg_config`).

    `pattern` "chessboard" uses squares of `chessboard_square_size` pixels; with `chessboard_square_on_top_left` the
    square in the top left corner is white. "white", "gray" (128) and "black" are plain.
    """

    pattern: Literal["chessboard", "white", "gray", "black"] = "chessboard"
    chessboard_square_size: int = 8
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 180

    def __post_init__(self) -> None:
        where = "transparent_bg_config"
        if self.pattern not in ("chessboard", "white", "gray", "black"):
            raise ConfigError(f"{where}.pattern is {self.pattern!r}; known: chessboard, white, gray, black")
        _require_int(f"{where}.chessboard_square_size", self.chessboard_square_size, low=1)
        _require_int(f"{where}.chessboard_white_value", self.chessboard_white_value, low=0, high=255)
        _require_int(f"{where}.chessboard_gray_value", self.chessboard_gray_value, low=0, high=255)
        if not isinstance(self.chessboard_square_on_top_left, bool):
            raise ConfigError(
                f"{where}.chessboard_square_on_top_left is {self.chessboard_square_on_top_left!r}; it must be a boolean"
            )


@dataclass(frozen=True)
class ImageSettings:
    """How an image becomes patches; the defaults are the released values.

    in_patch_limit: nominal number of 14 x 14 patches of one image before padding (padding may pass it a little).
    patch_limit_on_one_side: patches per side, a hard limit (the rotary table ends there).
    image_mean, image_std: per channel, on the 0..1 scale.
    background, background_stage: see `TransparentBackground`; None drops alpha.
    max_pixels: decoded pixels accepted; not part of the released file.
    Raises ConfigError naming the key for values that the model cannot work with.
    """

    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    patch_size: int = PATCH_SIZE
    merge: int = MERGE
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    background: TransparentBackground | None = TransparentBackground()
    background_stage: Literal["after_resize", "before_resize"] = "after_resize"
    max_pixels: int = DEFAULT_MAX_PIXELS

    def __post_init__(self) -> None:
        if self.patch_size != PATCH_SIZE:
            raise ConfigError(f"patch_size is {self.patch_size!r}; Kimi K3's patch embedding takes {PATCH_SIZE}")
        if self.merge != MERGE:
            raise ConfigError(f"merge_kernel_size is {self.merge!r}; Kimi K3's projector takes {MERGE}")
        _require_int("in_patch_limit", self.in_patch_limit, low=MERGE * MERGE)
        _require_int("patch_limit_on_one_side", self.patch_limit_on_one_side, low=MERGE, high=512)
        if self.patch_limit_on_one_side % MERGE:
            raise ConfigError(
                f"patch_limit_on_one_side is {self.patch_limit_on_one_side}; it must be a multiple of {MERGE}, "
                "or padding would pass the limit"
            )
        _require_channels("image_mean", self.image_mean)
        _require_channels("image_std", self.image_std)
        if min(self.image_std) <= 0:
            raise ConfigError(f"image_std is {list(self.image_std)}; every value must be above 0")
        if self.background_stage not in ("after_resize", "before_resize"):
            raise ConfigError(
                f"transparent_bg_fill_stage is {self.background_stage!r}; known: after_resize, before_resize"
            )
        _require_int("max_pixels", self.max_pixels, low=1)

    @property
    def token_size(self) -> int:
        """Pixels along one side of a token (28)."""
        return self.patch_size * self.merge

    @property
    def max_side(self) -> int:
        """Pixels along the longest side after resizing (7168)."""
        return self.patch_limit_on_one_side * self.patch_size


RELEASED: Final = ImageSettings()
"""The settings of the released checkpoint."""


def load_image_settings(source: str | Path | Mapping[str, Any], max_pixels: int = DEFAULT_MAX_PIXELS) -> ImageSettings:
    """Read settings from a checkpoint folder, a preprocessor_config.json or its parsed content.

    `source` may be the whole preprocessor config or its `media_proc_cfg`. Raises ConfigError naming the key for a
    missing or impossible value. Unknown keys are logged by name: they belong to another processor.
    """
    raw = _read(source)
    media: Any = raw.get("media_proc_cfg", raw)
    if not isinstance(media, Mapping):
        raise ConfigError(f"media_proc_cfg is a {type(media).__name__}; it must be an object")
    missing = [key for key in _REQUIRED if key not in media]
    if missing:
        raise ConfigError(f"preprocessor config lacks {', '.join(missing)} in media_proc_cfg; copy the released file")
    if media.get("fixed_output_tokens") is not None:
        raise ConfigError(
            f"fixed_output_tokens is {media['fixed_output_tokens']!r}; only null (size follows the image) is supported"
        )
    unknown = sorted(set(media) - set(_REQUIRED) - _OPTIONAL - _VIDEO_KEYS)
    if unknown:
        logger.warning("preprocessor config: keys not known for Kimi K3 are ignored: %s", ", ".join(unknown))

    background = None
    if media["transparent_bg_config"] is not None:
        background = _background(media["transparent_bg_config"])
        if "transparent_bg_fill_stage" not in media:
            raise ConfigError("preprocessor config has transparent_bg_config but no transparent_bg_fill_stage")
    return ImageSettings(
        in_patch_limit=media["in_patch_limit"],
        patch_limit_on_one_side=media["patch_limit_on_one_side"],
        patch_size=media["patch_size"],
        merge=_merge(media["merge_kernel_size"]),
        image_mean=_triple("image_mean", media["image_mean"]),
        image_std=_triple("image_std", media["image_std"]),
        background=background,
        background_stage=media.get("transparent_bg_fill_stage", "after_resize"),
        max_pixels=max_pixels,
    )


def _read(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_dir():
        path = path / "preprocessor_config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); image input needs it") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}; it must be an object")
    return raw


def _background(raw: Any) -> TransparentBackground:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"transparent_bg_config is {raw!r}; it must be an object or null")
    known = [field.name for field in fields(TransparentBackground)]
    needed = known if raw.get("pattern") == "chessboard" else ["pattern"]
    missing = [key for key in needed if key not in raw]
    unknown = sorted(set(raw) - set(known))
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise ConfigError(f"transparent_bg_config {problem}; known keys: {', '.join(known)}")
    return TransparentBackground(**raw)


def _merge(raw: Any) -> int:
    if isinstance(raw, list | tuple) and len(raw) == 2 and raw[0] == raw[1]:
        return cast(int, raw[0])
    return cast(int, raw)


def _triple(name: str, raw: Any) -> tuple[float, float, float]:
    if not isinstance(raw, list | tuple) or len(raw) != 3:
        raise ConfigError(f"{name} is {raw!r}; it must hold three numbers")
    return cast(tuple[float, float, float], tuple(raw))
