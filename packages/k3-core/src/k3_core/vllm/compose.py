"""How vLLM comes to compose our reasoning and tool parser into one: two small wraps, both for Kimi K3 only.

vLLM decides by name how a pair of parsers is composed and knows its own class for ``kimi_k3``; there is no registry for
that. This module is imported when the plugin registers, so it loads nothing itself.
"""

from __future__ import annotations

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
    """Keep ``finish_reason: length`` on whole chat replies with complete calls; streaming says it already.

    vLLM's non-streaming path calls every reply with calls ``tool_calls``, also one that broke off at max_tokens. Wraps
    the chat serving class where it is loaded (the API server); idempotent; replies of other parsers are not touched.
    """
    module = sys.modules.get("vllm.entrypoints.openai.chat_completion.serving")
    serving = getattr(module, "OpenAIServingChat", None)
    if serving is None or getattr(serving, "keeps_kimi_k3_length", False):
        return
    original = serving.chat_completion_full_generator

    async def full_generator(self: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(getattr(self, "parser_cls", None), "keeps_length", False):
            return await original(self, request, results, *args, **kwargs)
        last: list[Any] = []

        async def watched() -> Any:
            async for result in results:
                last[:] = [result]
                yield result

        response = await original(self, request, watched(), *args, **kwargs)
        reasons = {output.index: output.finish_reason for output in (last[0].outputs if last else [])}
        for choice in getattr(response, "choices", []):
            if reasons.get(choice.index) == "length":
                choice.finish_reason = "length"
        return response

    serving.chat_completion_full_generator = full_generator
    serving.keeps_kimi_k3_length = True
