"""Helpers shared by the chat tests: generated conversations, ways to cut text, and what a client makes of events."""

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from k3_core.chat import Event, K3Tokenizer, Reply, StreamParser, ToolCall, load_tokenizer, parse

DATA = Path(__file__).parent / "data" / "chat"
TOKENIZER: K3Tokenizer = load_tokenizer(DATA)

S = TypeVar("S", str, list[int])
MARKER_BYTES = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
PIECES = list("abcdefghXYZ0123.,:;!?'\"\\/{}[]()<>|&=-_#*`~@$%^+éñßж东灯塔한ע🌊👩\u200d\u0301\ufffd\x7f")
PIECES += [
    "<|",
    "|>",
    "<|o",
    "open",
    "close",
    "sep",
    "think",
    "response",
    "&quot;",
    "&amp;",
    "</think>",
    "\\u00e9",
    "```json",
]
PIECES += [" ", "  ", "\n\n", "\t", "\u2028"]


def text(rng: random.Random, most: int = 12) -> str:
    """Text with everything in it that looks like structure and is none (no complete special token)."""
    while True:
        made = "".join(rng.choice(PIECES) for _ in range(rng.randrange(most)))
        if not any(marker in made for marker in (*MARKER_BYTES, "<|media")):
            return made


def word(rng: random.Random) -> str:
    return "".join(rng.choice("abcxyz_09-é东\"& '") for _ in range(rng.randrange(1, 9)))


def value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(9 if depth else 6)
    if kind <= 1:
        return text(rng, 6)
    if kind == 2:
        return rng.choice([0, -1, 7, 10**20, 1.5, -2e-7, 1e300])
    if kind == 3:
        return rng.choice([True, False])
    if kind == 4:
        return None
    if kind <= 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))] if depth else text(rng, 3)
    return {text(rng, 4): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def call(rng: random.Random, index: int) -> dict[str, Any]:
    arguments = {word(rng): value(rng) for _ in range(rng.randrange(4))}
    form = rng.randrange(3)
    payload: Any = arguments if form == 0 else json.dumps(arguments, ensure_ascii=form == 1)
    return {"id": f"call-{index}", "type": "function", "function": {"name": "f" + word(rng), "arguments": payload}}


def assistant(rng: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text(rng)}
    if rng.random() < 0.6:
        message["reasoning_content"] = text(rng, 20)
    if rng.random() < 0.5:
        message["tool_calls"] = [call(rng, index) for index in range(rng.randrange(1, 4))]
    return message


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Some turns; the last is the assistant's."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": rng.choice(["system", "developer"]), "content": text(rng)})
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": text(rng)})
        messages.append(assistant(rng))
        for item in messages[-1].get("tool_calls", []):
            messages.append({"role": "tool", "tool_call_id": item["id"], "content": text(rng)})
    while messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


def cut(rng: random.Random, items: S) -> list[S]:
    """A sequence in random pieces, from one piece to single items."""
    share = rng.choice([0.0, 0.02, 0.2, 1.0])
    points = [0, *(i for i in range(1, len(items)) if rng.random() < share), len(items)]
    return [items[begin:end] for begin, end in itertools.pairwise(points)]


def stream(pieces: Iterable[str], thinking: bool) -> tuple[list[Event], Reply]:
    parser = StreamParser(thinking)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    return events, parser.reply


def merge(events: Iterable[Event]) -> list[Event]:
    """Adjacent deltas of one kind as one."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        same = last is not None and (last.kind, last.index) == (event.kind, event.index)
        if last is not None and same and event.kind in ("reasoning", "content", "arguments"):
            merged[-1] = Event(event.kind, last.text + event.text, event.index)
        else:
            merged.append(event)
    return merged


def add_up(events: Iterable[Event]) -> Reply:
    """The reply that a client puts together from the events."""
    texts = {"reasoning": "", "content": ""}
    calls: dict[int, list[str]] = {}
    done: list[ToolCall] = []
    finish: Any = "length"
    for event in events:
        if event.kind in texts:
            texts[event.kind] += event.text
        elif event.kind == "call":
            calls[event.index] = [event.id, event.name, ""]
        elif event.kind == "arguments":
            calls[event.index][2] += event.text
        elif event.kind == "call_end":
            done.append(ToolCall(*calls[event.index], index=event.index))
        else:
            finish = event.text
    return Reply(texts["reasoning"], texts["content"], done, finish)


def leaks(reply: Reply) -> list[str]:
    """Special tokens that reached the reader."""
    seen = [reply.reasoning, reply.content, *(c.arguments for c in reply.tool_calls)]
    return [part for part in seen if any(marker in part for marker in MARKER_BYTES)]


# --- properties of every output -------------------------------------------------------------------------------------
def check_output(output: str, thinking: bool, rng: random.Random) -> Reply:
    """However ``output`` is cut: one result, no marker, JSON arguments, events that add up; a part is a prefix."""
    whole_events, whole = stream([output], thinking)
    for pieces in (cut(rng, output), list(output)):
        events, reply = stream(pieces, thinking)
        assert reply == whole
        assert merge(events) == merge(whole_events)
    assert add_up(whole_events) == whole
    assert not leaks(whole)
    assert whole_events[-1].kind == "finish"
    for made in whole.tool_calls:
        assert isinstance(json.loads(made.arguments), dict)
    assert len({made.id for made in whole.tool_calls}) == len(whole.tool_calls)
    end = rng.randrange(len(output) + 1)
    check_prefix(whole, parse(output[:end], thinking))
    return whole


def check_prefix(whole: Reply, part: Reply) -> None:
    """A reply that broke off is a prefix of what it would have been; complete calls stay what they are."""
    assert whole.reasoning.startswith(part.reasoning)
    assert whole.content.startswith(part.content)
    assert whole.tool_calls[: len(part.tool_calls)] == part.tool_calls


def check_ids(ids: list[int], thinking: bool, rng: random.Random) -> Reply:
    """The same for an output given as token ids, where spelt markers are text and may stay."""
    whole = parse(ids, thinking, tokenizer=TOKENIZER)
    parser = StreamParser(thinking, tokenizer=TOKENIZER)
    events = [event for piece in cut(rng, ids) for event in parser.feed_ids(piece)]
    events += parser.finish()
    assert parser.reply == whole
    assert add_up(events) == whole
    for made in whole.tool_calls:
        assert isinstance(json.loads(made.arguments), dict)
    return whole


def damage(rng: random.Random, items: list[int]) -> list[int]:
    """A few items lost, doubled, moved or replaced."""
    items = list(items)
    for _ in range(rng.randrange(1, 5)):
        if not items:
            break
        at = rng.randrange(len(items))
        kind = rng.randrange(5)
        if kind == 0:
            del items[at : at + rng.choice([1, 1, 2, 3, 8])]
        elif kind == 1:
            items[at:at] = items[at : at + rng.choice([1, 3, 8])]
        elif kind == 2:
            items.insert(rng.randrange(len(items)), items.pop(at))
        elif kind == 3:
            items[at] = rng.choice([512, 513, 514, 515, 516, 517, 533, 767, rng.randrange(768)])
        else:
            del items[at:]
    return items
