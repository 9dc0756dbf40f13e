"""From a PIL image to the tower's input, equal bit for bit to the released processor in its uint8 stage.

Order (`background_stage` "after_resize", the released value):
1. resize in the image's **own** mode with Pillow's bicubic filter. Pillow takes NEAREST for modes P and 1 (palette
   indices cannot be blended) and premultiplies alpha while it resizes LA and RGBA.
2. transparency over the background: a = alpha / 255 in float32, out = trunc(a rgb + (1 - a) background), uint8. Images
   of mode RGB keep their colours even with a tRNS entry; LA, RGBA, P with transparency (and L, 1, I;16 with a tRNS
   entry) are composited; all else is converted to RGB.
3. pad right and bottom with 0 to whole tokens.
4. x / 255, then (x - mean) / std in float32: padding becomes -1.
5. patches [P, 3, 14, 14], row-major over the grid, channels first inside a patch.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from k3_core.errors import ImageError
from k3_core.multimodal.geometry import image_geometry
from k3_core.multimodal.loading import checked
from k3_core.multimodal.settings import RELEASED, ImageSettings, TransparentBackground

UInt8Array = npt.NDArray[np.uint8]


def preprocess_image(
    image: Image.Image, settings: ImageSettings = RELEASED
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Patches of one image and its grid.

    Returns (pixel_values [P, 3, 14, 14] float32, grid_thw (1, h, w) in patches) with P = h * w; the image becomes
    h * w / 4 tokens. Raises ImageError for an unusable image, UnsupportedError for frames of a video.
    """
    patches, grid_thw = patches_uint8(image, settings)
    table = _normalisation(settings)
    pixels = np.empty(patches.shape, dtype=np.float32)
    for channel in range(3):
        np.take(table[channel], patches[:, channel], out=pixels[:, channel])
    return torch.from_numpy(pixels), grid_thw


def patches_uint8(image: Image.Image, settings: ImageSettings = RELEASED) -> tuple[UInt8Array, tuple[int, int, int]]:
    """The uint8 stage of `preprocess_image`: (patches uint8 [P, 3, 14, 14], grid_thw), padding 0."""
    checked(image, settings)
    geometry = image_geometry(*image.size, settings)
    padded = np.zeros((geometry.padded[1], geometry.padded[0], 3), dtype=np.uint8)
    padded[: geometry.resized[1], : geometry.resized[0]] = resize_to_rgb(image, geometry.resized, settings)
    patch = settings.patch_size
    _, rows, columns = geometry.grid_thw
    patches = padded.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(patches.reshape(rows * columns, 3, patch, patch)), geometry.grid_thw


def resize_to_rgb(image: Image.Image, size: tuple[int, int], settings: ImageSettings = RELEASED) -> UInt8Array:
    """The image at `size` (width, height) without transparency: uint8 [height, width, 3]. Raises ImageError."""
    try:
        image = _with_blendable_pixels(image)
        if settings.background_stage == "before_resize":
            image = Image.fromarray(_flatten(image, settings.background))
        image = image.resize(size, resample=Image.Resampling.BICUBIC)
        return _flatten(image, settings.background)
    except ImageError:
        raise
    except Exception as error:  # modes and palettes that Pillow cannot convert, memory
        raise ImageError(
            f"the {image.size[0]} x {image.size[1]} image of mode {image.mode} cannot be converted to RGB: {error}"
        ) from error


def _with_blendable_pixels(image: Image.Image) -> Image.Image:
    """Modes that no file of a client arrives in, but that callers can build and that the steps above cannot take."""
    target = {"PA": "RGBA", "La": "LA", "RGBa": "RGBA"}.get(image.mode)
    return image if target is None else image.convert(target)


def _flatten(image: Image.Image, background: TransparentBackground | None) -> UInt8Array:
    """RGB uint8 [h, w, 3]; transparency composited over `background`, or dropped where that is None."""
    transparent = image.mode in ("LA", "RGBA") or (image.mode != "RGB" and "transparency" in image.info)
    if background is None or not transparent:
        # RGB keeps its colours: a tRNS entry must not reach convert(), which would honour it.
        return np.array(image if image.mode == "RGB" else image.convert("RGB"), dtype=np.uint8)
    rgba = np.asarray(image.convert("RGBA"))
    alpha = rgba[:, :, 3:].astype(np.float32) / 255.0
    behind = _background_pixels(rgba.shape[1], rgba.shape[0], background)
    blended = alpha * rgba[:, :, :3] + (1 - alpha) * behind
    return blended.astype(np.uint8)


def _background_pixels(width: int, height: int, background: TransparentBackground) -> UInt8Array:
    """uint8 [height, width, 1]."""
    if background.pattern != "chessboard":
        plain = {"white": 255, "gray": 128, "black": 0}[background.pattern]
        return np.full((height, width, 1), plain, dtype=np.uint8)
    square = background.chessboard_square_size
    odd = (np.arange(height)[:, None] // square + np.arange(width)[None, :] // square) % 2 == 1
    gray = odd if background.chessboard_square_on_top_left else ~odd
    colours = np.where(gray, background.chessboard_gray_value, background.chessboard_white_value)
    return colours.astype(np.uint8)[:, :, None]


@lru_cache(maxsize=8)
def _normalisation(settings: ImageSettings) -> npt.NDArray[np.float32]:
    """float32 [3, 256]: what each of the 256 byte values becomes, per channel."""
    levels = (np.arange(256) / 255.0).astype(np.float32)
    table = np.empty((3, 256), dtype=np.float32)
    for channel, (mean, std) in enumerate(zip(settings.image_mean, settings.image_std, strict=True)):
        centred = (levels - np.float64(mean)).astype(np.float32)
        table[channel] = (centred * (1.0 / np.float64(std))).astype(np.float32)
    return table
