"""Conversation -> segments -> token ids, as the released encoder of moonshotai/Kimi-K3 does it.

A conversation becomes a row of *segments*, each either structure (special tokens allowed) or text (special tokens are
ordinary characters), and **each segment is tokenised by itself**. So nothing that a user, a tool, an argument or a past
reasoning contains can become structure, and the ids differ from those of the joined text.

Order: tool declaration; thinking effort (thinking mode, when one is given); the messages; tool-choice and
response-format messages; the generation prefix, which leaves an assistant message open inside ``think`` (thinking) or
``response``. Tool results are put into the order of the calls that they answer (:func:`order_tool_results`).

Deliberate differences from the released encoder, each because that one loses what the caller wrote:

* the role ``developer`` is rendered as ``system`` (released: dropped); an unknown role is refused (released: dropped);
* a system message with ``tools`` and ``content`` gives two messages, the declaration first (released: content lost);
* the image placeholder typed in a text stays text; images bind only to image parts (released: it takes an image);
* argument strings keep the spelling of their values (:mod:`k3_core.chat.arguments`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from k3_core.chat import options, protocol
from k3_core.chat.arguments import encode_arguments, sort_keys, to_json
from k3_core.chat.tokenizer import K3Tokenizer
from k3_core.errors import ChatError

_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")


class Segment(NamedTuple):
    """A piece of the prompt, tokenised by itself; with ``allow_special`` names of special tokens become their ids."""

    text: str
    allow_special: bool


@dataclass(frozen=True)
class ImageSpan:
    """Where an image binds: ``ids[start:start + length]`` is ``segments[segment]``, its prompt or placeholder."""

    segment: int
    start: int
    length: int


@dataclass(frozen=True)
class Encoded:
    """An encoded conversation. ``images`` has one entry an image part, in the order of the conversation."""

    ids: list[int]
    segments: list[Segment]
    text: str
    images: list[ImageSpan] = field(default_factory=list)


def image_prompt(width: int, height: int, num_pads: int = 1) -> str:
    """Prompt text of one image: its original size in pixels and ``num_pads`` pad tokens (1 before expansion)."""
    caption = protocol.IMAGE_CAPTION.format(width=width, height=height)
    pads = protocol.MEDIA_PAD * num_pads
    return f"{protocol.MEDIA_BEGIN}{caption}{protocol.MEDIA_CONTENT}{pads}{protocol.MEDIA_END}"


def encode(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    tokenizer: K3Tokenizer,
    add_generation_prompt: bool = True,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: Any = None,
    response_format: Any = None,
    response_schema: Any = None,
    image_prompts: Sequence[str] | None = None,
) -> Encoded:
    """Encode a conversation in OpenAI's form.

    ``messages``: dicts with ``role`` (system, developer, user, assistant, tool), ``content`` (text, None or a list of
    text and image parts), ``name``, ``tool_calls``, ``tool_call_id``, ``reasoning_content`` or ``reasoning``, and on
    system messages ``tools`` (dynamic tools). ``tools``: declared functions. ``thinking_effort``: low, high, max or
    None for no effort message. ``tool_choice``: auto, none, required, a named function.
    ``response_format``: as in OpenAI. ``image_prompts``: one string an image part (see :func:`image_prompt`); None
    renders the placeholder text.

    Raises ChatError, naming the message and what is wrong with it.
    """
    builder = _Builder(options.check_image_prompts(image_prompts))
    thinking = options.check_bool(thinking, "thinking")
    effort = options.check_effort(thinking_effort)
    rows = order_tool_results(_check_messages(messages))
    declared = _check_tools(tools, "tools")
    dynamic = [tool for row in rows for tool in row.get("tools") or []]
    choice = options.check_tool_choice(tool_choice, declared + dynamic)
    kind, schema = options.check_response_format(response_format, response_schema)

    if declared:
        builder.tool_declare(declared, protocol.TOOL_DECLARE)
    if thinking and effort is not None:
        builder.system(protocol.TYPE_THINKING_EFFORT, protocol.EFFORT_MESSAGE.format(effort=effort))
    _render_messages(builder, rows, thinking)
    if choice == "required":
        builder.system(protocol.TYPE_TOOL_CHOICE, protocol.TOOL_CHOICE_REQUIRED)
    elif choice == "none":
        builder.system(protocol.TYPE_TOOL_CHOICE, protocol.TOOL_CHOICE_NONE)
    if kind == "json_object":
        builder.system(protocol.TYPE_RESPONSE_FORMAT, protocol.JSON_OBJECT)
    elif kind == "json_schema":
        body = to_json(sort_keys(schema, "response_format"), "response_format", compact=True)
        builder.system(protocol.TYPE_RESPONSE_FORMAT, protocol.JSON_SCHEMA.replace("{schema}", body))
    if options.check_bool(add_generation_prompt, "add_generation_prompt"):
        builder.open(protocol.TAG_MESSAGE, {protocol.ATTR_ROLE: "assistant"})
        builder.open(protocol.TAG_THINK if thinking else protocol.TAG_RESPONSE)
    builder.check_images_used()
    return _tokenise(builder, tokenizer)


def order_tool_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each run of tool messages in the order of the calls it answers; inputs are not changed.

    A result is matched by ``tool_call_id`` (or ``id``), compared as strings, with the calls of the last assistant
    message before it; the first of equal call ids counts. A run with any unmatched result keeps its order and names; in
    a matched run the call's function name replaces the result's own.
    """
    ordered: list[Mapping[str, Any]] = []
    calls: dict[str, tuple[int, str | None]] = {}
    run: list[Mapping[str, Any]] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            run.append(message)
            continue
        ordered.extend(_order_run(run, calls))
        run = []
        if message is None:
            break
        if message["role"] == "assistant":
            calls = {}
            for position, call in enumerate(message.get("tool_calls") or [], start=1):
                if call.get("id") is not None:
                    calls.setdefault(str(call["id"]), (position, options.function_name(call)))
        ordered.append(message)
    return ordered


def _order_run(run: list[Mapping[str, Any]], calls: dict[str, tuple[int, str | None]]) -> Iterable[Mapping[str, Any]]:
    ids = [message.get("tool_call_id", message.get("id")) for message in run]
    targets = [None if call_id is None else calls.get(str(call_id)) for call_id in ids]
    matched = [(target[0], message, target[1]) for target, message in zip(targets, run, strict=True) if target]
    if len(matched) < len(run):
        return run
    matched.sort(key=lambda item: item[0])
    return [
        message if name is None else {**message, "tool": name, **({"name": name} if "name" in message else {})}
        for _, message, name in matched
    ]


# --- checks ---------------------------------------------------------------------------------------------------------
def _check_messages(messages: Any) -> list[Mapping[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ChatError("messages must be a list of objects with a role")
    rows: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ChatError(f"{where} must be an object with a role, not {type(message).__name__}")
        role = message.get("role")
        if role == "developer":
            message = {**message, "role": "system"}
        elif role not in ("system", "user", "assistant", "tool"):
            raise ChatError(f"{where}: unknown role {role!r}; use system, developer, user, assistant or tool")
        if message.get("function_call"):
            raise ChatError(f"{where}: function_call is not supported; send tool_calls")
        if message.get("tools"):
            if role not in ("system", "developer"):
                raise ChatError(f"{where}: only a system message can declare tools, not a {role} message")
            message = {**message, "tools": _check_tools(message["tools"], f"{where}.tools")}
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, Sequence) and all(isinstance(call, Mapping) for call in calls)):
            raise ChatError(f"{where}.tool_calls must be a list of objects")
        if calls and role != "assistant":
            raise ChatError(f"{where}: only an assistant message can call tools, not a {role} message")
        rows.append(message)
    return rows


def _check_tools(tools: Any, where: str) -> list[Any]:
    if tools is None:
        return []
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ChatError(f"{where} must be a list of tool declarations")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ChatError(f"{where}[{index}] must be an object, not {type(tool).__name__}")
        if tool.get("type", "function") == "function" and not options.function_name(tool):
            raise ChatError(f"{where}[{index}] declares a function without a name")
    return [sort_keys(tool, f"{where}[{index}]") for index, tool in enumerate(tools)]


# --- segments -------------------------------------------------------------------------------------------------------
class _Builder:
    """Grows the row of segments; hands out the image prompts in order."""

    def __init__(self, image_prompts: list[str] | None) -> None:
        self.segments: list[Segment] = []
        self.image_segments: list[int] = []
        self._prompts = image_prompts

    def structure(self, text: str) -> None:
        self.segments.append(Segment(text, True))

    def plain(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False))

    def open(self, tag: str, attributes: Mapping[str, Any] | None = None) -> None:
        self.structure(protocol.OPEN)
        self.plain(tag)
        for key, value in (attributes or {}).items():
            self.plain(f" {key}")
            self.plain('="')
            self.plain(str(value).replace("&", "&amp;").replace('"', "&quot;"))
            self.plain('"')
        self.structure(protocol.SEP)

    def close(self, tag: str) -> None:
        self.structure(protocol.CLOSE)
        self.plain(tag)
        self.structure(protocol.SEP)

    def end_message(self) -> None:
        self.close(protocol.TAG_MESSAGE)
        self.structure(protocol.END_OF_MSG)

    def system(self, kind: str, body: str) -> None:
        self.open(protocol.TAG_MESSAGE, {protocol.ATTR_ROLE: "system", protocol.ATTR_TYPE: kind})
        self.plain(body)
        self.end_message()

    def tool_declare(self, tools: list[Any], template: str) -> None:
        body = to_json(tools, "tools", compact=True)
        self.system(protocol.TYPE_TOOL_DECLARE, template.replace("{tools}", body))

    def image(self) -> None:
        count = len(self.image_segments)
        if self._prompts is not None and count >= len(self._prompts):
            raise ChatError(
                f"More image placeholders than image prompts: the messages hold more than the {count} images given"
            )
        self.image_segments.append(len(self.segments))
        self.structure(protocol.IMAGE_PLACEHOLDER if self._prompts is None else self._prompts[count])

    def check_images_used(self) -> None:
        if self._prompts is not None and len(self._prompts) != len(self.image_segments):
            raise ChatError(
                f"image prompt count {len(self._prompts)} != consumed placeholder count {len(self.image_segments)}; "
                "images bind only to image parts of the messages"
            )


def _render_messages(builder: _Builder, rows: list[Mapping[str, Any]], thinking: bool) -> None:
    calls: Sequence[Mapping[str, Any]] = []
    results = 0
    for index, message in enumerate(rows):
        where = f"messages[{index}]"
        role = message["role"]
        attributes: dict[str, Any] = {protocol.ATTR_ROLE: role}
        if role == "system" and message.get("tools"):
            builder.tool_declare(list(message["tools"]), protocol.DYNAMIC_TOOL_DECLARE)
            if not message.get("content"):
                continue
        if role == "tool":
            results += 1
            attributes[protocol.ATTR_TOOL] = _tool_name(message, calls, results, where)
            attributes[protocol.ATTR_INDEX] = results
        elif message.get("name"):
            attributes[protocol.ATTR_NAME] = message["name"]
        builder.open(protocol.TAG_MESSAGE, attributes)
        if role == "assistant":
            calls, results = message.get("tool_calls") or [], 0
            _render_assistant(builder, message, thinking, where)
        else:
            _render_content(builder, message.get("content"), where)
        builder.end_message()


def _tool_name(message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], result: int, where: str) -> str:
    name = message.get("tool", message.get("name"))
    if name is None and result <= len(calls):
        name = options.function_name(calls[result - 1])
    if name is None:
        raise ChatError(
            f"{where}: Kimi K3 tool messages need a resolvable tool name: carry `tool`/`name`, or match a preceding "
            "assistant tool_call by order."
        )
    return str(name)


def _render_assistant(builder: _Builder, message: Mapping[str, Any], thinking: bool, where: str) -> None:
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(reasoning, str):
            raise ChatError(f"{where}: reasoning or reasoning_content must be text, not {type(reasoning).__name__}")
        builder.open(protocol.TAG_THINK)
        builder.plain(reasoning if reasoning.strip() else "")
        builder.close(protocol.TAG_THINK)
    builder.open(protocol.TAG_RESPONSE)
    _render_content(builder, message.get("content"), where)
    builder.close(protocol.TAG_RESPONSE)
    calls = message.get("tool_calls")
    if not calls:
        return
    builder.open(protocol.TAG_TOOLS)
    for index, call in enumerate(calls, start=1):
        _render_call(builder, call, index, f"{where}.tool_calls[{index - 1}]")
    builder.close(protocol.TAG_TOOLS)


def _render_call(builder: _Builder, call: Mapping[str, Any], index: int, where: str) -> None:
    name = options.function_name(call)
    if not name:
        raise ChatError(f"{where} has no function name")
    arguments = encode_arguments(call.get("function", call).get("arguments"), where)
    builder.open(protocol.TAG_CALL, {protocol.ATTR_TOOL: name, protocol.ATTR_INDEX: index})
    if isinstance(arguments, str):
        builder.open(protocol.TAG_JSON, {protocol.ATTR_TYPE: "object"})
        builder.plain(arguments)
        builder.close(protocol.TAG_JSON)
    else:
        for argument in arguments:
            builder.open(protocol.TAG_ARGUMENT, {protocol.ATTR_KEY: argument.key, protocol.ATTR_TYPE: argument.type})
            builder.plain(argument.text)
            builder.close(protocol.TAG_ARGUMENT)
    builder.close(protocol.TAG_CALL)


def _render_content(builder: _Builder, content: Any, where: str) -> None:
    if content is None:
        return
    if isinstance(content, str):
        builder.plain(content)
        return
    if isinstance(content, bytes | Mapping) or not isinstance(content, Sequence):
        raise ChatError(f"{where}.content must be text or a list of parts, not {type(content).__name__}")
    for index, part in enumerate(content):
        spot = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGE_PARTS:
            builder.image()
        elif isinstance(part, str):
            builder.plain(part)
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            builder.plain(part["text"])
        elif kind in _TEXT_PARTS:
            raise ChatError(f"{spot}: a {kind} part needs a text, not {part.get('text')!r}")
        else:
            raise ChatError(f"{spot}: Kimi K3 takes text and image parts, not {kind or type(part).__name__!r}")


def _tokenise(builder: _Builder, tokenizer: K3Tokenizer) -> Encoded:
    ids: list[int] = []
    spans: list[ImageSpan] = []
    images = set(builder.image_segments)
    for index, segment in enumerate(builder.segments):
        row = tokenizer.encode(segment.text, segment.allow_special)
        if index in images:
            spans.append(ImageSpan(index, len(ids), len(row)))
        ids.extend(row)
    return Encoded(ids, builder.segments, "".join(segment.text for segment in builder.segments), spans)
