"""Replies in vLLM: reasoning, content and tool calls, all through the one decoder of ``k3_core.chat``.

vLLM composes a reasoning and a tool parser, registered by name, into one ``Parser`` a request. The two halves here
work alone, and :mod:`k3_core.vllm.compose` makes vLLM compose them as :class:`KimiK3Parser`, which feeds one decoder
for streaming and for whole replies alike, so the two cannot differ.

Where vLLM passes token ids (always, in serving), structure is taken from them (:mod:`k3_core.chat.align`); text that
merely spells a marker stays text. Text alone is read by the same rules with the markers as literals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.parser.abstract_parser import DelegatingParser
from vllm.reasoning import ReasoningParser
from vllm.tool_parsers.abstract_tool_parser import ToolParser

from k3_core.chat import Event, K3Tokenizer, Reply, StreamParser, protocol, resolve_thinking
from k3_core.chat.align import TokenAligner
from k3_core.chat.markers import TextScanner
from k3_core.chat.options import THINKING_OPTIONS, function_name
from k3_core.errors import ChatError
from k3_core.vllm import structured

try:  # vLLM 0.32
    from vllm.entrypoints.generate.base.protocol import (
        DeltaFunctionCall,
        DeltaMessage,
        DeltaToolCall,
        ExtractedToolCallInformation,
        FunctionCall,
        ToolCall,
    )
except ImportError:  # 0.27, 0.23
    from vllm.entrypoints.openai.engine.protocol import (
        DeltaFunctionCall,
        DeltaMessage,
        DeltaToolCall,
        ExtractedToolCallInformation,
        FunctionCall,
        ToolCall,
    )

_MAX_MARKER = 24  # tokens of the longest marker that decides where reasoning ends, however it was tokenised


def thinking_of(kwargs: dict[str, Any] | None) -> bool:
    """Whether a request with these chat_template_kwargs thinks; the renderer refuses contradictions, here they do."""
    try:
        return resolve_thinking({n: v for n, v in (kwargs or {}).items() if n in THINKING_OPTIONS}).thinking
    except ChatError:
        return True


def k3_tokenizer(tokenizer: Any) -> K3Tokenizer:
    """The vocabulary behind vLLM's tokenizer. Raises ChatError for any other tokenizer."""
    k3 = getattr(tokenizer, "k3", None)
    if not isinstance(k3, K3Tokenizer):
        raise ChatError(
            f"the kimi_k3 parsers need Kimi K3's tokenizer (--tokenizer-mode kimi_k3), not {type(tokenizer).__name__}"
        )
    return k3


def calls_before(request: Any) -> int:
    """Tool calls that the conversation of ``request`` already holds (Chat Completions or Responses)."""
    count = 0
    for item in getattr(request, "messages", None) or []:
        count += len(list(_get(item, "tool_calls") or []))
    items = getattr(request, "input", None)
    for item in items if isinstance(items, list) else []:
        count += _get(item, "type") == "function_call"
    return count


def wants_calls(request: Any) -> bool:
    """Whether tool calls of the reply go to the client."""
    return bool(getattr(request, "tools", None)) and getattr(request, "tool_choice", None) != "none"


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, dict) else getattr(item, key, None)


class _Output:
    """One reply on its way through the decoder."""

    def __init__(self, k3: K3Tokenizer, thinking: bool, first_call: int = 0) -> None:
        self.parser = StreamParser(thinking, tokenizer=k3, first_call=first_call)
        self._aligner = TokenAligner(self.parser)

    def feed(self, text: str, ids: Iterable[int], finished: bool) -> list[Event]:
        events = self.parser.feed_pieces(self._aligner.feed(text, ids))
        if finished:
            events += self.parser.feed_pieces(self._aligner.finish())
            events += self.parser.finish()
        return events


def delta_of(events: Iterable[Event], calls: bool = True, reasoning: bool = True) -> DeltaMessage | None:
    """Events of one step as one message delta; None when there is nothing for the client."""
    texts = {"reasoning": "", "content": ""}
    tools: dict[int, DeltaToolCall] = {}
    for event in events:
        if event.kind in texts:
            texts[event.kind] += event.text
        elif event.kind == "call":
            function = DeltaFunctionCall(name=event.name, arguments="")
            tools[event.index] = DeltaToolCall(index=event.index, id=event.id, type="function", function=function)
        elif event.kind == "arguments":
            tool = tools.setdefault(
                event.index, DeltaToolCall(index=event.index, function=DeltaFunctionCall(arguments=""))
            )
            assert tool.function is not None
            tool.function.arguments = (tool.function.arguments or "") + event.text
    message: dict[str, Any] = {}
    if texts["reasoning"] and reasoning:
        message["reasoning"] = texts["reasoning"]
    if texts["content"]:
        message["content"] = texts["content"]
    if tools and calls:
        message["tool_calls"] = list(tools.values())
    return DeltaMessage(**message) if message else None


def plain_markers(request: Any) -> Any:
    """Keep special tokens in the text of a reply, without blanks between them: they are the structure."""
    request.skip_special_tokens = False
    if hasattr(request, "spaces_between_special_tokens"):
        request.spaces_between_special_tokens = False
    return request


class KimiK3ReasoningParser(ReasoningParser):
    """Where reasoning ends: for the engine's grammars by token ids, and alone as a text parser."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._k3 = k3_tokenizer(tokenizer)
        self.thinking = thinking_of(kwargs.get("chat_template_kwargs"))
        self._knows_chat = "chat_template_kwargs" in kwargs  # the engine's own instance for a raw prompt is given none
        self._stream: StreamParser | None = None
        self._counted = (0, 0, True, False)  # tokens seen, of reasoning, inside think, inside a marker

    @property
    def reasoning_start_str(self) -> str:
        """The marker that opens ``think``."""
        return f"{protocol.OPEN}{protocol.TAG_THINK}{protocol.SEP}"

    @property
    def reasoning_end_str(self) -> str:
        """The marker that closes ``think``."""
        return f"{protocol.CLOSE}{protocol.TAG_THINK}{protocol.SEP}"

    def adjust_request(self, request: Any) -> Any:
        """Markers have to reach the parser."""
        return plain_markers(request)

    # --- token ids --------------------------------------------------------------------------------------------------
    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the newest channel marker is not an open ``think`` (without any: whether thinking is off).

        A raw prompt (`/v1/completions`) without any marker opens no reasoning, so its constraint holds from the first
        token; the engine asks in every step, hence the quick test.
        """
        if not self.thinking or not (self._knows_chat or self._k3.open_id in input_ids):
            return True
        newest = self._newest_marker(input_ids, 0)
        return newest is not None and newest[0]

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """The same for markers that end within ``delta_ids``, looking at those and a marker's length before them."""
        if not self.thinking:
            return True
        delta = list(delta_ids)
        head = len(input_ids) - len(delta)
        window = list(input_ids[max(0, head - _MAX_MARKER) : head]) + delta
        newest = self._newest_marker(window, len(window) - len(delta))
        return newest is not None and newest[0]

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Ids behind the reasoning: behind the close of ``think``, or from the marker that opened another channel."""
        if not self.thinking:
            return input_ids
        newest = self._newest_marker(input_ids, 0)
        return list(input_ids[newest[1] :]) if newest is not None and newest[0] else []

    def _newest_marker(self, ids: Sequence[int], since: int) -> tuple[bool, int] | None:
        """(reasoning is over, start of content) of the last channel marker whose <|sep|> is at ``since`` or later."""
        end = None
        for position in range(len(ids) - 1, -1, -1):
            token = ids[position]
            if token == self._k3.sep_id:
                if position < since:
                    return None
                end = position
            elif token in (self._k3.open_id, self._k3.close_id):
                if end is not None and end - position <= _MAX_MARKER:
                    tag = self._k3.decode(ids[position + 1 : end]).strip()
                    if tag == protocol.TAG_THINK:
                        return token == self._k3.close_id, end + 1
                    if token == self._k3.open_id and tag in (protocol.TAG_RESPONSE, protocol.TAG_TOOLS):
                        return True, position
                end = None
            elif position < since - _MAX_MARKER:
                return None
        return None

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Generated tokens inside ``think``, markers not counted. Grows with the reply, so earlier work is kept."""
        if not self.thinking:
            return 0
        seen, count, inside, marker = self._counted if len(token_ids) >= self._counted[0] else (0, 0, True, False)
        for position in range(seen, len(token_ids)):
            token = token_ids[position]
            if token in (self._k3.open_id, self._k3.close_id):
                marker = True
            elif token == self._k3.sep_id:
                newest = self._newest_marker(token_ids[max(0, position - _MAX_MARKER) : position + 1], 0)
                if marker and newest is not None:
                    inside = not newest[0]
                marker = False
            elif inside and not marker and token not in self._k3.special_ids:
                count += 1
        self._counted = (len(token_ids), count, inside, marker)
        return count

    # --- text -------------------------------------------------------------------------------------------------------
    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """(reasoning, the rest). The rest is raw, for a tool parser, when the request has tools; else the content."""
        if not wants_calls(request):
            reply = _decode(model_output, self.thinking)
            return reply.reasoning or None, reply.content or None
        if not self.thinking:
            return None, model_output
        parser = StreamParser(True)
        position = mark = 0
        closing = False
        for piece, is_structure in _cut(model_output):
            if is_structure and piece in (protocol.OPEN, protocol.CLOSE):
                mark, closing = position, piece == protocol.CLOSE
            parser.feed_pieces([(piece, is_structure)])
            position += len(piece)
            if not parser.in_reasoning:
                rest = model_output[position if closing and piece == protocol.SEP else mark :]
                return parser.reply.reasoning or None, rest or None
        parser.finish()
        return parser.reply.reasoning or None, None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Reasoning and content of the next text; tool calls are the tool parser's."""
        if self._stream is None or not previous_text:
            self._stream = StreamParser(self.thinking)
        return delta_of(self._stream.feed(delta_text), calls=False)


class KimiK3ToolParser(ToolParser):
    """Tool calls of the reply behind the reasoning, whole or streamed."""

    supports_required_and_named = False  # forced calls come in K3's own format, held to it by a structural tag

    def __init__(self, tokenizer: Any, tools: Any = None, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(tokenizer, tools)
        except TypeError:  # 0.23 and older take the tokenizer only
            super().__init__(tokenizer)
        k3_tokenizer(tokenizer)
        self._stream: StreamParser | None = None

    def adjust_request(self, request: Any) -> Any:
        """Markers have to reach the parser; constraints are set by :class:`KimiK3Parser`."""
        return plain_markers(request)

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Calls and content of the text behind the reasoning (reasoning that is still there is dropped)."""
        reply = _decode(model_output, thinking=_starts_in_think(model_output), first_call=calls_before(request))
        calls = [
            ToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in reply.tool_calls
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=reply.content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """The next text's part of content and calls."""
        if self._stream is None or not previous_text:
            self._stream = StreamParser(False, first_call=calls_before(request))
        return delta_of(self._stream.feed(delta_text), reasoning=False)


def _starts_in_think(text: str) -> bool:
    """Whether text begins inside ``think``: that is closed in it before it is opened."""
    probe = StreamParser(True)
    for piece, is_structure in _cut(text):
        probe.feed_pieces([(piece, is_structure)])
        if not probe.in_reasoning:
            before = text[: text.find(protocol.SEP)].rsplit(protocol.CLOSE, 1)
            return len(before) == 2 and before[1].strip() == protocol.TAG_THINK
    return False


def _cut(text: str) -> list[tuple[str, bool]]:
    scanner = TextScanner()
    pieces = list(scanner.feed(text))
    return [*pieces, (scanner.held, False)] if scanner.held else pieces


def _decode(text: str, thinking: bool, first_call: int = 0) -> Reply:
    parser = StreamParser(thinking, first_call=first_call)
    parser.feed(text)
    parser.finish()
    return parser.reply


class KimiK3Parser(DelegatingParser):
    """vLLM's parser of one reply: one decoder, fed step by step or all at once."""

    always_adjust_request = True
    keeps_length = True  # see k3_core.vllm.compose.keep_length

    def __init__(self, tokenizer: Any, tools: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, tools, *args, **kwargs)
        self._k3 = k3_tokenizer(tokenizer)
        self._thinking = thinking_of(kwargs.get("chat_template_kwargs"))
        self._output: _Output | None = None

    def adjust_request(self, request: Any) -> Any:
        """Plain markers, and one structural tag for all that the request constrains: format and calls."""
        request = plain_markers(request)
        wish = self._wish(request)
        if wish is None:
            return request
        from vllm.sampling_params import StructuredOutputsParams

        tag = structured.reply_tag(wish, self._k3)
        request.structured_outputs = StructuredOutputsParams(structural_tag=tag)
        if hasattr(request, "response_format"):
            request.response_format = None
        elif hasattr(request, "text"):
            request.text = None
        return request

    def _wish(self, request: Any) -> structured.Wish | None:
        """What the request constrains, or None."""
        body = structured.body_format(_structured_outputs(request))
        tools = [_plain(tool) for tool in getattr(request, "tools", None) or []]
        tools = [tool for tool in tools if function_name(tool) and tool.get("type", "function") == "function"]
        choice = _choice_name(getattr(request, "tool_choice", None)) if tools else "none"
        level = int(getattr(self, "tool_strict_level", 0) or 0)
        parallel = getattr(request, "parallel_tool_calls", True) is not False
        strict_tool = any(tool.get("function", tool).get("strict") is True for tool in tools)
        held = choice not in ("none", "auto") or (choice == "auto" and (strict_tool or level > 0 or not parallel))
        if body is None and not held:
            return None
        in_think = self._thinking and (
            self._reasoning_parser is None or not getattr(request, "include_reasoning", True)
        )
        return structured.Wish(
            body=body,
            tools=tools,
            choice=choice,
            parallel=parallel,
            strict="all" if level > 1 else "declared",
            opens_response=self._thinking,
            covers_think=in_think,
        )

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        """(reasoning, content, complete tool calls) of a whole reply."""
        output = _Output(self._k3, self._thinking, calls_before(request))
        output.feed(model_output, model_output_token_ids, finished=True)
        reply = output.parser.reply
        calls = [FunctionCall(id=c.id, name=c.name, arguments=c.arguments) for c in reply.tool_calls]
        return reply.reasoning or None, reply.content or None, calls if self._sends_calls(request) else []

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """The next step of a streamed reply."""
        if self._output is None:
            self._output = _Output(self._k3, self._thinking, calls_before(request))
        events = self._output.feed(delta_text, delta_token_ids, finished)
        return delta_of(events, self._sends_calls(request), getattr(request, "include_reasoning", True))

    def _sends_calls(self, request: Any) -> bool:
        """Whether calls go to the client: with a tool parser, or where the request forces them."""
        forced = getattr(request, "tool_choice", None) not in (None, "auto", "none")
        return wants_calls(request) and (self._tool_parser is not None or forced)

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        """Whether generation behind ``input_ids`` starts outside ``think``."""
        if self._reasoning_parser is None:
            return not self._thinking
        return self._reasoning_parser.is_reasoning_end(input_ids)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Generated tokens inside ``think``."""
        return self._reasoning_parser.count_reasoning_tokens(token_ids) if self._reasoning_parser is not None else 0


def _plain(item: Any) -> Any:
    dump = getattr(item, "model_dump", None)
    return dump(mode="json", by_alias=True, exclude_none=True) if callable(dump) else item


def _choice_name(choice: Any) -> str:
    """``none``, ``auto``, ``required`` or the named function."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        return choice
    plain = _plain(choice)
    name = function_name(plain)
    if name is None:
        raise ChatError(f"tool_choice={plain!r} is not supported for Kimi K3; use none, auto, required or a function")
    return name


def _structured_outputs(request: Any) -> Any:
    """The request's constraint as ``StructuredOutputsParams``, from whichever field it came."""
    extract = getattr(request, "extract_structured_outputs", None)
    if callable(extract):
        return extract()
    from vllm.sampling_params import StructuredOutputsParams

    wanted = getattr(request, "response_format", None) or getattr(getattr(request, "text", None), "format", None)
    wanted = _plain(wanted)
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        return StructuredOutputsParams(json=(wanted.get("json_schema") or wanted).get("schema"))
    if kind == "structural_tag":
        import json

        return StructuredOutputsParams(structural_tag=json.dumps(wanted))
    return getattr(request, "structured_outputs", None)
