"""Served image requests are the reference's: many at once, cut by chunk boundaries, from cached prefixes, preempted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from PIL import Image
from serve_support import Engine, random_prompts

from k3_core import chat
from k3_core.reference import ReferenceK3, load_model

pytestmark = [pytest.mark.serve, pytest.mark.slow]

BLOCK = 128
Request = tuple[list[int], list[Image.Image]]


@pytest.fixture(scope="module")
def reference(long_memory_tiny: Path) -> ReferenceK3:
    return load_model(long_memory_tiny, torch.float32)


@pytest.fixture(scope="module")
def tokenizer(long_memory_tiny: Path) -> chat.K3Tokenizer:
    return chat.load_tokenizer(long_memory_tiny)


@pytest.fixture(scope="module")
def engine(long_memory_tiny: Path, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(long_memory_tiny, max_num_batched_tokens=64, enable_prefix_caching=True)


@pytest.fixture(autouse=True)
def forget(engine: Engine) -> None:
    engine.forget()


def picture(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = torch.randint(0, 256, (height, width, channels), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.squeeze(-1).numpy(), mode)


def request(tokenizer: chat.K3Tokenizer, seed: int, *images: Image.Image) -> Request:
    """A prompt with text before, between and after its images; one pad an image."""
    before, *between = random_prompts((9, *(6 + i for i in range(len(images)))), seed)
    ids = list(before)
    for image, text in zip(images, between, strict=True):
        ids += tokenizer.encode(chat.image_prompt(*image.size), allow_special=True) + text
    return ids, list(images)


def check(engine: Engine, reference: ReferenceK3, requests: list[Request], count: int = 10) -> None:
    prompts, images = zip(*requests, strict=True)
    expected = [reference.generate(ids, count, pictures or None) for ids, pictures in requests]
    assert engine.tokens(prompts, count, images) == expected


def test_concurrent_requests_with_and_without_images(
    engine: Engine, reference: ReferenceK3, tokenizer: chat.K3Tokenizer
) -> None:
    requests = [
        request(tokenizer, 1, picture(30, 16, 1)),
        request(tokenizer, 2),
        request(tokenizer, 3, picture(300, 200, 2)),  # 88 tokens: more than a step
        request(tokenizer, 4, picture(56, 56, 3), picture(100, 60, 4, "RGBA"), picture(45, 131, 5)),
        request(tokenizer, 5, picture(448, 448, 6)),  # 256 tokens
        request(tokenizer, 6, picture(64, 48, 7, "L")),
        request(tokenizer, 7, *(picture(60, 60, 10 + i) for i in range(8))),
        request(tokenizer, 8),
        request(tokenizer, 9, picture(20, 300, 8, "LA")),
        request(tokenizer, 10, picture(200, 30, 9)),
        request(tokenizer, 11, picture(57, 29, 20), picture(57, 29, 21)),
        request(tokenizer, 12, picture(1, 1, 22)),
    ]
    check(engine, reference, requests)
    assert any(row.num_prompt > 200 and row.is_chunk for row in engine.chunks())


def test_an_image_is_part_of_the_cached_prefix(
    engine: Engine, reference: ReferenceK3, tokenizer: chat.K3Tokenizer
) -> None:
    """A, then B with another picture of the same size and the same ids, then A again: only A may hit."""
    one, two = picture(300, 300, 31), picture(300, 300, 32)
    first, other = request(tokenizer, 21, one), request(tokenizer, 21, two)
    assert first[0] == other[0]
    for (ids, images), hit in ((first, 0), (other, 0), (first, BLOCK)):
        (output,) = engine.generate([ids], 10, [images])
        assert list(output.outputs[0].token_ids) == reference.generate(ids, 10, images)
        assert (output.num_cached_tokens >= BLOCK) == bool(hit)


def test_transparency_alone_tells_two_images_apart(
    engine: Engine, reference: ReferenceK3, tokenizer: chat.K3Tokenizer
) -> None:
    """Same mode, palette and indices; another transparent entry. vLLM's own key of the picture is the same."""
    plain = picture(80, 60, 41, "L").quantize(8)
    requests = []
    for entry in (0, 3):
        image = plain.copy()
        image.info["transparency"] = entry
        requests.append(request(tokenizer, 22, image))
    for one in requests:
        check(engine, reference, [one])
    assert reference.generate(*requests[0][:1], 10, requests[0][1]) != reference.generate(
        requests[1][0], 10, requests[1][1]
    ), "the two pictures give the same tokens: the test shows nothing"


def test_pad_ids_are_ordinary_without_images_and_refused_beside_them(
    engine: Engine, reference: ReferenceK3, tokenizer: chat.K3Tokenizer
) -> None:
    """The released model embeds [PAD] as zeros beside images only; vLLM embeds the requests of a step together."""
    ids, images = request(tokenizer, 51, picture(60, 60, 51))
    text = [*random_prompts((7,), 52)[0], tokenizer.pad_id, 3, 4]
    check(engine, reference, [(text, []), (ids, images)])
    with pytest.raises(ValueError, match=f"pad_token_id = {tokenizer.pad_id} beside an image"):
        engine.generate([[tokenizer.pad_id, *ids]], 2, [images])
    check(engine, reference, [(ids, images)])


def test_images_of_preempted_requests_are_encoded_again(
    long_memory_tiny: Path, start_engine: Callable[..., Engine], reference: ReferenceK3, tokenizer: chat.K3Tokenizer
) -> None:
    """Runs last: it replaces the engine by one with a cache for hardly two requests."""
    engine = start_engine(
        long_memory_tiny,
        max_model_len=384,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        num_gpu_blocks_override=10,
    )
    requests = [request(tokenizer, 50 + i, picture(400, 384 + 14 * i, 50 + i)) for i in range(4)]
    check(engine, reference, requests, 24)
    assert engine.preemptions > 0, "nothing was preempted: the cache is too large for this test"
