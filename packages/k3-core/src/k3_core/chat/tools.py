"""Cleaning what serving layers do to tools and arguments on the way to the encoder."""

from collections.abc import Mapping, Sequence
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


def restore_arguments(conversation: Sequence[Any], messages: Sequence[Any]) -> list[Any]:
    """``conversation`` with the argument strings that the client sent in ``messages``.

    Serving layers parse arguments into objects on the way, which loses their spelling (``1e2``, ``[1,2]``). Messages
    are matched by position; calls by position, too. Where the two do not correspond, the conversation stays as it is.
    """
    if len(conversation) != len(messages):
        return list(conversation)
    return [_restore(row, message) for row, message in zip(conversation, messages, strict=True)]


def _restore(row: Any, message: Any) -> Any:
    calls, sent = row.get("tool_calls") or [], _get(message, "tool_calls") or []
    sent = list(sent)
    if not calls or len(calls) != len(sent):
        return row
    restored = []
    for call, original in zip(calls, sent, strict=True):
        arguments = _get(_get(original, "function"), "arguments")
        if isinstance(arguments, str) and isinstance(call.get("function"), Mapping):
            call = {**call, "function": {**call["function"], "arguments": arguments}}
        restored.append(call)
    return {**row, "tool_calls": restored}


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)
