"""Pixels, equal bit for bit to the released processor in uint8 and after normalisation."""

import json

import golden_data
import numpy as np
import pytest
import torch
from PIL import Image

from k3_core.errors import ConfigError, ImageError
from k3_core.multimodal import (
    RELEASED,
    ImageSettings,
    TransparentBackground,
    load_image_settings,
    open_image,
    patches_uint8,
    preprocess_image,
    resize_to_rgb,
)

MODES = ["rgba", "la", "l", "rgb", "one", "p", "p_transparency", "rgb_trns", "i16", "cmyk"]


@pytest.fixture(scope="module")
def processor() -> dict[str, np.ndarray]:
    """What the released processor made of the images, before normalisation."""
    return golden_data.arrays("k3-tiny-goldens/processor_modes.npz")


def mode_image(mode: str) -> Image.Image:
    return open_image(golden_data.path(f"k3-tiny-goldens/images/mode_{mode}.{'tif' if mode == 'cmyk' else 'png'}"))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_the_processor(processor, mode):
    image = mode_image(mode)
    patches, grid = patches_uint8(image)
    assert np.array_equal(patches, processor[f"{mode}.u8"])
    assert grid == tuple(processor[f"{mode}.grid"][0])
    assert np.array_equal(resize_to_rgb(image, (7, 9)), processor[f"{mode}.resized7x9"])


def test_downscaled_image_equals_the_processor(processor):
    patches, grid = patches_uint8(open_image(golden_data.path("k3-tiny-goldens/images/wide_7300x30.png")))
    assert np.array_equal(patches, processor["wide_7300x30.u8"])
    assert grid == tuple(processor["wide_7300x30.grid"][0])


@pytest.mark.parametrize("name", ["rgb_56x56", "rgba_100x60", "rgb_pad_45x131"])
def test_pixel_values_equal_the_processor(name):
    recorded = golden_data.arrays("k3-tiny-goldens/vision.npz")
    pixel_values, grid = preprocess_image(open_image(golden_data.path(f"k3-tiny-goldens/images/{name}.png")))
    assert pixel_values.dtype == torch.float32
    assert np.array_equal(pixel_values.numpy(), recorded[f"{name}.pixel_values"])
    assert grid == tuple(recorded[f"{name}.grid_thw"][0])


def test_padding_is_black_and_only_right_and_below():
    patches, grid = patches_uint8(Image.new("RGB", (30, 29), (255, 255, 255)))
    assert grid == (1, 4, 4)
    canvas = patches.reshape(4, 4, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(56, 56, 3)
    assert (canvas[:29, :30] == 255).all()
    assert (canvas[29:] == 0).all()
    assert (canvas[:, 30:] == 0).all()
    pixel_values, _ = preprocess_image(Image.new("RGB", (30, 29), (255, 255, 255)))
    assert sorted(pixel_values.unique().tolist()) == [-1.0, 1.0]


def test_chessboard_shows_through_transparency():
    pixels = resize_to_rgb(Image.new("RGBA", (24, 24), (0, 0, 0, 0)), (24, 24))
    board = (np.arange(24)[:, None] // 8 + np.arange(24) // 8) % 2
    assert np.array_equal(pixels[:, :, 0], np.where(board == 0, 255, 180))
    pixel_values, _ = preprocess_image(Image.new("RGBA", (1, 1), (0, 0, 0, 0)))
    assert pixel_values[0, :, 0, 0].tolist() == [1.0, 1.0, 1.0], "the released rule; dropping alpha would give -1"


def test_blend_truncates():
    """a = 128/255, colour 100 over white: 0.50196 * 100 + 0.49804 * 255 = 177.196 -> 177; over 180: 139.8 -> 139."""
    pixels = resize_to_rgb(Image.new("RGBA", (16, 8), (100, 100, 100, 128)), (16, 8))
    assert pixels[0, 0, 0] == 177
    assert pixels[0, 8, 0] == 139


@pytest.mark.parametrize(("pattern", "value"), [("white", 255), ("gray", 128), ("black", 0)])
def test_plain_backgrounds(pattern, value):
    settings = ImageSettings(background=TransparentBackground(pattern=pattern))
    assert (resize_to_rgb(Image.new("LA", (9, 9), (77, 0)), (9, 9), settings) == value).all()


def test_board_may_start_gray_and_stage_and_none_are_followed():
    clear = Image.new("RGBA", (32, 32), (9, 9, 9, 0))
    gray_first = ImageSettings(background=TransparentBackground(chessboard_square_on_top_left=False))
    assert resize_to_rgb(clear, (32, 32), gray_first)[0, 0, 0] == 180
    before = ImageSettings(background_stage="before_resize")
    assert len(np.unique(resize_to_rgb(clear, (13, 13), before))) > 2, "the board itself was resized"
    assert len(np.unique(resize_to_rgb(clear, (13, 13)))) == 2
    assert (resize_to_rgb(clear, (32, 32), ImageSettings(background=None)) == 9).all()


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"]
)
def test_every_mode_pillow_has_gives_pixels(mode):
    pixels = resize_to_rgb(Image.new(mode, (20, 12)), (7, 9))
    assert pixels.shape == (9, 7, 3)
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize("mode", ["LAB", "I", "F", "I;16", "I;16B", "I;16L"])
def test_deep_modes_give_pixels(mode):
    assert resize_to_rgb(Image.new(mode, (20, 12)), (7, 9)).shape == (9, 7, 3)


def test_gray_with_a_transparent_value_is_composited():
    image = Image.new("L", (8, 8), 40)
    image.info["transparency"] = 40
    assert (resize_to_rgb(image, (8, 8)) == 255).all()


def test_conversion_failure_is_an_image_error():
    image = Image.new("P", (8, 8))
    image.info["transparency"] = "nonsense"
    with pytest.raises(ImageError, match="cannot be converted"):
        resize_to_rgb(image, (8, 8))


def test_normalisation_follows_mean_and_std():
    settings = ImageSettings(image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 0.25, 0.2))
    pixel_values, _ = preprocess_image(Image.new("RGB", (28, 28), (51, 102, 255)), settings)
    expected = [(0.2 - 0.1) / 0.5, (0.4 - 0.2) / 0.25, (1.0 - 0.3) / 0.2]
    assert pixel_values[0, :, 3, 3].tolist() == pytest.approx(expected, rel=1e-6)


def released_file() -> dict:
    return {
        "in_patch_limit": 65536,
        "patch_limit_on_one_side": 512,
        "patch_size": 14,
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit_each_frame": 16384,
        "sample_fps": 8.0,
        "temporal_merge_kernel_size": 4,
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        },
        "transparent_bg_fill_stage": "after_resize",
    }


def test_released_settings_are_the_defaults(tmp_path):
    assert load_image_settings(released_file()) == RELEASED
    assert load_image_settings({"media_proc_cfg": released_file(), "processor_class": "X"}) == RELEASED
    assert load_image_settings(released_file() | {"merge_kernel_size": [2, 2]}) == RELEASED
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": released_file()}))
    assert load_image_settings(tmp_path) == RELEASED
    assert load_image_settings(tmp_path / "preprocessor_config.json") == RELEASED


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 16),
        ("patch_size", None),
        ("merge_kernel_size", 3),
        ("merge_kernel_size", [2, 1]),
        ("in_patch_limit", 0),
        ("in_patch_limit", 65536.0),
        ("patch_limit_on_one_side", 1024),
        ("patch_limit_on_one_side", 511),
        ("fixed_output_tokens", 256),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", [0.5, 0.5, float("nan")]),
        ("image_std", [0.5, 0.0, 0.5]),
        ("image_std", "0.5"),
        ("transparent_bg_fill_stage", "never"),
        ("transparent_bg_config", "white"),
        ("transparent_bg_config", {"pattern": "stripes"}),
        ("transparent_bg_config", {"pattern": "chessboard"}),
        ("transparent_bg_config", {"pattern": "white", "colour": 3}),
    ],
)
def test_impossible_settings_name_the_key(key, value):
    with pytest.raises(ConfigError, match=key):
        load_image_settings(released_file() | {key: value})


@pytest.mark.parametrize("key", ["patch_size", "in_patch_limit", "image_mean", "transparent_bg_config"])
def test_missing_settings_name_the_key(key):
    raw = released_file()
    del raw[key]
    with pytest.raises(ConfigError, match=key):
        load_image_settings(raw)


def test_unreadable_settings(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_image_settings(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        load_image_settings(tmp_path)
