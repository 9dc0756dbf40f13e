"""Generated conversations: encode, decode, compare."""

import json
import os
import random
from typing import Any

import chat_cases as cases
import pytest

from k3_core.chat import StreamParser, encode, parse


def check_round_trip(seed: int) -> None:
    """The last reply of a generated conversation, decoded from ids and from text, is what was encoded."""
    rng = random.Random(seed)
    messages = cases.conversation(rng)
    thinking = rng.random() < 0.7
    last: dict[str, Any] = messages[-1]
    prompt = encode(messages[:-1], tokenizer=cases.TOKENIZER, thinking=thinking)
    whole = encode(messages, tokenizer=cases.TOKENIZER, thinking=thinking, add_generation_prompt=False)
    assert whole.ids[: len(prompt.ids)] == prompt.ids, seed
    assert cases.TOKENIZER.decode(whole.ids) == whole.text, seed
    output = whole.ids[len(prompt.ids) :]
    reply = parse(output, thinking, tokenizer=cases.TOKENIZER)
    reasoning = last.get("reasoning_content", "")
    assert reply.reasoning == (reasoning if thinking and reasoning.strip() else ""), seed
    assert reply.content == last["content"], seed
    made = [(call.name, call.arguments) for call in reply.tool_calls]
    assert made == [
        (call["function"]["name"], _as_text(call["function"]["arguments"])) for call in last.get("tool_calls", [])
    ]
    assert reply.finish == ("tool_calls" if last.get("tool_calls") else "stop"), seed

    parser = StreamParser(thinking, tokenizer=cases.TOKENIZER)
    for piece in cases.cut(rng, output):
        parser.feed_ids(piece)
    parser.finish()
    assert parser.reply == reply, seed
    text = whole.text[len(prompt.text) :]
    events, from_text = cases.stream(cases.cut(rng, text), thinking)
    assert from_text == reply, seed
    assert cases.add_up(events) == reply, seed

    again = {**last, "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in reply.tool_calls]}
    assert (
        encode([*messages[:-1], again], tokenizer=cases.TOKENIZER, thinking=thinking, add_generation_prompt=False).ids
        == whole.ids
    )


def _as_text(arguments: Any) -> str:
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("block", range(10))
def test_round_trip(block: int) -> None:
    for seed in range(200 * block, 200 * (block + 1)):
        check_round_trip(seed)


@pytest.mark.long
def test_round_trip_20000() -> None:
    for seed in range(10_000, 10_000 + int(os.environ.get("K3_CONVERSATIONS", "20000"))):
        check_round_trip(seed)
