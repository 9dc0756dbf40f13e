"""Planted faults in the chat room that the checks must catch."""

import json
import random
from collections.abc import Callable
from typing import Any

import chat_cases as cases
import pytest
from test_chat_decoder import ELEMENTS, MARKERS, RECOVERED, WORDS
from test_chat_encode import GOLDEN, SAME
from test_chat_round_trip import check_round_trip

from k3_core.chat import decoder, encode, encoder, json_stream, markers, tokenizer
from k3_core.chat.calls import CallBuilder


def goldens() -> None:
    for name in SAME:
        assert encode(**GOLDEN[name]["input"], tokenizer=cases.TOKENIZER).ids == GOLDEN[name]["encoder"]["ids"]


def round_trips() -> None:
    for seed in range(60):
        check_round_trip(seed)


def readings() -> None:
    for output, reasoning, content, calls, finish in RECOVERED:
        for pieces in ([output], list(output)):
            _, reply = cases.stream(pieces, thinking=True)
            made = [(call.name, call.arguments) for call in reply.tool_calls]
            assert (reply.reasoning, reply.content, made, reply.finish) == (reasoning, content, calls, finish)


def soups() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        pools: list[list[str]] = [MARKERS, ELEMENTS, WORDS, cases.PIECES]
        cases.check_output("".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(20))), True, rng)


def _without_hold(self: markers.TextScanner, text: str) -> Any:
    for piece in markers._LITERAL.split(text):
        if piece:
            yield piece, False


def _one_string(builder: Any, k3: Any) -> Any:
    text = "".join(segment.text for segment in builder.segments)
    return encoder.Encoded(k3.encode(text, allow_special=True), builder.segments, text)


def _rescaped(value: Any) -> str:
    return str(value).replace('"', "&quot;").replace("&", "&amp;")


def _open_unescaped(self: Any, tag: str, attributes: Any = None) -> None:
    self.structure("<|open|>")
    self.plain(tag)
    for key, value in (attributes or {}).items():
        for piece in (f" {key}", '="', _rescaped(value), '"'):
            self.plain(piece)
    self.structure("<|sep|>")


def _keep_attribute(self: markers.Header) -> None:
    value = "".join(self._value).replace("&amp;", "&").replace("&quot;", '"')
    self.attributes.setdefault(self._name, value)
    self._state = "gap"


def _strict_lead(self: markers.Header, text: str, position: int) -> int:
    self._state = "tag"
    return position


def _eager_comma(self: json_stream.JsonStream, text: str, position: int) -> int:
    if text[position] == ",":
        self._out.append(",")
        self._state = "key" if self._stack[-1] == "{" else "value"
        return position + 1
    return _IN_COMMA(self, text, position)


_IN_COMMA = json_stream.JsonStream._in_comma
Mutant = tuple[Any, str, Any, Callable[[], None]]
MUTANTS: dict[str, Mutant] = {
    "the prompt tokenised as one string": (encoder, "_tokenise", _one_string, goldens),
    "attributes escaped in the wrong order": (encoder._Builder, "open", _open_unescaped, goldens),
    "tool results left in the client's order": (encoder, "order_tool_results", list, goldens),
    "keys of declarations not sorted": (encoder, "sort_keys", lambda value, where: value, goldens),
    "long runs not cut": (tokenizer, "split_long_text", lambda text: [text], lambda: long_run()),
    "no text held back": (markers.TextScanner, "feed", _without_hold, readings),
    "no blanks allowed in markers": (markers.Header, "_in_lead", _strict_lead, readings),
    "attributes unescaped in the wrong order": (markers.Header, "_keep_attribute", _keep_attribute, readings),
    "a lost <|sep|> not recovered": (decoder, "_OPENS", dict.fromkeys(decoder._OPENS, frozenset()), readings),
    "text behind the end kept": (decoder.StreamParser, "_end_message", lambda self: self._close_inner(""), readings),
    "gap text dropped": (decoder.StreamParser, "_between", lambda self, text: None, readings),
    "open calls never closed": (decoder.StreamParser, "_finish_call", lambda self: None, readings),
    "a comma given away too early": (json_stream.JsonStream, "_in_comma", _eager_comma, lambda: broken_json()),
    "strings not escaped": (CallBuilder, "text", lambda self, text: text, round_trips),
    "values not closed": (CallBuilder, "close_element", lambda self: setattr(self, "_kind", "") or "", soups),
}


def long_run() -> None:
    run = "max" * 20_000  # a token; both cuts go through one
    pieces = [run[:25_000], run[25_000:50_000], run[50_000:]]
    assert cases.TOKENIZER.encode(run) == [i for p in pieces for i in cases.TOKENIZER.encoding.encode_ordinary(p)]


def broken_json() -> None:
    made = json_stream.JsonStream()
    json.loads(made.feed("[1, 2,]") + made.finish())


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, fault, check = MUTANTS[name]
    check()
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        check()
