"""Placeholders, pads and limits."""

import golden_data
import pytest

from k3_core.errors import ImageError
from k3_core.multimodal import (
    IMAGE_PLACEHOLDER,
    MEDIA_PAD,
    check_prompt_images,
    expand_pads,
    fill_placeholders,
    image_geometry,
    image_prompt,
    split_at_placeholders,
)


def test_image_prompt_holds_the_original_size():
    assert image_prompt(7300, 30) == "<|media_begin|>image 7300x30<|media_content|><|media_pad|><|media_end|>"
    expanded = image_prompt(45, 131, image_geometry(45, 131).num_tokens)
    assert expanded.count(MEDIA_PAD) == 10
    with pytest.raises(ImageError):
        image_prompt(1, 1, 0)


def test_recorded_prompts():
    recorded = golden_data.load_json("k3-tiny-goldens/vision.json")
    images = recorded["images"]
    for image in images.values():
        assert image_prompt(*image["size"]) == image["prompt"]
        assert image_geometry(*image["size"]).num_tokens == image["tokens"]
    assert len(recorded["prompts"]) == 5
    for prompt in recorded["prompts"].values():
        counts = [images[name]["tokens"] for name in prompt["images"]]
        assert expand_pads(prompt["input_ids_one_pad_per_image"], counts, 533) == prompt["input_ids_expanded"]
    text = recorded["prompts"]["text_placeholder"]
    filled = fill_placeholders(text["messages"][0]["content"], [images["rgba_100x60"]["prompt"]])
    assert filled in text["text"]


def test_placeholders_are_filled_in_order():
    text = f"a{IMAGE_PLACEHOLDER}b{IMAGE_PLACEHOLDER}"
    assert split_at_placeholders(text) == ["a", "b", ""]
    assert fill_placeholders(text, ["<1>", "<2>"]) == "a<1>b<2>"
    assert fill_placeholders("plain", []) == "plain"


def test_a_filled_prompt_is_not_searched_again():
    assert fill_placeholders(IMAGE_PLACEHOLDER, [IMAGE_PLACEHOLDER]) == IMAGE_PLACEHOLDER


@pytest.mark.parametrize(("placeholders", "images"), [(0, 1), (1, 0), (2, 1), (1, 3)])
def test_numbers_must_agree(placeholders, images):
    with pytest.raises(ImageError, match="must agree"):
        fill_placeholders(IMAGE_PLACEHOLDER * placeholders, ["x"] * images)
    with pytest.raises(ImageError, match="must agree"):
        expand_pads([1, *([9] * placeholders), 2], [3] * images, 9)


def test_pads_expand_in_order():
    assert expand_pads([1, 9, 2, 9], [2, 3], 9) == [1, 9, 9, 2, 9, 9, 9]
    assert expand_pads([1, 2], [], 9) == [1, 2]
    with pytest.raises(ImageError, match="positive"):
        expand_pads([9], [0], 9)


def test_limits_of_a_prompt():
    check_prompt_images([10, 20])
    check_prompt_images([10, 20], max_images=2, max_tokens=30)
    with pytest.raises(ImageError, match="2 images; at most 1"):
        check_prompt_images([10, 20], max_images=1)
    with pytest.raises(ImageError, match="30 tokens; at most 29"):
        check_prompt_images([10, 20], max_tokens=29)
    with pytest.raises(ImageError, match="at most 0"):
        check_prompt_images([1], max_images=0)
