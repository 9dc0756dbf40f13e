"""What the renderer adds to vLLM's parsing of a chat, without a server: error classes, lost fields, vocabulary."""

import binascii
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import chat_cases as cases
from PIL import Image

from k3_core import chat
from k3_core.errors import ChatError, ConfigError, ImageError
from k3_core.vllm import renderer
from k3_core.vllm.processor import plain_image

TOKENIZER = chat.load_tokenizer(cases.DATA)
TOOL = {"type": "function", "function": {"name": "f", "description": None}}

CLIENTS: dict[str, tuple[Exception, type[Exception]]] = {
    "bomb": (Image.DecompressionBombError("10000000000 pixels"), ImageError),
    "no base64": (NotImplementedError("Only base64 data URLs are supported"), ImageError),
    "broken base64": (binascii.Error("Non-base64 digit found"), ImageError),
    "own disk": (RuntimeError("Cannot load local files without `--allowed-local-media-path`."), ImageError),
    "unreachable": (OSError("no route"), ImageError),
    "slow": (TimeoutError(), ImageError),
    "deep arguments": (RecursionError("maximum recursion depth exceeded"), ChatError),
}


@pytest.mark.parametrize("what", CLIENTS)
def test_an_error_of_the_request_is_a_value_error(what: str) -> None:
    raised, wanted = CLIENTS[what]
    with pytest.raises(wanted) as caught, renderer._clients_errors():
        raise raised
    assert isinstance(caught.value, ValueError)  # vLLM answers 400
    assert "\n" not in str(caught.value)
    assert wanted is ChatError or "image" in str(caught.value)  # the sentence says what part of the request it is about


def test_an_error_of_the_server_stays_one() -> None:
    with pytest.raises(RuntimeError, match="shutdown"), renderer._clients_errors():
        raise RuntimeError("cannot schedule new futures after shutdown")


def test_fields_that_vllm_drops_come_back() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "x", "tools": [TOOL]},
        {"role": "developer", "content": "y", "tools": [TOOL]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    parsed = [{"role": "system", "content": "x"}, {**messages[1], "tools": ["parsed"]}, {"role": "assistant"}]
    rows = renderer._with_lost_fields(parsed, messages)
    assert rows[0]["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert rows[1:] == parsed[1:]
    assert renderer._with_lost_fields(parsed[:1], messages) == parsed[:1]


@pytest.mark.parametrize(
    ("field", "words"), [("tools", "only a system message"), ("function_call", "function_call is not supported")]
)
def test_a_lost_field_that_means_nothing_here_is_refused(field: str, words: str) -> None:
    messages = [{"role": "user", "content": "x", field: [TOOL]}]
    rows = renderer._with_lost_fields([{"role": "user", "content": "x"}], messages)
    with pytest.raises(ChatError, match=words):
        chat.encode(rows, tokenizer=TOKENIZER)


def model_config(media: int | None, vocabulary: int) -> Any:
    return SimpleNamespace(
        hf_config=SimpleNamespace(media_placeholder_token_id=media), get_vocab_size=lambda: vocabulary
    )


def test_config_and_vocabulary_must_belong_together() -> None:
    renderer.check_vocabulary(model_config(TOKENIZER.media_pad_id, TOKENIZER.vocab_size), TOKENIZER)
    renderer.check_vocabulary(model_config(None, TOKENIZER.vocab_size + 64), TOKENIZER)
    with pytest.raises(ConfigError, match=f"media_placeholder_token_id = 1, .* token {TOKENIZER.media_pad_id}"):
        renderer.check_vocabulary(model_config(1, TOKENIZER.vocab_size), TOKENIZER)
    with pytest.raises(ConfigError, match="vocab_size = 512"):
        renderer.check_vocabulary(model_config(TOKENIZER.media_pad_id, 512), TOKENIZER)


def test_an_image_part_without_image_is_refused_by_name() -> None:
    with pytest.raises(ImageError, match="uuid"):
        plain_image(None)


def test_documents_are_refused() -> None:
    def params(**given: Any) -> Any:
        return SimpleNamespace(get_apply_chat_template_kwargs=lambda: given)

    assert renderer.encode_options(params(documents=None))["thinking"] is True
    with pytest.raises(ChatError, match="documents"):
        renderer.encode_options(params(documents=[{"text": "x"}]))
