"""One tool call while it is being written: typed argument elements in, the text of one JSON object out."""

import json

from k3_core.chat import protocol
from k3_core.chat.json_stream import JsonStream, escape


class CallBuilder:
    """Writes ``{"key": value, ...}`` as the elements of a call arrive.

    ``open_argument`` / ``open_json``, then ``text`` as often as needed, then ``close_element``; ``close`` at the end of
    the call. Each returns what to append to the arguments. Strings stream as they come, other types through
    :class:`JsonStream`. A ``json`` element (or bare text) that is an object is the arguments themselves; any other text
    in it becomes the one argument ``json``. After such an object nothing can be added, so later elements are dropped.
    """

    def __init__(self) -> None:
        self._members = 0
        self._whole = False  # a json element was the whole object
        self._kind = ""  # "" (no element open), "string", "value", "json" (not yet known which), "skip"
        self._value: JsonStream | None = None
        self._null = False
        self._blank: list[str] = []
        self._bare_allowed = True

    @property
    def in_element(self) -> bool:
        """Whether an element is open."""
        return self._kind != ""

    def open_argument(self, attributes: dict[str, str]) -> str:
        """An argument element opens."""
        if self._whole:
            self._kind = "skip"
            return ""
        kind = attributes.get(protocol.ATTR_TYPE, "string").strip()
        out = self._open_member(attributes.get(protocol.ATTR_KEY, ""))
        if kind == "string":
            self._kind = "string"
            return out + '"'
        self._open_value(null=kind == "null")
        return out

    def open_json(self) -> str:
        """A json element opens."""
        self._kind = "skip" if self._whole else "json"
        self._blank = []
        return ""

    def open_bare(self, text: str) -> str:
        """Text directly in the call: opens a json element if it is the call's first text and starts with a brace."""
        if not text:
            return ""
        if self._bare_allowed and self._members == 0 and not self._whole and text[0] == "{":
            return self.open_json()
        self._bare_allowed = False
        return ""

    def text(self, text: str) -> str:
        """Text of the open element."""
        if self._kind == "string":
            return escape(text)
        if self._kind == "value":
            assert self._value is not None
            self._null = self._null and not text.strip()
            return self._value.feed(text)
        if self._kind == "json":
            return self._decide(text)
        return ""

    def close_element(self) -> str:
        """The open element ends."""
        kind, self._kind = self._kind, ""
        if kind == "string":
            return '"'
        if kind == "value":
            assert self._value is not None
            return "null" if self._null else self._value.finish()
        if kind == "json" and self._blank and self._members == 0:
            return self._open_member("json") + json.dumps("".join(self._blank), ensure_ascii=False)
        return ""

    def close(self) -> str:
        """The call ends."""
        out = self.close_element()
        if self._whole:
            return out
        return out + ("}" if self._members else "{}")

    def _decide(self, text: str) -> str:
        stripped = text.lstrip()
        if not stripped:
            self._blank.append(text)
            return ""
        if stripped[0] == "{" and self._members == 0:
            self._whole = True
            self._open_value(null=False)
            return self.text(text)
        out = self._open_member("json") + '"'
        self._kind = "string"
        out += self.text("".join(self._blank) + text)
        return out

    def _open_value(self, null: bool) -> None:
        self._kind = "value"
        self._null = null
        self._value = JsonStream()

    def _open_member(self, key: str) -> str:
        self._members += 1
        lead = "{" if self._members == 1 else ", "
        return lead + json.dumps(key, ensure_ascii=False) + ": "
