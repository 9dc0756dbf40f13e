"""Cleaning what serving layers do to tools and arguments on the way to the encoder."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any


def drop_null_fields(tools: Sequence[Any] | None) -> list[Any] | None:
    """Tool declarations without the null fields that typed request models add (``strict``, ``description``, ...).

    Only the declaration and its ``function`` are cleaned; the schema below ``parameters`` stays as it is.
    """
    if tools is None:
        return None
    return [_clean(tool) if isinstance(tool, Mapping) else tool for tool in tools]


def _clean(tool: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tool.items() if value is not None}
    function = kept.get("function")
    if isinstance(function, Mapping):
        kept["function"] = {key: value for key, value in function.items() if value is not None}
    return kept


def remember_arguments(messages: Sequence[Any]) -> list[list[Any]]:
    """The arguments of each message's tool calls as the client sent them, for :func:`restore_arguments`.

    Serving layers parse argument strings into objects in place, so this has to come first. One-shot iterators of tool
    calls (typed request models have them) are made lists, in the message, too.
    """
    remembered = []
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else getattr(message, "tool_calls", None)
        if calls is not None and not isinstance(calls, list) and isinstance(message, MutableMapping):
            calls = message["tool_calls"] = list(calls)
        remembered.append([_get(_get(call, "function"), "arguments") for call in calls or []])
    return remembered


def restore_arguments(conversation: Sequence[Any], remembered: Sequence[Sequence[Any]]) -> list[Any]:
    """``conversation`` with the argument strings that the client sent, in their own spelling (``1e2``, ``[1,2]``).

    Messages and calls are matched by position. Where the two do not correspond, the conversation stays as it is.
    """
    if len(conversation) != len(remembered):
        return list(conversation)
    return [_restore(row, arguments) for row, arguments in zip(conversation, remembered, strict=True)]


def _restore(row: Any, arguments: Sequence[Any]) -> Any:
    calls = row.get("tool_calls") or []
    if not calls or len(calls) != len(arguments):
        return row
    restored = []
    for call, sent in zip(calls, arguments, strict=True):
        if isinstance(sent, str) and isinstance(call.get("function"), Mapping):
            call = {**call, "function": {**call["function"], "arguments": sent}}
        restored.append(call)
    return {**row, "tool_calls": restored}


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)
