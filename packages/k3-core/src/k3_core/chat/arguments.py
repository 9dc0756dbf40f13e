"""Arguments of past tool calls: from what clients send to typed XTML arguments.

A client sends arguments as an object or, as OpenAI does, as a string of JSON. The released encoder parses the string
and writes each top-level value anew: strings raw, everything else as JSON with ``", "`` and ``": "``. We keep each
value's own spelling instead (``1e2`` stays ``1e2``, ``[1,2]`` stays ``[1,2]``), so that what the model wrote comes back
as the same tokens; escapes of non-ASCII characters (``\\u00e9``, which many JSON writers produce) become characters.
For every text written by ``json.dumps`` with default separators, both rules agree.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3_core.errors import ChatError

_BLANK = re.compile(r"[ \t\n\r]*")
_ESCAPE = re.compile(r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|.)")
# Only the extent of a value matters here, so numbers are not converted (and may be of any length).
_SCANNER = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=len)


@dataclass(frozen=True)
class Argument:
    """One argument: its key, its XTML type and its text (strings raw, others JSON)."""

    key: str
    type: str
    text: str


def encode_arguments(arguments: Any, where: str) -> list[Argument] | str:
    """Typed arguments, or the text itself where it is no JSON (it is then rendered as one ``json`` element).

    ``arguments``: None, an object, or a string. Raises ChatError for JSON that is no object and for other types.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return []
    if isinstance(arguments, Mapping):
        return [_from_value(key, value, where) for key, value in arguments.items()]
    if not isinstance(arguments, str):
        raise ChatError(
            f"{where}: tool call arguments must be a JSON object or a string of it, not {type(arguments).__name__}"
        )
    try:
        parsed = _SCANNER.decode(arguments)
    except json.JSONDecodeError:
        return arguments
    except RecursionError as error:
        raise ChatError(f"{where}: tool call arguments are nested too deeply") from error
    if not isinstance(parsed, dict):
        raise ChatError(f"{where}: Kimi K3 tool call arguments must be a JSON object, not {arguments[:40]!r}")
    return [_from_text(key, raw) for key, raw in _spans(arguments)]


def _from_value(key: Any, value: Any, where: str) -> Argument:
    if not isinstance(key, str):
        raise ChatError(f"{where}: argument names must be strings, not {key!r}")
    kinds: tuple[tuple[Any, str], ...] = (
        (bool, "boolean"),
        (type(None), "null"),
        (int | float, "number"),
        (str, "string"),
        (Mapping, "object"),
        (list | tuple, "array"),
    )
    for kind, name in kinds:
        if isinstance(value, kind):
            return Argument(
                key, name, value if isinstance(value, str) else to_json(value, f"{where}, argument {key!r}")
            )
    raise ChatError(f"{where}: argument {key!r} is a {type(value).__name__}, which JSON does not have")


def _from_text(key: str, raw: str) -> Argument:
    if raw[0] == '"':
        return Argument(key, "string", json.loads(raw))
    kind = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}.get(raw[0], "number")
    return Argument(key, kind, _ESCAPE.sub(_unescape, raw))


def _unescape(match: re.Match[str]) -> str:
    high, low, single = match.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
    if single and int(single, 16) >= 0x7F and not 0xD800 <= int(single, 16) < 0xE000:
        return chr(int(single, 16))
    return match.group()


def _spans(text: str) -> list[tuple[str, str]]:
    """(key, text of the value) of each member of the object ``text``; the last of equal keys wins, in first place."""
    spans: dict[str, str] = {}
    position = _skip(text, _skip(text, 0) + 1)
    while text[position] != "}":
        key, position = _SCANNER.raw_decode(text, position)
        start = _skip(text, _skip(text, position) + 1)
        _, position = _SCANNER.raw_decode(text, start)
        spans[key] = text[start:position]
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return list(spans.items())


def _skip(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    assert match is not None
    return match.end()


def to_json(value: Any, where: str, compact: bool = False) -> str:
    """``value`` as JSON, non-ASCII kept; ``compact`` without blanks. Raises ChatError for what JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{where} cannot be written as JSON: {error}") from error


def sort_keys(value: Any, where: str) -> Any:
    """``value`` with the keys of every object sorted, recursively.

    Raises ChatError for keys that are no strings, and for nesting deeper than Python recurses.
    """
    try:
        return _sorted(value, where)
    except RecursionError as error:
        raise ChatError(f"{where} is nested too deeply") from error


def _sorted(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        strange = [key for key in value if not isinstance(key, str)]
        if strange:
            raise ChatError(f"{where}: object keys must be strings, found {strange[0]!r}")
        return {key: _sorted(value[key], where) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(item, where) for item in value]
    return value
