"""Where an image stands in a prompt: its text, its tokens, its limits. Pure functions, no tokenizer.

One image of W x H **original** pixels that costs n tokens is written

    <|media_begin|>image WxH<|media_content|> n x <|media_pad|> <|media_end|>

The released processor writes one pad and expands it inside the model; servers write all n. The four markers are special
tokens; the text between the first two is encoded in the same call as the markers, so it is one piece here.
"""

from collections.abc import Sequence
from typing import Final

from k3_core.errors import ImageError

MEDIA_BEGIN: Final = "<|media_begin|>"
MEDIA_CONTENT: Final = "<|media_content|>"
MEDIA_PAD: Final = "<|media_pad|>"
MEDIA_END: Final = "<|media_end|>"
IMAGE_PLACEHOLDER: Final = "<|kimi_image_placeholder|>"
"""What clients may write for "the next image"; found as text, whatever ids a vocabulary gives it."""


def image_prompt(width: int, height: int, num_tokens: int = 1) -> str:
    """The text of one image: original size in pixels, `num_tokens` pads (1 is the released, unexpanded form)."""
    if num_tokens < 1:
        raise ImageError(f"an image cannot take {num_tokens} tokens; image_geometry gives the count")
    return f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{MEDIA_PAD * num_tokens}{MEDIA_END}"


def split_at_placeholders(text: str) -> list[str]:
    """The pieces of `text` around each placeholder: one more than there are placeholders."""
    return text.split(IMAGE_PLACEHOLDER)


def fill_placeholders(text: str, prompts: Sequence[str]) -> str:
    """`text` with each placeholder replaced by the next of `prompts` (see `image_prompt`).

    Raises ImageError unless there are as many images as placeholders.
    """
    pieces = split_at_placeholders(text)
    _require_equal(len(pieces) - 1, len(prompts), "image placeholders in the text")
    filled = pieces[0]
    for prompt, piece in zip(prompts, pieces[1:], strict=True):
        filled += prompt + piece
    return filled


def expand_pads(input_ids: Sequence[int], counts: Sequence[int], pad_id: int) -> list[int]:
    """Ids with the single pad of each image repeated `counts[image]` times, in order.

    Raises ImageError unless there is exactly one pad for each image.
    """
    _require_equal(sum(token == pad_id for token in input_ids), len(counts), "image pad tokens in the prompt")
    if any(count < 1 for count in counts):
        raise ImageError(f"image token counts {list(counts)} must all be positive")
    remaining = iter(counts)
    expanded: list[int] = []
    for token in input_ids:
        expanded.extend([token] * (next(remaining) if token == pad_id else 1))
    return expanded


def check_prompt_images(counts: Sequence[int], max_images: int | None = None, max_tokens: int | None = None) -> None:
    """Refuse a prompt whose images are too many or cost too many tokens (`counts`, one number an image).

    Raises ImageError saying the number and the limit; None means no limit of that kind.
    """
    if max_images is not None and len(counts) > max_images:
        raise ImageError(f"the prompt has {len(counts)} images; at most {max_images} are accepted per prompt")
    if max_tokens is not None and sum(counts) > max_tokens:
        raise ImageError(
            f"the {len(counts)} images of the prompt take {sum(counts)} tokens; at most {max_tokens} fit, "
            "send fewer or smaller images"
        )


def _require_equal(found: int, images: int, what: str) -> None:
    if found != images:
        raise ImageError(f"found {found} {what} but {images} image{'' if images == 1 else 's'}; they must agree")
