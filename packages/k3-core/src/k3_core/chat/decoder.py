"""The one decoder: model output in any pieces -> reasoning, content, tool calls. :func:`parse` is it, fed everything.

Grammar of a well-formed reply (the prompt has opened ``message`` and ``think`` or ``response``)::

    reply     = [ reasoning CLOSE(think) OPEN(response) ] content CLOSE(response) [ tools ] end
    end       = CLOSE(message) <|end_of_msg|>
    tools     = OPEN(tools) { call } CLOSE(tools)
    call      = OPEN(call tool="name" index="1") { argument } CLOSE(call)
    argument  = OPEN(argument key="k" type="t") value CLOSE(argument)
    OPEN(x)   = <|open|> x <|sep|>          CLOSE(x) = <|close|> x <|sep|>

What is structure. :meth:`StreamParser.feed_ids` knows: structure is special token ids, and text that merely spells a
marker is text. :meth:`StreamParser.feed` sees only text, so there the literals ``<|open|>`` ``<|close|>`` ``<|sep|>``
``<|end_of_msg|>`` and the media tokens are structure wherever they stand (a raw string that spells one is ambiguous in
that form, and only there).

Recovery: what a careful reader would understand. No byte of a marker reaches reasoning, content or arguments.

1.  Blanks inside a marker do not matter (``<|close|> response <|sep|>``). A lost ``<|sep|>`` is assumed behind a tag
    that is followed by something that is no tag character, or behind a tag that was expected. ``<|open|>`` and
    ``<|close|>`` followed by no tag at all are dropped, their text stays; so are those of an unknown element.
2.  A missing close: opening ``response`` or ``tools`` ends ``think``; opening a channel, a call or an argument, closing
    anything further out, and the end of the message, end what is inside. ``<|close|>`` of what is not open is dropped.
3.  A missing open: ``call`` outside ``tools`` opens it; text between channels that is not blank is content (without the
    blanks before it); a tag name there, followed by ``<|sep|>``, is an open marker that lost its ``<|open|>``.
4.  ``think`` opened later is reasoning, wherever it stands (also with thinking off). The prompt's own prefix, repeated
    by the model, is dropped. An argument outside a call, a call without a name, and text inside ``tools`` are dropped;
    text directly in a call that starts with ``{`` is its arguments.
5.  ``CLOSE(message)``, ``<|end_of_msg|>``, the ids of ``[EOS]`` and ``[EOT]``, and opening another message end the
    reply; everything behind is dropped. Other special ids (media, reserved) are dropped where they stand.
6.  Values: a string is raw text; other types stream as JSON (:mod:`k3_core.chat.json_stream` says how broken JSON is
    read). ``arguments`` of a complete call is always one JSON object; its values keep the model's spelling.
7.  The stream may stop anywhere. What was complete stays: texts so far (an unfinished marker is no text) and closed
    calls. An unfinished call is not in the reply; a client that was streamed its beginning got no ``call_end``.
    ``finish`` is then ``length``; it is ``stop`` or ``tool_calls`` only when the model ended its message, or had closed
    its last channel.

Call ids are ``functions.<name>:<n>``, n counting the calls of the conversation from ``first_call``: unique and stable.
Each character is looked at a bounded number of times, so the cost of a token does not depend on the length so far.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence

from k3_core.chat import protocol
from k3_core.chat.calls import CallBuilder
from k3_core.chat.markers import Header, TextScanner
from k3_core.chat.reply import Event, EventKind, FinishReason, Reply, ToolCall
from k3_core.chat.tokenizer import K3Tokenizer
from k3_core.errors import ChatError

_THINK, _RESPONSE, _TOOLS = protocol.TAG_THINK, protocol.TAG_RESPONSE, protocol.TAG_TOOLS
_CALL, _ARGUMENT, _JSON = protocol.TAG_CALL, protocol.TAG_ARGUMENT, protocol.TAG_JSON
_CHANNELS = frozenset({_THINK, _RESPONSE, _TOOLS})
#: Which tags are likely to open in which element ("" is between channels); see rule 1.
_OPENS = {
    "": _CHANNELS | {protocol.TAG_MESSAGE},
    _THINK: frozenset({_RESPONSE, _TOOLS}),
    _RESPONSE: frozenset({_TOOLS}),
    _TOOLS: frozenset({_CALL}),
    _CALL: frozenset({_ARGUMENT, _JSON}),
    _ARGUMENT: frozenset({_ARGUMENT}),
    _JSON: frozenset[str](),
}
#: Words between channels that may yet turn out to be structure (rule 3); the last two are terminators spelt as text.
_GAP_WORDS = (*sorted(_CHANNELS), protocol.TAG_MESSAGE, protocol.EOS, protocol.EOT)
_MAX_GAP = 64
_OUTER = {_ARGUMENT: (_ARGUMENT, _CALL, _TOOLS), _JSON: (_JSON, _CALL, _TOOLS), _CALL: (_CALL, _TOOLS)}


class StreamParser:
    """Incremental decoder of one reply.

    ``thinking``: whether the prompt left ``think`` open (else ``response``). ``tokenizer``: for :meth:`feed_ids`.
    ``first_call``: number of tool calls earlier in the conversation, for unique ids.
    """

    def __init__(self, thinking: bool = True, *, tokenizer: K3Tokenizer | None = None, first_call: int = 0) -> None:
        self._tokenizer = tokenizer
        self._first_call = first_call
        self._scanner = TextScanner()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._element = _THINK if thinking else _RESPONSE
        self._header: Header | None = None
        self._gap = ""  # text between channels that waits: it may be a tag name that lost its <|open|>
        self._closed_channel = False
        self._done = False
        self._untouched = True
        self._finished = False
        self._call: CallBuilder | None = None
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[ToolCall] = []
        self._open_call: tuple[int, str, str, list[str]] | None = None
        self._num_calls = 0
        self._events: list[Event] = []

    # --- input ------------------------------------------------------------------------------------------------------
    def feed(self, text: str) -> list[Event]:
        """Text of the output, cut anywhere."""
        return self.feed_pieces(self._scanner.feed(text))

    def feed_ids(self, ids: int | Sequence[int]) -> list[Event]:
        """Token ids of the output, cut anywhere. Do not mix with :meth:`feed` in one stream."""
        return self.feed_pieces(self.pieces([ids] if isinstance(ids, int) else ids))

    def pieces(self, ids: Iterable[int]) -> Iterator[tuple[str, bool]]:
        """(text, is_structure) of the next ids of this stream; text waits until its last character is complete."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ChatError("StreamParser was made without a tokenizer; pass tokenizer= to feed token ids")
        for token in ids:
            data = tokenizer.token_bytes(token)
            if token in tokenizer.special_ids:
                broken = self._utf8.decode(b"", final=True)
                self._utf8.reset()
                if broken:
                    yield broken, False
                yield data.decode(), True
            elif text := self._utf8.decode(data):
                yield text, False

    def feed_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[Event]:
        """Output that is already cut into (text, is_structure); ``is_structure`` pieces are names of special tokens."""
        if self._finished:
            raise ChatError("this stream is finished; make a new StreamParser")
        for text, is_structure in pieces:
            if self._done:
                continue
            if is_structure:
                self._structure(text)
            else:
                self._text(text)
        return self._take()

    def finish(self) -> list[Event]:
        """The output ends here. Idempotent."""
        if not self._finished:
            self._finished = True
            if not self._done:
                broken = self._utf8.decode(b"", final=True)
                if broken and self._header is None:
                    self._text(broken)
            self._events.append(Event("finish", self._reason()))
        return self._take()

    @property
    def reply(self) -> Reply:
        """The reply as far as it is known."""
        texts = {kind: "".join(pieces) for kind, pieces in self._texts.items()}
        return Reply(texts["reasoning"], texts["content"], list(self._calls), self._reason())

    @property
    def in_reasoning(self) -> bool:
        """Whether the output is inside the think channel now."""
        return self._element == _THINK and not self._done

    @property
    def done(self) -> bool:
        """Whether the model has ended its message."""
        return self._done

    def _reason(self) -> FinishReason:
        pending = self._header is not None or self._scanner.held or self._gap
        if not (self._done or (self._element == "" and self._closed_channel and not pending)):
            return "length"
        return "tool_calls" if self._calls else "stop"

    # --- structure --------------------------------------------------------------------------------------------------
    def _structure(self, token: str) -> None:
        header, self._header = self._header, None
        if header is not None:
            behind = header.end(at_sep=token == protocol.SEP)
            self._marker(header)
            if behind and not self._done:
                self._text(behind)
            if token == protocol.SEP or self._done:
                return
        if token != protocol.SEP and self._gap:
            self._release_gap()
        if token in (protocol.OPEN, protocol.CLOSE):
            is_open = token == protocol.OPEN
            expected = _OPENS[self._element] if is_open else frozenset({self._element or protocol.TAG_MESSAGE})
            self._header = Header(is_open, expected)
        elif token in protocol.TERMINATORS:
            self._end_message()
        elif token == protocol.SEP and self._element == "" and self._gap:
            word = self._gap.rstrip()
            if word in _CHANNELS:
                self._open(word, {})

    def _marker(self, header: Header) -> None:
        """A header is complete: act on it."""
        tag = header.tag
        if tag is None or tag not in protocol.TAGS:
            return
        if header.is_open:
            self._open(tag, header.attributes)
        else:
            self._close(tag)

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == protocol.TAG_MESSAGE:
            if not (self._untouched and attributes.get(protocol.ATTR_ROLE) == "assistant"):
                self._end_message()
        elif tag in _CHANNELS:
            self._close_inner("")
            self._enter(tag)
        elif tag == _CALL:
            self._close_inner(_TOOLS)
            self._start_call(attributes.get(protocol.ATTR_TOOL, ""))
            self._enter(_CALL)
        elif self._element in (_CALL, _ARGUMENT, _JSON):
            self._close_inner(_CALL)
            self._enter(tag)
            if self._call is not None:
                self._argument(self._call.open_json() if tag == _JSON else self._call.open_argument(attributes))
        else:
            # An argument without a call: dropped with all text up to the next marker that opens or closes a channel.
            self._close_inner("")
            self._enter(_TOOLS)

    def _close(self, tag: str) -> None:
        if tag == protocol.TAG_MESSAGE:
            self._end_message()
        elif tag in (_THINK, _RESPONSE):
            # CLOSE(response) also ends a think channel that was never closed.
            if self._element == tag or (tag == _RESPONSE and self._element == _THINK):
                self._enter("")
                self._closed_channel = self._closed_channel or tag == _RESPONSE
        elif tag in _OUTER.get(self._element, (self._element,)):
            if tag == _TOOLS:
                self._close_inner("")
                self._closed_channel = True
            else:
                self._close_inner(_TOOLS if tag == _CALL else _CALL)

    def _close_inner(self, outer: str) -> None:
        """End what is open inside ``outer`` ("", tools or call), and be there."""
        if self._element in (_ARGUMENT, _JSON, _CALL):
            if outer == _CALL:
                if self._call is not None:
                    self._argument(self._call.close_element())
            else:
                self._finish_call()
        self._enter(outer)

    def _enter(self, element: str) -> None:
        self._element = element
        self._gap = ""
        if element == _TOOLS:
            self._closed_channel = False

    def _end_message(self) -> None:
        self._close_inner("")
        self._done = True

    # --- text -------------------------------------------------------------------------------------------------------
    def _text(self, text: str) -> None:
        if self._header is not None:
            header = self._header
            behind = header.feed(text)
            if behind is None:
                return
            self._header = None
            self._marker(header)
            if self._done or not behind:
                return
            text = behind
        if self._element == "":
            self._between(text)
        else:
            self._inside(text)

    def _inside(self, text: str) -> None:
        if self._element == _THINK:
            self._emit("reasoning", text)
        elif self._element == _RESPONSE:
            self._emit("content", text)
        elif self._call is not None and self._element != _TOOLS:
            if not self._call.in_element:
                text = text.lstrip()
                self._argument(self._call.open_bare(text))
                self._element = _JSON if self._call.in_element else _CALL
            self._argument(self._call.text(text))

    def _between(self, text: str) -> None:
        """Text between channels: blanks and words that may be structure wait; anything else is content (rule 3)."""
        self._gap = (self._gap + text).lstrip()
        word = self._gap.rstrip()
        if self._gap.startswith((protocol.EOS, protocol.EOT)):
            self._end_message()
        elif len(self._gap) > _MAX_GAP or not (
            word in _GAP_WORDS or any(name.startswith(self._gap) for name in _GAP_WORDS)
        ):
            self._release_gap()

    def _release_gap(self) -> None:
        """What waited between the channels is content after all."""
        text, self._gap = self._gap, ""
        self._element = _RESPONSE
        self._emit("content", text)

    # --- output -----------------------------------------------------------------------------------------------------
    def _emit(self, kind: EventKind, text: str) -> None:
        self._untouched = False
        self._texts[kind].append(text)
        last = self._events[-1] if self._events else None
        if last is not None and last.kind == kind:
            self._events[-1] = Event(kind, last.text + text)
        else:
            self._events.append(Event(kind, text))

    def _start_call(self, name: str) -> None:
        self._untouched = False
        if not name.strip():
            self._call = None
            return
        index = self._num_calls
        self._num_calls += 1
        call_id = f"functions.{name}:{self._first_call + index}"
        self._call = CallBuilder()
        self._open_call = (index, call_id, name, [])
        self._events.append(Event("call", index=index, id=call_id, name=name))

    def _argument(self, text: str) -> None:
        if not text or self._open_call is None:
            return
        index, _, _, pieces = self._open_call
        pieces.append(text)
        last = self._events[-1] if self._events else None
        if last is not None and last.kind == "arguments" and last.index == index:
            self._events[-1] = Event("arguments", last.text + text, index)
        else:
            self._events.append(Event("arguments", text, index))

    def _finish_call(self) -> None:
        if self._call is None or self._open_call is None:
            return
        self._argument(self._call.close())
        index, call_id, name, pieces = self._open_call
        self._calls.append(ToolCall(call_id, name, "".join(pieces), index))
        self._events.append(Event("call_end", index=index))
        self._call = self._open_call = None

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def parse(
    text: str | Sequence[int], thinking: bool = True, *, tokenizer: K3Tokenizer | None = None, first_call: int = 0
) -> Reply:
    """Decode a whole output, given as text or (with ``tokenizer``) as token ids."""
    parser = StreamParser(thinking, tokenizer=tokenizer, first_call=first_call)
    if isinstance(text, str):
        parser.feed(text)
    else:
        parser.feed_ids(text)
    parser.finish()
    return parser.reply
