"""Image prompts of the reference against the released code."""

import functools
import shutil
from typing import Any

import golden_data
import numpy as np
import pytest
import torch
from PIL import Image

from k3_core.errors import ConfigError, ImageError
from k3_core.reference import ReferenceK3, load_model

PROMPTS = ["img_rgb_56x56", "img_rgba_100x60", "img_rgb_pad_45x131", "all_three", "text_placeholder"]
PAD = 767


@functools.cache
def model(dtype: torch.dtype = torch.float32) -> ReferenceK3:
    return load_model(golden_data.checkpoint("k3-tiny"), dtype)


@functools.cache
def recorded() -> dict[str, Any]:
    return golden_data.load_json("k3-tiny-goldens/vision.json")


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    return golden_data.arrays("k3-tiny-goldens/vision.npz")


def images(prompt: str) -> list[Image.Image]:
    names = recorded()["prompts"][prompt]["images"]
    return [Image.open(golden_data.path(f"k3-tiny-goldens/images/{name}.png")) for name in names]


def ids(prompt: str) -> list[int]:
    return recorded()["prompts"][prompt]["input_ids_one_pad_per_image"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_at_every_expanded_position(prompt):
    logits = model().logits(ids(prompt), images(prompt))
    theirs = torch.from_numpy(arrays()[f"{prompt}.fp32.logits"])
    assert logits.shape == theirs.shape
    assert logits.shape[0] == len(recorded()["prompts"][prompt]["input_ids_expanded"])
    assert (logits - theirs).abs().max() < 2e-3


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens(prompt):
    row = recorded()["prompts"][prompt]
    margins = row["greedy_margins_fp32"]
    certain = next((step for step, margin in enumerate(margins) if margin < 2e-3), len(margins))
    assert certain == 16
    assert model().generate(ids(prompt), 16, images(prompt)) == row["greedy_fp32"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_bf16(prompt):
    ours = model(torch.bfloat16).logits(ids(prompt), images(prompt))
    theirs = torch.from_numpy(arrays()[f"{prompt}.fp32.logits"])
    assert (ours - theirs).square().mean().sqrt() <= 0.4
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.8


def test_encoded_images():
    features, counts = model().encode_images(images("all_three"))
    assert counts == [4, 12, 10]
    expected = [arrays()[f"{name}.projector_fp32"] for name in recorded()["prompts"]["all_three"]["images"]]
    assert (features - torch.from_numpy(np.concatenate(expected))).abs().max() < 1e-4


def test_the_pad_token_is_zeroed_only_beside_images():
    """The released multimodal forward zeroes the embedding at pad_token_id, the text-only one does not."""
    assert model().embed([5, PAD])[1].abs().max() > 1
    with_image = model().embed([5, PAD, 533, PAD], [Image.new("RGB", (28, 28))])
    assert not with_image[1].any()
    assert not with_image[3].any()
    assert with_image[0].any()
    assert with_image[2].any()


def test_image_order_matters():
    swapped = [1, 0, 2]
    right, three = model().logits(ids("all_three"), images("all_three")), images("all_three")
    wrong = model().logits(ids("all_three"), [three[i] for i in swapped])
    assert (right[-1] - wrong[-1]).abs().max() > 0.05


def test_prefill_of_an_image_prompt_cut_inside_the_image():
    embeddings = model().embed(ids("all_three"), images("all_three"))
    whole = model().forward(embeddings).logits
    cache = model().new_cache()
    pieces = [model().forward(piece, cache).logits for piece in embeddings.split([30, 1, 20, 40, 26])]
    assert (torch.cat(pieces) - whole).abs().max() < 2e-3


@pytest.mark.parametrize(("pads", "given"), [(0, 1), (1, 2), (2, 1)])
def test_pads_and_images_must_agree(pads, given):
    with pytest.raises(ImageError, match=f"{pads} image pad"):
        model().logits([1, *([533] * pads), 2], [Image.new("RGB", (28, 28))] * given)


def test_a_bad_image_is_refused():
    with pytest.raises(ImageError, match="at least 1"):
        model().logits([1, 533], [Image.new("RGB", (0, 4))])


def test_images_need_the_preprocessor_config(tmp_path):
    shutil.copytree(golden_data.checkpoint("k3-tiny"), tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    loaded = load_model(tmp_path / "model")
    assert loaded.logits([1, 2]).isfinite().all(), "text works without it"
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        loaded.logits([1, 533], [Image.new("RGB", (28, 28))])
