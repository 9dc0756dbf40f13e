"""Helpers shared by the chat tests: generated conversations, ways to cut text, and what a client makes of events."""

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from k3_core.chat import Event, K3Tokenizer, Reply, StreamParser, ToolCall, load_tokenizer

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
