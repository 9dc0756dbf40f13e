"""Finding structure in a model's output: special tokens in text, and the headers between them.

A marker is ``<|open|>`` or ``<|close|>``, a *header* (blanks, tag, attributes, blanks) and ``<|sep|>``. Both readers
take text in any pieces, look at each character a bounded number of times and hold back only what may still become
structure.
"""

import re
from collections.abc import Iterator

from k3_core.chat import protocol

#: Special tokens that are structure, or noise to be dropped, when they occur as literal text.
LITERALS = (
    protocol.OPEN,
    protocol.CLOSE,
    protocol.SEP,
    protocol.END_OF_MSG,
    protocol.MEDIA_BEGIN,
    protocol.MEDIA_CONTENT,
    protocol.MEDIA_END,
    protocol.MEDIA_PAD,
)
_LITERAL = re.compile("|".join(map(re.escape, LITERALS)))
_LONGEST = max(map(len, LITERALS))
_PREFIXES = frozenset(literal[:length] for literal in LITERALS for length in range(1, len(literal)))
_WORD = re.compile(r"[A-Za-z0-9_-]+")
_MAX_TAG = 32
_MAX_HEADER = 16_384


class TextScanner:
    """Cuts text into (piece, is_structure). A tail that may be the start of a special token waits for the next feed."""

    def __init__(self) -> None:
        self.held = ""

    def feed(self, text: str) -> Iterator[tuple[str, bool]]:
        """Pieces that are certain."""
        text = self.held + text
        self.held = ""
        position = 0
        for match in _LITERAL.finditer(text):
            if match.start() > position:
                yield text[position : match.start()], False
            yield match.group(), True
            position = match.end()
        rest = text[position:]
        start = rest.rfind("<", max(0, len(rest) - _LONGEST))
        if start >= 0 and rest[start:] in _PREFIXES:
            self.held = rest[start:]
            rest = rest[:start]
        if rest:
            yield rest, False


class Header:
    """The text between ``<|open|>`` or ``<|close|>`` and ``<|sep|>``, read as it arrives.

    ``expected``: tags that are likely here; they are recognised even when text follows without ``<|sep|>`` and blank.
    :meth:`feed` gives None while the header may go on; otherwise the text that does not belong to it, and ``tag`` is
    then the tag, or None when there was no marker and that text includes everything.
    """

    def __init__(self, is_open: bool, expected: frozenset[str]) -> None:
        self.is_open = is_open
        self.tag: str | None = None
        self.attributes: dict[str, str] = {}
        self._expected = expected
        self._word: list[str] = []
        self._length = 0
        self._name = ""
        self._value: list[str] = []
        self._tail: list[str] = []  # since the last point at which the header was whole
        self._lead: list[str] = []
        self._state = "lead"
        self._quote = ""
        self._broken = False

    def feed(self, text: str) -> str | None:
        """Read on. See the class."""
        room = _MAX_HEADER - self._length
        self._length += len(text)
        position, end = 0, min(len(text), room)
        head = text[:end]
        while position < end:
            position = getattr(self, f"_in_{self._state}")(head, position)
            if self._broken:
                return self._break_off(text[position:])
        return None if len(text) <= room else self._break_off(text[end:])

    def end(self, at_sep: bool) -> str:
        """``<|sep|>`` or another special token follows: settle the tag; the result is text behind it."""
        if self._state in ("unquoted", "value"):
            self._keep_attribute()
        behind = self._settle()
        word = "".join(self._word)
        if self.tag is None and (at_sep or any(tag.startswith(word) for tag in protocol.TAGS)):
            return ""  # an unknown element, or the stump of a known one
        return behind if self.tag is not None else behind + "".join(self._tail)

    def _break_off(self, rest: str) -> str:
        self._tail.append(rest)
        behind = self._settle()
        return behind + "".join(self._tail)

    def _settle(self) -> str:
        """Decide on the tag; the result is the text before ``_tail`` that is not part of the header."""
        word = "".join(self._word)
        if word in protocol.TAGS:
            self.tag = word
            return ""
        for tag in self._expected:
            if word.startswith(tag):
                self.tag = tag
                return word[len(tag) :]
        return "".join(self._lead) + word

    # --- states: each returns the next position, and sets _broken where the header cannot go on -------------
    def _break(self, position: int) -> int:
        self._broken = True
        return position

    def _in_lead(self, text: str, position: int) -> int:
        if text[position].isspace():
            self._lead.append(text[position])
            return position + 1
        self._state = "tag"
        return position if _WORD.match(text, position) else self._break(position)

    def _in_tag(self, text: str, position: int) -> int:
        word = _WORD.match(text, position)
        if word is not None:
            end = min(word.end(), position + _MAX_TAG - sum(map(len, self._word)))
            self._word.append(text[position:end])
            return end if end == word.end() else self._break(end)
        if not text[position].isspace():
            return self._break(position)
        self._state = "gap"
        return position

    def _in_gap(self, text: str, position: int) -> int:
        if text[position].isspace():
            self._tail.append(text[position])
            return position + 1
        if not (self.is_open and _WORD.match(text, position)):
            return self._break(position)
        self._name = ""
        self._state = "name"
        return position

    def _in_name(self, text: str, position: int) -> int:
        word = _WORD.match(text, position)
        if word is not None:
            end = min(word.end(), position + _MAX_TAG - len(self._name))
            self._tail.append(text[position:end])
            self._name += text[position:end]
            return end if end == word.end() else self._break(end)
        self._state = "named"
        return position

    def _in_named(self, text: str, position: int) -> int:
        char = text[position]
        if char != "=" and not char.isspace():
            return self._break(position)
        self._tail.append(char)
        self._state = "equals" if char == "=" else "named"
        return position + 1

    def _in_equals(self, text: str, position: int) -> int:
        char = text[position]
        if char.isspace():
            self._tail.append(char)
            return position + 1
        self._tail.clear()
        self._value = []
        self._quote = char if char in "\"'" else ""
        self._state = "value" if self._quote else "unquoted"
        return position + 1 if self._quote else position

    def _in_value(self, text: str, position: int) -> int:
        end = text.find(self._quote, position)
        self._value.append(text[position:] if end < 0 else text[position:end])
        if end < 0:
            return len(text)
        self._keep_attribute()
        return end + 1

    def _in_unquoted(self, text: str, position: int) -> int:
        if text[position].isspace():
            self._keep_attribute()
            return position
        self._value.append(text[position])
        return position + 1

    def _keep_attribute(self) -> None:
        value = "".join(self._value).replace("&quot;", '"').replace("&amp;", "&")
        self.attributes.setdefault(self._name, value)
        self._state = "gap"
