"""Image geometry: what size an image is resized and padded to, how many tokens it costs, and the largest such cost.

The rule (float64, exactly as the released processor computes it; w and h in pixels, p = 14, side S = 512 p = 7168):

    s  = min(1, sqrt(65536 / (max(1, w // p) * max(1, h // p))), S / w, S / h)
    w' = min(max(1, trunc(w s)), S)          h' alike            never larger than the original
    padded  = w', h' rounded up to multiples of 28               black, on the right and at the bottom
    grid    = (1, padded h / 14, padded w / 14)                  tokens = grid h * grid w / 4

The patch limit is applied to floored patch counts before padding, so a padded image can pass it: `max_image_tokens`
finds by how much.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from k3_core.errors import ImageError
from k3_core.multimodal.settings import RELEASED, ImageSettings


@dataclass(frozen=True)
class Geometry:
    """Sizes of one image: `resized` and `padded` are (width, height) in pixels, `grid_thw` is (t, h, w) in patches."""

    resized: tuple[int, int]
    padded: tuple[int, int]
    grid_thw: tuple[int, int, int]
    num_tokens: int


@dataclass(frozen=True)
class WorstCase:
    """An image size (width, height) in pixels whose token count no other size exceeds."""

    size: tuple[int, int]
    num_tokens: int


def image_geometry(width: int, height: int, settings: ImageSettings = RELEASED) -> Geometry:
    """Geometry of an image of `width` x `height` pixels. Raises ImageError unless both are positive integers."""
    width, height = _pixels("width", width), _pixels("height", height)
    patch, side = settings.patch_size, settings.max_side
    patches = max(1.0, width // patch) * max(1.0, height // patch)
    scale = min(1.0, math.sqrt(settings.in_patch_limit / patches), side / width, side / height)
    resized = (
        min(max(1, int(width * scale)), side),
        min(max(1, int(height * scale)), side),
    )
    columns, rows = (-(-length // settings.token_size) for length in resized)
    return Geometry(
        resized=resized,
        padded=(columns * settings.token_size, rows * settings.token_size),
        grid_thw=(1, rows * settings.merge, columns * settings.merge),
        num_tokens=rows * columns,
    )


@lru_cache(maxsize=8)
def max_image_tokens(settings: ImageSettings = RELEASED) -> WorstCase:
    """The size that costs most tokens over **all** image sizes, and that cost (released settings: 16,830).

    Use it for the worst-case dummy image of memory profiling. `_bound` limits the tokens of every size scaled by at
    most s. Sizes near the original scale are searched first; where their best meets the bound of a smaller scale, every
    size scaled further down is out, and what is left is finite: w s <= p S, so w // p <= S / s. All of it is searched,
    with all remainders w mod p and h mod p. (For the released settings the search near 1 already attains `_bound(1)`.)
    """
    best = WorstCase(size=(settings.max_side, settings.max_side), num_tokens=0)
    searched = settings.patch_limit_on_one_side + 16
    for columns in range(1, searched + 1):
        best = _search_column(columns, searched, best, settings)
    for size in _huge_sizes(settings):
        best = _better(best, size, settings)
    smallest = _smallest_useful_scale(best.num_tokens, settings)
    longest = math.ceil(settings.patch_limit_on_one_side / smallest) + 1
    for columns in range(1, longest + 1):
        best = _search_column(columns, longest, best, settings)
    return best


def _huge_sizes(settings: ImageSettings, scale: float = 1e-4) -> list[tuple[int, int]]:
    """Sizes scaled down by about `scale`, one for each number of token columns, each as high as the limits allow."""
    sizes = []
    for columns in range(1, settings.max_side // settings.token_size + 1):
        a = (settings.token_size * (columns - 1) + 1.01) / settings.patch_size
        b = min(settings.in_patch_limit / a, settings.patch_limit_on_one_side)
        sizes.append((round(a / scale) * settings.patch_size, round(b / scale) * settings.patch_size))
    return sizes


def _better(best: WorstCase, size: tuple[int, int], settings: ImageSettings) -> WorstCase:
    tokens = image_geometry(*size, settings).num_tokens
    return WorstCase(size, tokens) if tokens > best.num_tokens else best


def _bound(scale: float, settings: ImageSettings) -> int:
    """Upper bound of the tokens of every size whose scale is at most `scale`; grows with `scale`.

    With W = w // p, a = W s, b = H s: a b <= L, a and b <= S, and a resized side is at most p a + (p - 1) s. C token
    columns need a resized width of m p (C - 1) + 1 or more, hence a least a, hence a largest b, hence a largest height.
    """
    patch, token, side = settings.patch_size, settings.token_size, settings.patch_limit_on_one_side
    columns = np.arange(1, settings.max_side // token + 1)
    least = np.maximum((token * (columns - 1) + 1 - (patch - 1) * scale) / patch, 1e-9)
    height = patch * np.minimum(settings.in_patch_limit / least, side) + (patch - 1) * scale
    height = np.clip(np.floor(height + 1e-6), 1, settings.max_side)
    return int((columns * np.ceil(height / token)).max())


def _smallest_useful_scale(tokens: int, settings: ImageSettings) -> float:
    """A scale at and below which no size costs more than `tokens` (bisection, rounded down)."""
    low, high = 1e-3, 1.0
    if _bound(high, settings) <= tokens:
        return high
    if _bound(low, settings) > tokens:
        return low
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _bound(middle, settings) <= tokens else (low, middle)
    return low


def _search_column(columns: int, longest: int, best: WorstCase, settings: ImageSettings) -> WorstCase:
    """All sizes with w // p == `columns` (and narrower ones for 1), h // p <= `longest`, that could beat `best`."""
    patch, merge, limit = settings.patch_size, settings.merge, settings.in_patch_limit
    side, token = settings.max_side, settings.token_size
    rows = np.arange(1, longest + 1, dtype=np.float64)
    scale = np.minimum(1.0, np.sqrt(limit / (columns * rows)))
    reach = [(count * scale + ((patch - 1) * scale + token - 1) / patch) / merge for count in (float(columns), rows)]
    # Each factor is also limited by the side; a column whose bound cannot exceed the best is skipped unseen.
    bound = np.minimum(reach[0], side // token) * np.minimum(reach[1], side // token) + 1e-6
    rows = rows[bound > best.num_tokens]
    if not rows.size:
        return best
    remainder = np.arange(patch, dtype=np.float64)
    width = (columns * patch + remainder)[None, :, None]
    height = (rows[:, None] * patch + remainder[None, :])[:, None, :]
    scale = np.minimum(1.0, np.sqrt(limit / (columns * rows)))[:, None, None]
    scale = np.minimum(np.minimum(scale, side / width), side / height)
    resized_w = np.clip(np.trunc(width * scale), 1, side)
    resized_h = np.clip(np.trunc(height * scale), 1, side)
    tokens = np.ceil(resized_w / token) * np.ceil(resized_h / token)
    index = np.unravel_index(int(tokens.argmax()), tokens.shape)
    size = (int(width[0, index[1], 0]), int(height[index[0], 0, index[2]]))
    return _better(best, size, settings)


def _pixels(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ImageError(f"image {name} is {value!r}; it must be a positive number of pixels")
    return int(value)
