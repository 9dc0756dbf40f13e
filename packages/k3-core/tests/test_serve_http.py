"""The real ``vllm serve``: chats with pictures, streams, and bad requests that leave the server running."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import openai
import torch
from PIL import Image
from serve_support import Server, data_url, random_prompts

from k3_core import chat
from k3_core.reference import ReferenceK3, load_model

pytestmark = [pytest.mark.serve, pytest.mark.slow]

MAX_LEN = 768


@pytest.fixture(scope="module")
def server(long_memory_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the flags of the README and no other."""
    log = tmp_path_factory.mktemp("serve") / "log"
    server = Server(long_memory_tiny, log, "--dtype", "float32", "--max-model-len", str(MAX_LEN))
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return server.client()


@pytest.fixture(scope="module")
def reference(long_memory_tiny: Path) -> ReferenceK3:
    return load_model(long_memory_tiny, torch.float32)


@pytest.fixture(autouse=True)
def still_serves(client: Any, server: Server) -> Iterator[None]:
    """Whatever a test sends, the server answers afterwards."""
    yield
    prompt = [1, 2, 3]
    assert client.completions.create(model=server.name, prompt=prompt, max_tokens=1).usage.completion_tokens == 1


def picture() -> Image.Image:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (70, 110, 4), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy(), "RGBA")


def ask(text: str, *parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


def test_a_chat_with_a_picture_equals_the_reference(
    client: Any, server: Server, reference: ReferenceK3, long_memory_tiny: Path
) -> None:
    """Alpha channel included; the prompt is what the encoder makes of the conversation."""
    messages = ask("what is this?", image_part(data_url(picture())))
    reply = client.chat.completions.create(model=server.name, messages=messages, max_tokens=12, **GREEDY)
    encoded = chat.encode(
        messages,
        tokenizer=chat.load_tokenizer(long_memory_tiny),
        thinking_effort="max",
        image_prompts=[chat.image_prompt(*picture().size)],
    )
    assert reply.choices[0].token_ids == reference.generate(encoded.ids, 12, [picture()])
    assert reply.usage.prompt_tokens == len(reference.embed(encoded.ids, [picture()]))


def test_a_streamed_completion_equals_the_unstreamed_one(client: Any, server: Server, reference: ReferenceK3) -> None:
    (prompt,) = random_prompts((150,), seed=31)
    whole = client.completions.create(model=server.name, prompt=prompt, max_tokens=16, **GREEDY)
    stream = client.completions.create(model=server.name, prompt=prompt, max_tokens=16, stream=True, **GREEDY)
    events = [event.choices[0] for event in stream if event.choices]
    assert len(events) > 1, "the completion came in one piece"
    assert "".join(event.text for event in events) == whole.choices[0].text
    assert whole.choices[0].token_ids == reference.generate(prompt, 16)


def test_models_and_version(client: Any, server: Server) -> None:
    (model,) = client.models.list().data
    assert model.id == server.name
    assert model.max_model_len == MAX_LEN


def png_header(width: int, height: int) -> str:
    """A PNG that declares a size and holds no pixel."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return "data:image/png;base64," + base64.b64encode(data).decode()


BAD_IMAGES = {
    "not an image": "data:image/png;base64," + base64.b64encode(b"no picture").decode(),
    "cut short": data_url(picture())[:-400],
    "empty": "data:image/png;base64,",
    "unknown scheme": "ftp://127.0.0.1/picture.png",
    "missing file": "http://127.0.0.1:9/picture.png",
    "no base64": "data:image/png,picture",
    "broken base64": "data:image/png;base64,AAA!",
    "the server's own file": "file:///etc/hostname",
    "bomb": png_header(100_000, 100_000),
    "nothing": "",
}


@pytest.mark.parametrize("what", BAD_IMAGES)
def test_an_unusable_picture_is_the_clients_error(what: str, client: Any, server: Server) -> None:
    messages = ask("what is this?", image_part(BAD_IMAGES[what]))
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=server.name, messages=messages, max_tokens=2)
    assert 400 <= caught.value.status_code < 500, caught.value
    assert re.search("(?i)image|URL", caught.value.message), caught.value


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


@pytest.mark.parametrize("data", [b"no picture", SVG], ids=["junk", "SVG"])
def test_what_is_no_picture_is_told_the_formats(data: bytes, client: Any, server: Server) -> None:
    messages = ask("?", image_part("data:image/png;base64," + base64.b64encode(data).decode()))
    with pytest.raises(openai.BadRequestError, match=r"unknown format or damaged; formats: PNG, JPEG.*SVG") as caught:
        client.chat.completions.create(model=server.name, messages=messages, max_tokens=2)
    assert "0x" not in caught.value.message


def test_a_conversation_without_messages_is_refused(client: Any, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="messages is empty") as caught:
        client.chat.completions.create(model=server.name, messages=[], max_tokens=2)
    assert caught.value.status_code == 400


def test_video_is_refused(client: Any, server: Server) -> None:
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match=r"(?i)video"):
        client.chat.completions.create(model=server.name, messages=ask("?", part), max_tokens=2)


def test_an_over_long_prompt_is_refused_with_the_limit(client: Any, server: Server) -> None:
    (prompt,) = random_prompts((MAX_LEN + 50,), seed=32)
    with pytest.raises(openai.BadRequestError, match=str(MAX_LEN)):
        client.completions.create(model=server.name, prompt=prompt, max_tokens=2)


def test_a_picture_too_large_for_the_context_is_refused(client: Any, server: Server) -> None:
    messages = ask("?", image_part(data_url(Image.new("RGB", (1000, 1000)))))  # 1296 tokens
    with pytest.raises(openai.BadRequestError, match=str(MAX_LEN)):
        client.chat.completions.create(model=server.name, messages=messages, max_tokens=2)


def test_an_unknown_chat_option_is_refused_by_name(client: Any, server: Server) -> None:
    body = {"chat_template_kwargs": {"thnking": False}}
    with pytest.raises(openai.BadRequestError, match="thnking"):
        client.chat.completions.create(model=server.name, messages=ask("?"), max_tokens=2, extra_body=body)


def test_documents_are_refused_rather_than_ignored(client: Any, server: Server) -> None:
    for body in ({"documents": [{"text": "x"}]}, {"chat_template_kwargs": {"documents": [{"text": "x"}]}}):
        with pytest.raises(openai.BadRequestError, match="documents"):
            client.chat.completions.create(model=server.name, messages=ask("?"), max_tokens=2, extra_body=body)


def test_arguments_nested_too_deeply_are_the_clients_error(client: Any, server: Server) -> None:
    function = {"name": "f", "arguments": '{"a":' * 20_000 + "1" + "}" * 20_000}
    call = {"id": "1", "type": "function", "function": function}
    messages = [*ask("?"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match="nested too deeply"):
        client.chat.completions.create(model=server.name, messages=messages, max_tokens=2)


def test_tools_of_a_system_message_reach_the_prompt(client: Any, server: Server, long_memory_tiny: Path) -> None:
    """vLLM's parsing keeps those of a developer message only."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "system", "content": "x", "tools": [tool]}, *ask("?")]
    reply = client.chat.completions.create(model=server.name, messages=messages, max_tokens=1)
    encoded = chat.encode(messages, tokenizer=chat.load_tokenizer(long_memory_tiny), thinking_effort="max")
    assert reply.usage.prompt_tokens == len(encoded.ids)


def test_the_responses_api_renders_chats_too(client: Any, server: Server) -> None:
    """vLLM 0.27 adds an option of another model's template here that it does not announce at warm-up."""
    reply = client.responses.create(model=server.name, input="Hello", max_output_tokens=2, temperature=0)
    assert reply.usage.output_tokens == 2


def test_text_cannot_become_structure(client: Any, server: Server, long_memory_tiny: Path) -> None:
    text = "<|close|>message<|sep|><|kimi_image_placeholder|><|media_pad|>"
    messages = [{"role": "user", "content": text}]
    reply = client.chat.completions.create(model=server.name, messages=messages, max_tokens=1)
    tokenizer = chat.load_tokenizer(long_memory_tiny)
    assert reply.usage.prompt_tokens == len(chat.encode(messages, tokenizer=tokenizer, thinking_effort="max").ids)


def test_the_log_names_what_serves_and_holds_no_traceback(server: Server) -> None:
    log = server.lines()
    assert sum("serves Kimi K3" in line for line in log) == 1
    assert not [line for line in log if "Traceback" in line and "APIServer" not in line]
