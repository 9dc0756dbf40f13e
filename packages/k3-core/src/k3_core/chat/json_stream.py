"""JSON values that are still being generated, as text that is valid JSON at every moment it is closed.

The decoder streams arguments while the model writes them, so it cannot wait for a value's end to see if it is JSON.
:class:`JsonStream` is a transducer: it passes valid JSON through byte for byte (blanks around it excepted), holds back
only what cannot be taken back (a comma, a key without a value, half an escape, an unfinished number or word), and
writes anything else as the JSON that a reader would take it for:

* ``True``/``False``/``None`` -> ``true``/``false``/``null``; another bare word -> a string; a bare or single-quoted key
  or string -> a double-quoted one; a raw line break in a string -> ``\\n``; an unknown escape -> an escaped backslash;
* a comma before a closing bracket is dropped; a key without a value gets ``null``; a wrong closing bracket closes what
  is open; missing brackets and quotes are added at the end; what follows a complete value is dropped;
* a text that is no container and no string is kept whole until its end: JSON stays as it is, anything else is a string.
"""

import json
import re

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_PLAIN = re.compile(r'[^"\'\\\x00-\x1f]+')
_BLANKS = " \t\n\r"
_BARE_END = frozenset(_BLANKS + ",:[]{}\"'")
_BARE = re.compile(r"[^ \t\n\r,:\[\]{}\"']+")
_CLOSER = {"{": "}", "[": "]"}


def escape(text: str) -> str:
    """``text`` as the inside of a JSON string, non-ASCII kept."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def scalar(text: str) -> str:
    """JSON of a bare word: number or literal as it is (Python's spellings translated), else a string."""
    if _NUMBER.fullmatch(text):
        return text
    return _WORDS.get(text) or json.dumps(text, ensure_ascii=False)


class JsonStream:
    """One JSON value, fed in pieces. ``feed(text)`` and ``finish()`` return what to append to the output.

    The joined output depends only on the joined input. Each character is looked at once.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        # What may come next: "value", "key", "colon", "comma" (after a value), "end" (after the whole), or, while a
        # token is unfinished, "string", "bare" and "top" (a top-level text that is neither container nor string).
        self._state = "value"
        self._is_key = False
        self._quote = '"'
        self._escape = ""
        self._token: list[str] = []
        self._comma = False
        self._held: list[str] = []
        self._out: list[str] = []

    def feed(self, text: str) -> str:
        """Consume ``text``; return the JSON that is now certain."""
        position = 0
        while position < len(text):
            position = getattr(self, f"_in_{self._state}")(text, position)
        return self._take()

    def finish(self) -> str:
        """The value ends here: return what completes the JSON."""
        if self._state == "string" and not self._is_key:
            if self._escape:
                self._out.append(escape(self._escape))
            self._out.append('"')
        elif self._state == "bare":
            self._end_bare()
        elif self._state == "top" or not (self._stack or self._state == "end"):
            text = "".join(self._token)
            word = scalar(text.strip())
            self._out.append(json.dumps(text, ensure_ascii=False) if word[0] == '"' else word)
        if self._state == "colon" or (self._state == "value" and self._stack and self._stack[-1] == "{" and self._held):
            self._null()
        while self._stack:
            self._out.append(_CLOSER[self._stack.pop()])
        self._state = "end"
        return self._take()

    def _take(self) -> str:
        out = "".join(self._out)
        self._out.clear()
        return out

    # --- between tokens ---------------------------------------------------------------------------------------------
    def _in_value(self, text: str, position: int) -> int:
        char = text[position]
        if char in _BLANKS:
            if self._stack:
                self._held.append(char)
        elif char in "[{":
            self._release()
            self._out.append(char)
            self._stack.append(char)
            self._state = "key" if char == "{" else "value"
            self._comma = False
        elif char in "\"'" and (self._stack or char == '"'):
            self._release()
            self._open_string(char, is_key=False)
        elif not self._stack:
            self._state = "top"
            return position
        elif char in "]}":
            if self._stack[-1] == "{" and self._held:
                self._null()
            self._close()
        elif char == ",":
            if self._stack[-1] == "{":
                self._null()
                return position
        elif char != ":":
            self._is_key = False
            self._state = "bare"
            return position
        return position + 1

    def _in_key(self, text: str, position: int) -> int:
        char = text[position]
        if char in _BLANKS:
            self._held.append(char)
        elif char in "]}":
            self._close()
        elif char in "\"'":
            self._open_string(char, is_key=True)
        elif char not in ",:[{":
            self._is_key = True
            self._state = "bare"
            return position
        return position + 1

    def _in_colon(self, text: str, position: int) -> int:
        char = text[position]
        if char == ":":
            self._held.append(char)
            self._state = "value"
        elif char in ",]}":
            self._null()
            return position
        elif char in _BLANKS:
            self._held.append(char)
        else:
            self._held.append(": ")
            self._state = "value"
            return position
        return position + 1

    def _in_comma(self, text: str, position: int) -> int:
        char = text[position]
        if char in _BLANKS:
            self._held.append(char)
        elif char == ",":
            self._held.append(char)
            self._comma = True
            self._state = "key" if self._stack[-1] == "{" else "value"
        elif char in "]}":
            self._close()
        return position + 1

    def _in_end(self, text: str, position: int) -> int:
        return len(text)

    def _in_top(self, text: str, position: int) -> int:
        self._token.append(text[position:])
        return len(text)

    # --- tokens -----------------------------------------------------------------------------------------------------
    def _open_string(self, quote: str, is_key: bool) -> None:
        self._quote = quote
        self._is_key = is_key
        self._state = "string"
        (self._held if is_key else self._out).append('"')

    def _in_string(self, text: str, position: int) -> int:
        sink = self._held if self._is_key else self._out
        if self._escape:
            return self._in_escape(text, position, sink)
        run = _PLAIN.match(text, position)
        if run is not None:
            sink.append(run.group())
            return run.end()
        char = text[position]
        if char == self._quote:
            sink.append('"')
            self._after_token()
        elif char == "\\":
            self._escape = char
        else:
            sink.append(char if char == "'" else escape(char))
        return position + 1

    def _in_escape(self, text: str, position: int, sink: list[str]) -> int:
        """``self._escape`` is a backslash, maybe with ``u`` and some of its hexadecimal digits."""
        char = text[position]
        if len(self._escape) == 1:
            if char == "u":
                self._escape += char
                return position + 1
            known = char in '"\\/bfnrt'
            sink.append("'" if char == "'" else f"\\{char}" if known else "\\\\")
            self._escape = ""
            return position + 1 if known or char == "'" else position
        if char in "0123456789abcdefABCDEF":
            self._escape += char
            if len(self._escape) == 6:
                sink.append(self._escape)
                self._escape = ""
            return position + 1
        sink.append(escape(self._escape))
        self._escape = ""
        return position

    def _in_bare(self, text: str, position: int) -> int:
        run = _BARE.match(text, position)
        if run is not None:
            self._token.append(run.group())
            return run.end()
        self._end_bare()
        return position

    def _end_bare(self) -> None:
        text = "".join(self._token)
        self._token.clear()
        if self._is_key:
            self._held.append(json.dumps(text, ensure_ascii=False))
        else:
            self._release()
            self._out.append(scalar(text))
        self._after_token()

    def _after_token(self) -> None:
        if self._is_key:
            self._state = "colon"
        else:
            self._state = "comma" if self._stack else "end"

    def _null(self) -> None:
        """A key that got no value."""
        if self._state == "colon":
            self._held.append(": ")
        self._release()
        self._out.append("null")
        self._state = "comma"

    def _release(self) -> None:
        self._out.extend(self._held)
        self._held.clear()
        self._comma = False

    def _close(self) -> None:
        if self._comma:
            self._held.clear()
        self._release()
        self._out.append(_CLOSER[self._stack.pop()])
        self._state = "comma" if self._stack else "end"
