"""The encoder against the released one (goldens), and what it refuses."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from k3_core.chat import (
    drop_null_fields,
    encode,
    image_prompt,
    load_tokenizer,
    remember_fields,
    resolve_thinking,
    restore_fields,
)
from k3_core.chat.arguments import encode_arguments
from k3_core.errors import ChatError

DATA = Path(__file__).parent / "data" / "chat"
GOLDEN: dict[str, Any] = json.loads((DATA / "chat.json").read_text(encoding="utf-8"))
DIFFERENT = {"14_developer_role", "18_arg_placeholder"}
SAME = sorted(name for name in GOLDEN if not name.startswith("E") and name not in DIFFERENT)
TOKENIZER = load_tokenizer(DATA)


@pytest.mark.parametrize("name", SAME)
def test_equal_to_the_released_encoder(name: str) -> None:
    case = GOLDEN[name]
    encoded = encode(**case["input"], tokenizer=TOKENIZER)
    assert encoded.text == case["encoder"]["text"]
    assert [list(segment) for segment in encoded.segments] == case["encoder"]["segments"]
    assert encoded.ids == case["encoder"]["ids"]


@pytest.mark.parametrize("name", SAME)
def test_default_effort_is_the_released_tokenizers(name: str) -> None:
    case = GOLDEN[name]
    given = {key: case["input"][key] for key in ("thinking", "thinking_effort") if key in case["input"]}
    thinking = resolve_thinking(given)
    options = {**case["input"], "thinking": thinking.thinking, "thinking_effort": thinking.effort}
    encoded = encode(**options, tokenizer=TOKENIZER)
    assert encoded.text == case["tokenizer_default"]["text"]
    assert encoded.ids == case["tokenizer_default"]["ids"]


def test_developer_is_rendered_as_system() -> None:
    """Deliberate difference 1: the released encoder drops the message."""
    case = GOLDEN["14_developer_role"]
    encoded = encode(**case["input"], tokenizer=TOKENIZER)
    assert encoded.ids != case["encoder"]["ids"]
    as_system = [
        {**message, "role": message["role"].replace("developer", "system")} for message in case["input"]["messages"]
    ]
    assert encoded == encode(as_system, tokenizer=TOKENIZER)
    assert encoded.text.startswith('<|open|>message role="system"<|sep|>ignored?<|close|>')
    assert encoded.text.endswith(case["encoder"]["text"])


def test_typed_placeholder_stays_text() -> None:
    """Deliberate difference 2: the released encoder lets typed text take an image."""
    case = GOLDEN["18_arg_placeholder"]["input"]
    with pytest.raises(ChatError, match="image prompt count 1 != consumed placeholder count 0"):
        encode(**case, tokenizer=TOKENIZER)
    encoded = encode(**{**case, "image_prompts": None}, tokenizer=TOKENIZER)
    assert "p <|kimi_image_placeholder|> q" in encoded.text
    assert encoded.images == []
    assert TOKENIZER.media_pad_id not in encoded.ids
    assert TOKENIZER.decode(encoded.ids) == encoded.text


@pytest.mark.parametrize("name", sorted(name for name in GOLDEN if name.startswith("E")))
def test_errors_of_the_released_encoder_are_errors_here(name: str) -> None:
    with pytest.raises(ChatError):
        encode(**GOLDEN[name]["input"], tokenizer=TOKENIZER)


def test_images_bind_to_image_parts_only() -> None:
    typed = "typed <|kimi_image_placeholder|> and <|media_pad|>"
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": typed}, {"type": "image"}, {"type": "text", "text": typed}],
        },
        {"role": "assistant", "reasoning_content": typed, "content": typed},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ]
    prompts = [image_prompt(7, 9), image_prompt(3, 2, num_pads=4)]
    encoded = encode(messages, tokenizer=TOKENIZER, image_prompts=prompts)
    assert [encoded.segments[span.segment].text for span in encoded.images] == prompts
    pads = [position for position, token in enumerate(encoded.ids) if token == TOKENIZER.media_pad_id]
    inside = [p for span in encoded.images for p in range(span.start, span.start + span.length)]
    assert len(pads) == 5
    assert set(pads) <= set(inside)
    for span, prompt in zip(encoded.images, prompts, strict=True):
        assert TOKENIZER.decode(encoded.ids[span.start : span.start + span.length]) == prompt


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            '{"x": 1e2, "l": [1,2], "s": "a\\u00e9\\n"}',
            [("x", "number", "1e2"), ("l", "array", "[1,2]"), ("s", "string", "aé\n")],
        ),
        (
            '{"o": {"k":"\\u00e9 \\ud83c\\udf0a \\u0041 \\\\u00e9"}}',
            [("o", "object", '{"k":"é 🌊 \\u0041 \\\\u00e9"}')],
        ),
        (' { "a" : 1 , "b":2, "a":3 } ', [("a", "number", "3"), ("b", "number", "2")]),
        ("", []),
        (None, []),
        ({"t": (1, 2), "b": False}, [("t", "array", "[1, 2]"), ("b", "boolean", "false")]),
        ('{"n": ' + "9" * 5000 + "}", [("n", "number", "9" * 5000)]),
    ],
)
def test_argument_spelling_is_kept(arguments: Any, expected: list[tuple[str, str, str]]) -> None:
    encoded = encode_arguments(arguments, "here")
    assert not isinstance(encoded, str)
    assert [(item.key, item.type, item.text) for item in encoded] == expected


@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_dumps_arguments_agree_with_values(ascii_only: bool) -> None:
    values = {
        "é🌊": "东\u007f\ud800x",
        "o": {"naïve": ["\x7f\x00", "𝄞", {"q": "\\u00e9"}]},
        "n": -1.5e-7,
        "z": None,
        "e": {},
        "f": [],
    }
    assert encode_arguments(json.dumps(values, ensure_ascii=ascii_only), "x") == encode_arguments(values, "x")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "critic", "content": "a"}]}, "unknown role 'critic'"),
    ({"messages": [{"role": "function", "content": "a"}]}, "unknown role 'function'"),
    ({"messages": [{"content": "a"}]}, "unknown role None"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": ["hello"]}, r"messages\[0\] must be an object"),
    ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content must be text"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "text and image parts, not 'video_url'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "needs a text"),
    ({"messages": [{"role": "user", "content": "a", "tools": [{"function": {"name": "f"}}]}]}, "only a system message"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "function_call is not supported"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "no function name"),
    ({"messages": [{"role": "assistant", "reasoning_content": ["x"]}]}, "reasoning_content must be text"),
    ({"messages": [], "thinking": "yes"}, "thinking must be true or false"),
    ({"messages": [], "add_generation_prompt": 1}, "add_generation_prompt must be"),
    ({"messages": [], "thinking_effort": "medium"}, "Unsupported thinking_effort='medium'"),
    ({"messages": [], "thinking": False, "thinking_effort": "ultra"}, "Unsupported thinking_effort='ultra'"),
    ({"messages": [], "tool_choice": "maybe"}, "tool_choice='maybe' is not understood"),
    (
        {
            "messages": [],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "names the function 'g'",
    ),
    ({"messages": [], "response_format": {"type": "xml"}}, "response_format"),
    ({"messages": [], "response_format": {"type": "json_schema"}}, "needs an object"),
    ({"messages": [], "tools": {"name": "f"}}, "tools must be a list"),
    ({"messages": [], "tools": [{"type": "function", "function": {}}]}, "without a name"),
    (
        {"messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": {1: 2}}}]},
        "keys must be strings",
    ),
    ({"messages": [], "image_prompts": "x"}, "must be a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "image_prompts": ["<|open|>"]}, "no media token"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatError, match=message):
        encode(**options, tokenizer=TOKENIZER)


def test_system_message_with_tools_keeps_its_content() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    both = encode([{"role": "developer", "content": "mind the gap", "tools": tools}], tokenizer=TOKENIZER)
    apart = encode(
        [{"role": "system", "tools": tools}, {"role": "system", "content": "mind the gap"}], tokenizer=TOKENIZER
    )
    assert both == apart


@pytest.mark.parametrize(
    ("kwargs", "effort", "expected"),
    [
        ({}, None, (True, "max")),
        ({"thinking": False}, None, (False, None)),
        ({"enable_thinking": False}, "high", (False, None)),
        ({}, "none", (False, None)),
        ({}, "low", (True, "low")),
        ({"thinking_effort": "high"}, None, (True, "high")),
        ({"thinking": True, "enable_thinking": True}, "low", (True, "low")),
        ({"reasoning_effort": "none"}, None, (False, None)),
    ],
)
def test_resolve_thinking(kwargs: dict[str, Any], effort: str | None, expected: tuple[bool, str | None]) -> None:
    choice = resolve_thinking(kwargs, effort)
    assert (choice.thinking, choice.effort) == expected


@pytest.mark.parametrize(
    ("kwargs", "effort", "message"),
    [
        ({}, "medium", "Unsupported reasoning_effort='medium'"),
        ({"thinking_effort": "none"}, None, "Unsupported thinking_effort='none'"),
        ({"thinking": "false"}, None, "must be true or false"),
        ({"thinking": True, "enable_thinking": False}, None, "both on and off"),
        ({"thinking": True}, "none", "both on and off"),
        ({"thinking_effort": "low"}, "high", "two different efforts"),
        ({"reasoning_effort": "low"}, "high", "given twice"),
        ({"thinking": False, "thinking_effort": "medium"}, None, "Unsupported"),
    ],
)
def test_resolve_thinking_refuses(kwargs: dict[str, Any], effort: str | None, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        resolve_thinking(kwargs, effort)


def test_fields_survive_a_serving_layer() -> None:
    """What vLLM's own parsing of messages loses is put back."""
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"n": 1e2, "l": [1,2]}'}}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "tools": tools},
        {"role": "assistant", "reasoning_content": "hm", "content": None, "tool_calls": iter(calls)},
        {"role": "tool", "tool_call_id": "a", "content": parts},
    ]
    wanted = encode(
        [messages[0], {**messages[1], "tool_calls": copy.deepcopy(calls)}, messages[2]], tokenizer=TOKENIZER
    )
    kept = remember_fields(messages)
    for call in messages[1]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    parsed = [
        {"role": "system", "content": []},
        {"role": "assistant", "content": [], "tool_calls": messages[1]["tool_calls"]},
        {"role": "tool", "tool_call_id": "a", "content": "a\nb"},
    ]
    assert encode(restore_fields(parsed, kept), tokenizer=TOKENIZER) == wanted
    assert restore_fields(parsed[:1], kept) == parsed[:1]


def test_null_fields_of_tools_are_dropped_above_the_schema() -> None:
    schema = {"type": "object", "default": None}
    tools = [{"type": "function", "strict": None, "function": {"name": "f", "description": None, "parameters": schema}}]
    assert drop_null_fields(tools) == [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert drop_null_fields(None) is None
