"""Undoing what serving layers do to messages and tools on the way to the encoder."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any


def drop_null_fields(tools: Any) -> Any:
    """Tool declarations without the null fields that typed request models add (``strict``, ``description``, ...).

    Only the declaration and its ``function`` are cleaned; the schema below ``parameters`` stays as it is.
    """
    if not isinstance(tools, list | tuple):
        return tools  # None, or what the encoder refuses by name
    return [_clean(tool) if isinstance(tool, Mapping) else tool for tool in tools]


def _clean(tool: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tool.items() if value is not None}
    function = kept.get("function")
    if isinstance(function, Mapping):
        kept["function"] = {key: value for key, value in function.items() if value is not None}
    return kept


def remember_fields(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """What serving layers lose of each message on their way to the encoder, for :func:`restore_fields`.

    vLLM parses argument strings into objects (in place), drops ``reasoning_content`` and the ``tools`` of system
    messages, and joins the text parts of tool results with line breaks. So this comes before its parsing. One-shot
    iterators of tool calls (typed request models have them) are made lists, in the message, too.
    """
    return [_remember(message) for message in messages]


def _remember(message: Any) -> dict[str, Any]:
    calls = _get(message, "tool_calls")
    if calls is not None and not isinstance(calls, list) and isinstance(message, MutableMapping):
        calls = message["tool_calls"] = list(calls)
    kept: dict[str, Any] = {"arguments": [_get(_get(call, "function"), "arguments") for call in calls or []]}
    for name in ("tools", "reasoning", "reasoning_content"):
        if _get(message, name) is not None:
            kept[name] = _get(message, name)
    content = _get(message, "content")
    if _get(message, "role") == "tool" and isinstance(content, list):
        parts = [part if isinstance(part, str) else _get(part, "text") for part in content]
        if all(isinstance(part, str) for part in parts):
            kept["content"] = [{"type": "text", "text": part} for part in parts]  # each is a segment of its own
    return kept


def restore_fields(conversation: Sequence[Any], remembered: Sequence[Mapping[str, Any]]) -> list[Any]:
    """``conversation`` with what the client sent: arguments in their own spelling (``1e2``, ``[1,2]``), and the rest.

    Messages and calls are matched by position. Where the two do not correspond, the conversation stays as it is.
    """
    if len(conversation) != len(remembered):
        return list(conversation)
    return [_restore(row, kept) for row, kept in zip(conversation, remembered, strict=True)]


def _restore(row: Any, kept: Mapping[str, Any]) -> Any:
    row = {**row, **{name: value for name, value in kept.items() if name != "arguments"}}
    calls, arguments = row.get("tool_calls") or [], kept["arguments"]
    if calls and len(calls) == len(arguments):
        row["tool_calls"] = [_with_arguments(call, sent) for call, sent in zip(calls, arguments, strict=True)]
    return row


def _with_arguments(call: Any, sent: Any) -> Any:
    if not isinstance(sent, str) or not isinstance(call.get("function"), Mapping):
        return call
    return {**call, "function": {**call["function"], "arguments": sent}}


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)
