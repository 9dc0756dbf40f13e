"""vLLM's parser interfaces over the one decoder: streaming equals whole, with ids and without, as vLLM composes."""

import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import chat_cases as cases
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

from k3_core.chat import encode, parse
from k3_core.errors import ChatError
from k3_core.vllm import compat
from k3_core.vllm.parsers import KimiK3ReasoningParser, KimiK3ToolParser, calls_before
from k3_core.vllm.tokenizer import KimiK3Tokenizer

TOKENIZER = KimiK3Tokenizer.from_pretrained(cases.DATA)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OP, CL, SP = "<|open|>", "<|close|>", "<|sep|>"


@pytest.fixture
def composed() -> Iterator[Any]:
    undo = compat.register_parsers()
    yield ParserManager.get_parser("kimi_k3", "kimi_k3", enable_auto_tools=True, model_name="k3")
    undo()


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        **{"model": "k3", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], **fields}
    )


def generated(seed: int) -> tuple[list[int], bool]:
    """Ids of a generated reply, and whether it thinks."""
    rng = random.Random(seed)
    messages = cases.conversation(rng)
    thinking = rng.random() < 0.7
    prompt = encode(messages[:-1], tokenizer=cases.TOKENIZER, thinking=thinking)
    whole = encode(messages, tokenizer=cases.TOKENIZER, thinking=thinking, add_generation_prompt=False)
    return whole.ids[len(prompt.ids) :], thinking


def streamed(
    parser: Any, steps: list[tuple[str, list[int]]], asked: Any
) -> tuple[str, str, list[tuple[str, str, str]]]:
    """What a client adds up from the deltas."""
    reasoning = content = ""
    calls: dict[int, list[str]] = {}
    for number, (text, ids) in enumerate(steps):
        delta = parser.parse_delta(text, ids, asked, prompt_token_ids=[1, 2], finished=number == len(steps) - 1)
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for call in delta.tool_calls:
            entry = calls.setdefault(call.index, ["", "", ""])
            entry[0] += call.id or ""
            entry[1] += call.function.name or ""
            entry[2] += call.function.arguments or ""
    return reasoning, content, [(a, b, c) for a, b, c in calls.values()]


@pytest.mark.parametrize("with_ids", [True, False])
def test_streaming_equals_whole_equals_core(composed: Any, with_ids: bool) -> None:
    asked = request()
    for seed in range(120):
        ids, thinking = generated(seed)
        kwargs = {"chat_template_kwargs": {"thinking": thinking}}
        # vLLM leaves the last token's text out when the reply ends by a stop token.
        texts = [cases.TOKENIZER.decode([token]) for token in ids[:-1]]
        if any("\ufffd" in text for text in texts):
            decoder = cases.TOKENIZER.incremental()
            texts = [decoder.feed(token) for token in ids[:-1]]
        rng = random.Random(seed)
        steps = [
            ("".join(texts[piece[0] : piece[-1] + 1]), [ids[i] for i in piece] if with_ids else [])
            for piece in cases.cut(rng, list(range(len(texts))))
        ]
        steps.append(("", [ids[-1]] if with_ids else []))
        expected = parse(ids, thinking, tokenizer=cases.TOKENIZER)
        calls = [(call.id, call.name, call.arguments) for call in expected.tool_calls]
        assert streamed(composed(TOKENIZER, asked.tools, **kwargs), steps, asked) == (
            expected.reasoning,
            expected.content,
            calls,
        )
        reasoning, content, made = composed(TOKENIZER, asked.tools, **kwargs).parse(
            "".join(texts), asked, enable_auto_tools=True, model_output_token_ids=ids if with_ids else ()
        )
        assert ((reasoning or ""), (content or "")) == (expected.reasoning, expected.content)
        assert [(call.id, call.name, call.arguments) for call in made] == calls


def test_spelt_markers_are_text_when_ids_say_so(composed: Any) -> None:
    text = f"Write {OP}tools{SP} then {CL}response{SP}"
    ids = [
        *TOKENIZER.encode(text, allow_special_tokens=False),
        TOKENIZER.k3.close_id,
        *TOKENIZER.encode("response"),
        TOKENIZER.k3.sep_id,
    ]
    parser = composed(TOKENIZER, None, chat_template_kwargs={"thinking": False})
    assert parser.parse(TOKENIZER.decode(ids), request(), model_output_token_ids=ids)[1] == text


def test_text_that_disagrees_with_the_ids_is_still_read(composed: Any) -> None:
    """A stop string cuts the text; spaces between special tokens appear; ids are missing half-way."""
    ids = TOKENIZER.encode(f"r{CL}think{SP}{OP}response{SP}Hello world{CL}response{SP}{CL}message{SP}")
    kwargs = {"chat_template_kwargs": {}}
    cut = f"r{CL}think{SP}{OP}response{SP}Hello"
    assert composed(TOKENIZER, None, **kwargs).parse(cut, request(), model_output_token_ids=ids)[:2] == ("r", "Hello")
    spaced = f"r{CL} think {SP}{OP} response {SP}Hello world{CL} response {SP}{CL} message {SP}"
    assert composed(TOKENIZER, None, **kwargs).parse(spaced, request(), model_output_token_ids=ids)[:2] == (
        "r",
        "Hello world",
    )
    steps = [
        (f"r{CL}thi", ids[:2]),
        (f"nk{SP}{OP}response{SP}Hel", ids[2:9]),
        ("lo world", []),
        (f"{CL}response{SP}", []),
    ]
    assert streamed(composed(TOKENIZER, None, **kwargs), steps, request())[:2] == ("r", "Hello world")


CALL = f'{OP}tools{SP}{OP}call tool="f" index="1"{SP}{CL}call{SP}{CL}tools{SP}{CL}message{SP}'


@pytest.mark.parametrize(
    ("fields", "sent"),
    [({}, 1), ({"tool_choice": "required"}, 1), ({"tool_choice": "none"}, 0), ({"tools": None}, 0)],
)
def test_calls_are_sent_only_where_they_were_asked_for(composed: Any, fields: dict[str, Any], sent: int) -> None:
    asked = request(**fields)
    text = f"r{CL}think{SP}{OP}response{SP}Hi{CL}response{SP}{CALL}"
    reasoning, content, calls = composed(TOKENIZER, asked.tools).parse(text, asked, enable_auto_tools=True)
    assert (reasoning, content, len(calls)) == ("r", "Hi", sent)
    parts = streamed(composed(TOKENIZER, asked.tools), [(char, []) for char in text], asked)
    assert (parts[0], parts[1], len(parts[2])) == ("r", "Hi", sent)


def test_reasoning_can_be_hidden(composed: Any) -> None:
    asked = request(include_reasoning=False)
    steps = [(f"r{CL}think{SP}{OP}response{SP}", []), ("Hi", [])]
    assert streamed(composed(TOKENIZER, None), steps, asked)[:2] == ("", "Hi")


def test_call_ids_go_on_through_the_conversation(composed: Any) -> None:
    past = {
        "role": "assistant",
        "tool_calls": [{"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    asked = request(
        messages=[
            {"role": "user", "content": "x"},
            past,
            {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"},
        ]
    )
    _, _, calls = composed(TOKENIZER, asked.tools).parse(f"r{CALL}", asked, enable_auto_tools=True)
    assert [call.id for call in calls] == ["functions.f:1"]
    assert calls_before(SimpleNamespace(input=[{"type": "function_call"}, {"type": "message"}])) == 1


def test_halves_alone() -> None:
    """The two parsers without vLLM's composition, as other code may use them."""
    asked = request()
    text = f"r{CL} think {SP}{OP} response {SP}Hi{CL} response {SP}{CALL}"
    reasoning, rest = KimiK3ReasoningParser(TOKENIZER).extract_reasoning(text, asked)
    assert reasoning == "r"
    assert rest is not None
    info = KimiK3ToolParser(TOKENIZER, asked.tools).extract_tool_calls(rest, asked)
    assert (info.tools_called, info.content, info.tool_calls[0].function.name) == (True, "Hi", "f")
    whole = KimiK3ToolParser(TOKENIZER, asked.tools).extract_tool_calls(text, asked)
    assert (whole.content, len(whole.tool_calls)) == ("Hi", 1)
    assert KimiK3ReasoningParser(TOKENIZER).extract_reasoning(text, request(tools=None)) == ("r", "Hi")
    assert KimiK3ReasoningParser(TOKENIZER).extract_reasoning("only", asked) == ("only", None)
    off = KimiK3ReasoningParser(TOKENIZER, chat_template_kwargs={"enable_thinking": False})
    assert off.extract_reasoning(f"Hi{CL}response{SP}", request(tools=None)) == (None, "Hi")

    reader, tool_reader = KimiK3ReasoningParser(TOKENIZER), KimiK3ToolParser(TOKENIZER, asked.tools)
    seen = content = calls = ""
    for end in range(1, len(text) + 1):
        delta = reader.extract_reasoning_streaming(text[: end - 1], text[:end], text[end - 1], [], [], [])
        seen += (delta.reasoning or "") if delta else ""
        content += (delta.content or "") if delta else ""
    assert (seen, content) == ("r", "Hi")
    for end in range(1, len(rest) + 1):
        delta = tool_reader.extract_tool_calls_streaming(rest[: end - 1], rest[:end], rest[end - 1], [], [], [], asked)
        calls += "".join(call.function.name or "" for call in delta.tool_calls) if delta else ""
    assert calls == "f"


def test_reasoning_end_by_ids() -> None:
    parser = KimiK3ReasoningParser(TOKENIZER, chat_template_kwargs={})
    ids = TOKENIZER.encode
    prompt = ids(f"{OP}message{SP}a{CL}think{SP}b{OP}think{SP}")
    assert not parser.is_reasoning_end(prompt)
    assert not parser.is_reasoning_end(ids("no marker"))
    assert parser.is_reasoning_end(ids(f"{OP}message{SP}{OP}response{SP}"))
    reply = ids(f"some thought{CL}think{SP}{OP}response{SP}Hi")
    ends = [
        end
        for end in range(1, len(reply) + 1)
        if parser.is_reasoning_end_streaming([*prompt, *reply[:end]], reply[end - 1 : end])
    ]
    first = len(ids(f"some thought{CL}think{SP}"))
    second = len(ids(f"some thought{CL}think{SP}{OP}response{SP}"))
    assert ends == [first, second]
    skipped = ids(f"thought{OP}response{SP}")
    assert parser.is_reasoning_end_streaming(skipped, skipped[-1:])
    spelt = TOKENIZER.encode(f"{CL}think{SP}", allow_special_tokens=False)
    assert not parser.is_reasoning_end_streaming(spelt, spelt)
    assert TOKENIZER.decode(parser.extract_content_ids(reply)) == f"{OP}response{SP}Hi"
    assert parser.extract_content_ids(ids("thought")) == []
    raw = KimiK3ReasoningParser(TOKENIZER)  # as the engine makes it for /v1/completions: nothing opened a reasoning
    assert raw.is_reasoning_end(ids("no marker"))
    assert raw.is_reasoning_end([])
    assert not raw.is_reasoning_end(prompt)
    off = KimiK3ReasoningParser(TOKENIZER, chat_template_kwargs={"reasoning_effort": "none"})
    assert off.is_reasoning_end(prompt)
    assert off.extract_content_ids(reply) == reply
    assert off.count_reasoning_tokens(reply) == 0


def test_reasoning_tokens_are_counted_without_markers() -> None:
    reply = TOKENIZER.encode(f"some thought{CL}think{SP}{OP}response{SP}Hi{CL}response{SP}")
    expected = len(TOKENIZER.encode("some thought"))
    assert KimiK3ReasoningParser(TOKENIZER).count_reasoning_tokens(reply) == expected
    growing = KimiK3ReasoningParser(TOKENIZER)
    counts = [growing.count_reasoning_tokens(tuple(reply[:end])) for end in range(len(reply) + 1)]
    assert counts[-1] == expected
    assert counts == sorted(counts)


def test_another_tokenizer_is_refused(composed: Any) -> None:
    with pytest.raises(ChatError, match="--tokenizer-mode kimi_k3"):
        composed(SimpleNamespace(), None)


def test_composition_is_undone_and_leaves_others_alone() -> None:
    """In a process of its own: here, another test's registration may already stand."""
    code = """
from k3_core.vllm import compat
from vllm.parser.parser_manager import ParserManager
undo = compat.register_parsers()
other = ParserManager.get_parser("hermes", None, enable_auto_tools=True, model_name="x")
assert "k3_core" not in other.__module__
assert compat.register_parsers()() is None  # a second registration undoes nothing of the first
assert ParserManager.composes_kimi_k3
undo()
assert not hasattr(ParserManager, "composes_kimi_k3")
print("undone")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("undone"), done.stderr[-2000:]
