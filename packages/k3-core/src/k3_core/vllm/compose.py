"""How vLLM comes to compose our reasoning and tool parser into one: two small wraps, both for Kimi K3 only.

vLLM decides by name how a pair of parsers is composed and knows its own class for ``kimi_k3``; there is no registry for
that. This module is imported when the plugin registers, so it loads nothing itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def install() -> Callable[[], None]:
    """Have ``ParserManager.get_parser`` compose our parsers as :class:`k3_core.vllm.parsers.KimiK3Parser`.

    Returns the undo. A second call does nothing and undoes nothing.
    """
    from vllm.parser.parser_manager import ParserManager

    if getattr(ParserManager, "composes_kimi_k3", False):
        return lambda: None
    before = ParserManager.__dict__["get_parser"]
    original = ParserManager.get_parser

    def get_parser(cls: Any, *args: Any, **kwargs: Any) -> Any:
        composed = original(*args, **kwargs)
        halves = [getattr(composed, name, None) for name in ("reasoning_parser_cls", "tool_parser_cls")]
        if not any(getattr(half, "__module__", "") == "k3_core.vllm.parsers" for half in halves):
            return composed
        from k3_core.vllm.parsers import KimiK3Parser

        keep_length()
        shared = {"reasoning_parser_cls": halves[0], "tool_parser_cls": halves[1]}
        if hasattr(composed, "tool_strict_level"):
            shared["tool_strict_level"] = composed.tool_strict_level
        return type("KimiK3Parser", (KimiK3Parser,), shared)

    ParserManager.get_parser = classmethod(get_parser)
    ParserManager.composes_kimi_k3 = True

    def undo() -> None:
        ParserManager.get_parser = before
        del ParserManager.composes_kimi_k3

    return undo


def keep_length() -> None:
    """An honest ``finish_reason`` on chat replies whose calls the model did not end itself, or did not begin.

    ``length`` where they broke off at max_tokens, ``stop`` where a stop string of the client ended them, and ``stop``
    where calls were required and there is none, because the model ended its message inside the reasoning, which no
    grammar holds. vLLM says ``tool_calls`` for whole replies with complete calls whatever ended them, for whole replies
    to ``tool_choice: required`` also without any, for streams in which any part of a call was sent, and in 0.27 and
    older also at max_tokens. Wraps the chat serving class where it is loaded (the API
    server); idempotent; other parsers' replies are left.
    """
    module = sys.modules.get("vllm.entrypoints.openai.chat_completion.serving")
    serving = getattr(module, "OpenAIServingChat", None)
    if serving is None or getattr(serving, "keeps_kimi_k3_length", False):
        return
    whole, stream = serving.chat_completion_full_generator, serving.chat_completion_stream_generator

    async def full_generator(self: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(self):
            return await whole(self, request, results, *args, **kwargs)
        reasons: dict[int, str] = {}
        response = await whole(self, request, _watched(results, reasons), *args, **kwargs)
        for choice in getattr(response, "choices", []):
            choice.finish_reason = reasons.get(choice.index, choice.finish_reason)
            if choice.finish_reason == "tool_calls" and not choice.message.tool_calls:
                choice.finish_reason = "stop"
        return response

    async def stream_generator(self: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        reasons: dict[int, str] = {}
        ours = _is_ours(self)
        async for chunk in stream(self, request, _watched(results, reasons) if ours else results, *args, **kwargs):
            yield _honest(chunk, reasons) if ours else chunk

    serving.chat_completion_full_generator = full_generator
    serving.chat_completion_stream_generator = stream_generator
    serving.keeps_kimi_k3_length = True


def _is_ours(serving: Any) -> bool:
    return bool(getattr(getattr(serving, "parser_cls", None), "keeps_length", False))


async def _watched(results: Any, reasons: dict[int, str]) -> Any:
    """``results``, with the finish reason of each choice noted that the model did not end itself."""
    async for result in results:
        for output in result.outputs:
            if output.finish_reason == "length" or isinstance(output.stop_reason, str):  # a str: a stop string
                reasons[output.index] = output.finish_reason
        yield result


def _honest(chunk: str, reasons: dict[int, str]) -> str:
    """A server-sent chunk with the engine's reason where the chunk says ``tool_calls`` and the model did not end it."""
    if not reasons or '"finish_reason":"tool_calls"' not in chunk:
        return chunk
    body = json.loads(chunk.removeprefix("data: "))
    for choice in body.get("choices", []):
        if choice.get("finish_reason") == "tool_calls":
            choice["finish_reason"] = reasons.get(choice.get("index"), "tool_calls")
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
