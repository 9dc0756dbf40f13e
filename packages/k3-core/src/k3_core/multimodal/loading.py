"""Opening encoded images, and refusing what is not one usable still image.

Every refusal is an ImageError (a ValueError, so a server answers 400); other media are refused by name with
UnsupportedError. Nothing is left to a warning: Pillow only warns of a decompression bomb below twice its limit, here
the declared size is compared with `ImageSettings.max_pixels` before a pixel is decoded. Formats that Pillow hands to
another program (EPS) or that describe drawings are not opened at all.

Animations and multi-page files (GIF, APNG, WebP, TIFF, ...): the frame Pillow shows, which is the first after opening,
as in the released processor. EXIF orientation is not applied, as in the released processor.
"""

import io
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Final

from PIL import Image, UnidentifiedImageError

from k3_core.errors import ImageError, UnsupportedError
from k3_core.multimodal.settings import RELEASED, ImageSettings

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "MPO", "JPEG2000", "PPM", "ICO", "TGA")
"""Raster formats opened, by Pillow's names; one whose codec this Pillow lacks is refused."""


def require_image_type(kind: str) -> None:
    """Accept the media type "image" (or "image_url"); raise UnsupportedError naming any other, video above all."""
    if kind in ("image", "image_url"):
        return
    if kind.startswith("video"):
        raise UnsupportedError(
            "video input is not supported: Kimi K3's released processor takes still images only; send frames as images"
        )
    raise UnsupportedError(f"media of type {kind!r} is not supported; Kimi K3 takes text and images")


def open_image(source: bytes | str | PathLike[str] | BinaryIO, settings: ImageSettings = RELEASED) -> Image.Image:
    """Open and fully decode an encoded image given as bytes, a path or a binary file.

    Returns a loaded PIL image in its own mode (alpha and palette kept). Raises ImageError for data that is empty,
    unreadable, of an unknown format, truncated, corrupt or larger than `settings.max_pixels`, and UnsupportedError for
    video containers.
    """
    data = _read(source)
    if not data:
        raise ImageError("the image is empty (0 bytes)")
    if _is_video(data):
        require_image_type("video")
    try:
        Image.init()
        image = Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])
    except UnidentifiedImageError:
        raise ImageError(
            f"the image is of an unknown format or damaged ({len(data)} bytes, beginning {data[:8].hex()}); "
            f"formats: {', '.join(FORMATS)}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"the image is too large to decode: {error}") from None
    except Exception as error:  # decoders raise many kinds for damaged headers
        raise ImageError(f"the image cannot be read, it is damaged: {_reason(error)}") from error
    return checked(image, settings)


def checked(image: Any, settings: ImageSettings = RELEASED) -> Image.Image:
    """The same PIL image, decoded and within limits, or ImageError (UnsupportedError for a list or stack of frames)."""
    if not isinstance(image, Image.Image):
        if isinstance(image, list | tuple) or getattr(image, "ndim", 0) == 4:
            raise UnsupportedError(
                "a sequence of frames was given where one image belongs; video input is not supported by Kimi K3"
            )
        raise ImageError(f"an image must be a PIL image, not {type(image).__name__}; use open_image for encoded data")
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"the image is {width} x {height} pixels; both sides must be at least 1")
    if width * height > settings.max_pixels:
        raise ImageError(
            f"the image is {width} x {height} = {width * height} pixels; at most {settings.max_pixels} are accepted, "
            "send a smaller image"
        )
    try:
        image.load()
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error, ... depending on the decoder
        raise ImageError(
            f"the {width} x {height} {image.format or image.mode} image cannot be decoded, it is truncated or damaged: "
            f"{_reason(error)}"
        ) from error
    return image


def _read(source: bytes | str | PathLike[str] | BinaryIO) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    try:
        if isinstance(source, str | PathLike):
            return Path(source).read_bytes()
        data = source.read()
    except (OSError, ValueError, AttributeError) as error:
        raise ImageError(f"the image cannot be read: {_reason(error)}") from error
    if not isinstance(data, bytes):
        raise ImageError("the image file is open in text mode; open it in binary mode")
    return data


def _is_video(data: bytes) -> bool:
    """Containers sent as video: ISO media (mp4, mov) except still AVIF and HEIF, Matroska/WebM, AVI, MPEG."""
    if data[4:8] == b"ftyp":
        return data[8:12] not in (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
    avi = data[:4] == b"RIFF" and data[8:12] == b"AVI "
    return avi or data.startswith((b"\x1a\x45\xdf\xa3", b"\x00\x00\x01\xba", b"\x00\x00\x01\xb3"))


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
