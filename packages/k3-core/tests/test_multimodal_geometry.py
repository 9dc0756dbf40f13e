"""Sizes, token counts and the true maximum of tokens."""

import itertools
import math

import golden_data
import numpy as np
import pytest

from k3_core.errors import ImageError
from k3_core.multimodal import RELEASED, ImageSettings, image_geometry, max_image_tokens

SPEC_TABLE = [  # the table of the specification: size, resized, grid (h, w), tokens
    ((100, 100), (100, 100), (8, 8), 16),
    ((30, 16), (30, 16), (2, 4), 2),
    ((448, 448), (448, 448), (32, 32), 256),
    ((1024, 768), (1024, 768), (56, 74), 1036),
    ((1920, 1080), (1920, 1080), (78, 138), 2691),
    ((4000, 3000), (4000, 3000), (216, 286), 15444),
    ((10000, 100), (7168, 71), (6, 512), 768),
    ((8000, 8000), (3586, 3586), (258, 258), 16641),
    ((1861, 7041), (1850, 7002), (502, 134), 16817),
]


@pytest.mark.parametrize(("size", "resized", "grid", "tokens"), SPEC_TABLE)
def test_table_of_the_specification(size, resized, grid, tokens):
    geometry = image_geometry(*size)
    assert geometry.resized == resized
    assert geometry.grid_thw == (1, *grid)
    assert geometry.num_tokens == tokens


def test_62_recorded_sizes():
    sizes = golden_data.load_json("ops/navit_resize.json")
    assert len(sizes) == 62
    for row in sizes:
        geometry = image_geometry(row["width"], row["height"])
        assert geometry.resized == (row["new_width"], row["new_height"]), row
        padded = (row["new_width"] + row["pad_width"], row["new_height"] + row["pad_height"])
        assert geometry.padded == padded, row
        assert geometry.grid_thw == (1, row["grid_h"], row["grid_w"]), row
        assert geometry.num_tokens == row["num_tokens"], row


def test_geometry_is_consistent_and_never_upscales():
    rng = np.random.default_rng(0)
    for width, height in (2 ** rng.uniform(0, 17, (3000, 2))).astype(int):
        geometry = image_geometry(width, height)
        assert geometry.resized[0] <= width
        assert geometry.resized[1] <= height
        for resized, padded in zip(geometry.resized, geometry.padded, strict=True):
            assert 1 <= resized <= padded <= 7168
            assert padded % 28 == 0
            assert padded - resized < 28
        _, rows, columns = geometry.grid_thw
        assert (columns * 14, rows * 14) == geometry.padded
        assert geometry.num_tokens == rows * columns // 4


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5), (2.5, 5), (True, 5), ("4", 5)])
def test_sizes_that_are_none_are_refused(size):
    with pytest.raises(ImageError, match="positive number of pixels"):
        image_geometry(*size)


def upper_bound(settings: ImageSettings) -> int:
    """No image whatever costs more: derived apart from the search, in exact integer steps where possible.

    For scale s <= 1 and W = w // 14, H = h // 14: the resized width is at most (14 W + 13) s <= 14 W s + 13, the height
    alike, and (W s)(H s) <= in_patch_limit, both at most the side limit. C token columns need a resized width of at
    least 28 (C - 1) + 1, so W s >= (28 (C - 1) - 12) / 14, so H s <= limit * 14 / (28 (C - 1) - 12).
    """
    best = 0
    for columns in range(1, settings.max_side // 28 + 1):
        least = 28 * (columns - 1) - 12
        tallest = settings.max_side + 13
        if least > 0:
            tallest = min(tallest, math.floor(settings.in_patch_limit * 14 * 14 / least + 13))
        best = max(best, columns * min(-(-tallest // 28), settings.max_side // 28))
    return best


def test_true_maximum_of_the_released_settings():
    worst = max_image_tokens()
    assert image_geometry(*worst.size).num_tokens == worst.num_tokens == 16830
    assert upper_bound(RELEASED) == 16830, "proof: no size whatever can pass the one that was found"
    # Padding passes the nominal cap, and the size other implementations profile with is not the worst.
    assert worst.num_tokens > RELEASED.in_patch_limit // 4
    assert worst.num_tokens > image_geometry(1861, 7041).num_tokens


@pytest.mark.parametrize(("limit", "side"), [(64, 16), (16, 16), (40, 8), (4, 4), (25, 10), (100, 6)])
def test_search_equals_brute_force(limit, side):
    settings = ImageSettings(in_patch_limit=limit, patch_limit_on_one_side=side)
    found = max_image_tokens(settings)
    reach = range(1, 14 * side * 3, 3 if side > 8 else 2)
    brute = max(image_geometry(w, h, settings).num_tokens for w, h in itertools.product(reach, reach))
    assert found.num_tokens >= brute
    assert found.num_tokens <= upper_bound(settings)
    assert image_geometry(*found.size, settings).num_tokens == found.num_tokens


def test_search_answers_quickly_for_odd_settings():
    for limit, side in [(256, 512), (1024, 512), (4096, 512), (16384, 512), (262144, 512), (65536, 256), (4, 512)]:
        settings = ImageSettings(in_patch_limit=limit, patch_limit_on_one_side=side)
        assert max_image_tokens(settings).num_tokens <= upper_bound(settings)
