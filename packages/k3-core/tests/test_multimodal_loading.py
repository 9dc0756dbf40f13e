"""Images that cannot be used give one clear error; those that can are opened as the released processor does."""

import contextlib
import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from k3_core.errors import ImageError, UnsupportedError
from k3_core.multimodal import ImageSettings, open_image, preprocess_image, require_image_type

SMALL = ImageSettings(max_pixels=10_000)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png_of_declared_size(width: int, height: int) -> bytes:
    """A PNG whose header promises `width` x `height` pixels that are not there."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_opens_common_formats_from_bytes_file_and_path(kind, tmp_path):
    data = encoded(noise(40, 30), kind)
    (tmp_path / "x").write_bytes(data)
    for source in (data, io.BytesIO(data), tmp_path / "x", str(tmp_path / "x")):
        assert open_image(source).size == (40, 30)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF"])
@pytest.mark.parametrize("keep", [0.02, 0.3, 0.7])
def test_truncated_files(kind, keep):
    data = encoded(noise(80, 60), kind)
    with pytest.raises(ImageError) as caught:
        open_image(data[: int(len(data) * keep)])
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's remarks on damaged metadata
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "ICO", "TGA"])
def test_damaged_bytes_never_crash(kind):
    """Whatever is wrong inside a file, the outcome is an image or an ImageError."""
    data = encoded(noise(48, 48), kind)
    rng = np.random.default_rng(7)
    for _ in range(40):
        damaged = bytearray(data)
        for position in rng.integers(0, min(len(data), 400), 6):
            damaged[position] = int(rng.integers(0, 256))
        with contextlib.suppress(ImageError, UnsupportedError):
            pixel_values, _ = preprocess_image(open_image(bytes(damaged), SMALL), SMALL)
            assert pixel_values.isfinite().all()


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"<svg></svg>", b"%!PS-Adobe-3.0"]
)
def test_what_is_no_image(data):
    with pytest.raises(ImageError):
        open_image(data)


def test_missing_file_and_text_file(tmp_path):
    with pytest.raises(ImageError, match="cannot be read"):
        open_image(tmp_path / "absent.png")
    with pytest.raises(ImageError, match="binary mode"):
        open_image(io.StringIO("text"))


@pytest.mark.parametrize("size", [(101, 100), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_are_refused_before_decoding(size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with pytest.raises(ImageError, match="pixels"):
            open_image(png_of_declared_size(*size), SMALL)


@pytest.mark.parametrize("mode", ["ignore", "error"])
def test_decompression_bomb_with_the_released_settings(mode):
    """12,000 x 12,000 is in the range that Pillow only warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter(mode, Image.DecompressionBombWarning)
        with pytest.raises(ImageError):
            open_image(png_of_declared_size(12_000, 12_000))


def test_bomb_inside_a_text_chunk():
    body = b"comment\0\0" + zlib.compress(b"a" * (80 << 20))
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    data = encoded(noise(20, 20), "PNG")
    with pytest.raises(ImageError):
        open_image(data[:33] + chunk + data[33:])


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_zero_sized_images(size):
    with pytest.raises(ImageError, match="at least 1"):
        preprocess_image(Image.new("RGB", size))


def test_a_file_that_breaks_while_decoding_lazily():
    """PIL opens lazily; whoever passes such an image gets the error here, not in the middle of a forward pass."""
    data = encoded(noise(80, 60), "PNG")
    with pytest.raises(ImageError, match="truncated or damaged"):
        preprocess_image(Image.open(io.BytesIO(data[: len(data) // 2])))


@pytest.mark.parametrize("thing", [None, b"bytes", "path", np.zeros((4, 4, 3), dtype=np.uint8)])
def test_what_is_no_pil_image(thing):
    with pytest.raises(ImageError, match="must be a PIL image"):
        preprocess_image(thing)


def test_video_is_refused_by_name():
    for kind in ("video", "video_url", "video_chunk"):
        with pytest.raises(UnsupportedError, match="video"):
            require_image_type(kind)
    with pytest.raises(UnsupportedError, match="audio"):
        require_image_type("audio")
    for frames in ([noise(8, 8), noise(8, 8)], np.zeros((2, 8, 8, 3), dtype=np.uint8)):
        with pytest.raises(UnsupportedError, match="video"):
            preprocess_image(frames)
    containers = [b"\0\0\0\x18ftypmp42" + bytes(20), b"\x1a\x45\xdf\xa3" + bytes(20), b"RIFF\0\0\0\0AVI LIST"]
    for data in containers:
        with pytest.raises(UnsupportedError, match="video"):
            open_image(data)
    require_image_type("image")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_several_is_used(kind):
    frames = [Image.new("RGB", (30, 30), colour) for colour in ((250, 5, 5), (5, 250, 5))]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **lossless)
    image = open_image(data)
    assert image.n_frames == 2
    pixel_values, _ = preprocess_image(image)
    red, green, _ = pixel_values[0, :, 5, 5]
    assert red > 0.9
    assert green < -0.9
