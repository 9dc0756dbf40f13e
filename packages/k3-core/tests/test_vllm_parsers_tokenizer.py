"""The tokenizer as vLLM sees it: its own detokeniser, templates, truncation, pickling."""

import copy
import json
import pickle
from typing import Any

import pytest

pytest.importorskip("vllm")

import chat_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.tokenizers.detokenizer_utils import detokenize_incrementally

from k3_core.errors import ChatError
from k3_core.vllm.tokenizer import KimiK3Tokenizer

TOKENIZER = KimiK3Tokenizer.from_pretrained(cases.DATA)
GOLDEN: dict[str, Any] = json.loads((cases.DATA / "chat.json").read_text(encoding="utf-8"))


def vllm_text(ids: list[int]) -> list[str]:
    """Text of each token as vLLM's incremental detokeniser gives it."""
    texts: list[str] = []
    seen: list[int] = []
    tokens: Any = None
    prefix = read = 0
    for token in ids:
        seen.append(token)
        new, text, prefix, read = detokenize_incrementally(
            TOKENIZER, seen, tokens, prefix, read, skip_special_tokens=False, spaces_between_special_tokens=False
        )
        tokens = new if tokens is None else tokens + new
        texts.append(text)
    return texts


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40), st.booleans())
def test_vllm_detokenises_what_we_encoded(text: str, marked: bool) -> None:
    ids = TOKENIZER.encode(text, allow_special_tokens=False)
    ids = [TOKENIZER.k3.open_id, *ids, TOKENIZER.k3.sep_id, TOKENIZER.k3.sep_id] if marked else ids
    assert "".join(vllm_text(ids)) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("name", [name for name in sorted(GOLDEN) if not name.startswith(("E", "14", "18"))])
def test_chat_template_is_the_released_tokenizers(name: str) -> None:
    case = GOLDEN[name]
    assert (
        TOKENIZER.apply_chat_template(
            case["input"]["messages"], **{k: v for k, v in case["input"].items() if k != "messages"}
        )
        == (case["tokenizer_default"]["ids"])
    )
    text = TOKENIZER.apply_chat_template(**{**case["input"], "tokenize": False})
    assert text == case["tokenizer_default"]["text"]


def test_null_tool_fields_of_request_models_are_dropped() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}
    dumped = {"type": "function", "strict": None, "function": {**tool["function"], "description": None, "strict": None}}  # type: ignore[dict-item]
    messages = [{"role": "user", "content": "x"}]
    assert TOKENIZER.apply_chat_template(messages, [dumped]) == TOKENIZER.apply_chat_template(messages, [tool])
    assert '"default":null' in TOKENIZER.apply_chat_template(messages, [tool], tokenize=False)


@pytest.mark.parametrize(
    "options",
    [{"colour": "red"}, {"continue_final_message": True}, {"chat_template": "{{ x }}"}, {"reasoning_effort": "medium"}],
)
def test_unknown_template_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ChatError):
        TOKENIZER.apply_chat_template([{"role": "user", "content": "x"}], **options)


def test_prompts_of_completions() -> None:
    text = "<|open|>message<|sep|>é"
    ids = TOKENIZER.encode(text)
    assert ids[0] == TOKENIZER.k3.open_id
    encoding = TOKENIZER(text, return_offsets_mapping=True)
    assert encoding["input_ids"] == ids
    assert [text[a:b] for a, b in encoding["offset_mapping"]][:2] == ["<|open|>", "message"]
    assert TOKENIZER([text, "a"])["input_ids"] == [ids, TOKENIZER.encode("a")]
    assert TOKENIZER.encode(text, truncation=True, max_length=2) == ids[-2:]
    right = KimiK3Tokenizer.from_pretrained(cases.DATA, truncation_side="right")
    assert right.encode(text, truncation=True, max_length=2) == ids[:2]


def test_protocol() -> None:
    assert (len(TOKENIZER), TOKENIZER.vocab_size, TOKENIZER.max_token_id) == (768, 768, 767)
    assert TOKENIZER.get_vocab()["<|open|>"] == 515
    assert len(TOKENIZER.get_vocab()) == 768
    assert set(TOKENIZER.all_special_ids) == set(range(512, 768))
    for token in range(768):
        string = TOKENIZER.convert_ids_to_tokens(token)
        assert TOKENIZER.convert_tokens_to_ids(string) == token
        assert TOKENIZER.convert_tokens_to_string([string]) == TOKENIZER.decode([token])
    assert TOKENIZER.convert_ids_to_tokens([515, 97], skip_special_tokens=True) == ["a"]
    assert TOKENIZER.decode([97, 5_000_000]) == "a"
    assert TOKENIZER.num_special_tokens_to_add() == 0


def test_copies() -> None:
    for other in (pickle.loads(pickle.dumps(TOKENIZER)), copy.deepcopy(TOKENIZER)):
        assert other.encode("abc é") == TOKENIZER.encode("abc é")
        assert other.name_or_path == TOKENIZER.name_or_path
