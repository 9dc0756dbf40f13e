"""Options of a chat request: what is allowed, how two spellings of one wish are reconciled, what is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3_core.chat import protocol
from k3_core.errors import ChatError

#: Options of :func:`k3_core.chat.encode`, with their defaults.
ENCODE_OPTIONS: dict[str, Any] = {
    "add_generation_prompt": True,
    "thinking": True,
    "thinking_effort": None,
    "tool_choice": None,
    "response_format": None,
    "response_schema": None,
    "image_prompts": None,
}
#: Every chat_template_kwargs name in which a request can ask for thinking; see :func:`resolve_thinking`.
THINKING_OPTIONS = ("thinking", "enable_thinking", "thinking_effort", "reasoning_effort")


@dataclass(frozen=True)
class Thinking:
    """Whether the reply starts in the think channel, and the effort that the prompt names (None: it names none)."""

    thinking: bool
    effort: str | None


def check_effort(effort: Any, where: str = "thinking_effort") -> str | None:
    """``effort`` if it is None or an allowed value, else ChatError."""
    if effort is not None and effort not in protocol.THINKING_EFFORTS:
        raise ChatError(
            f"Unsupported {where}={effort!r}; supported values are {sorted(protocol.THINKING_EFFORTS)}"
            + (" and 'none' (thinking off)." if where == "reasoning_effort" else ".")
        )
    return None if effort is None else str(effort)


def check_bool(value: Any, where: str) -> bool:
    """``value`` if it is True or False, else ChatError."""
    if not isinstance(value, bool):
        raise ChatError(f"{where} must be true or false, not {value!r}")
    return value


def resolve_thinking(
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    default_effort: str | None = protocol.DEFAULT_EFFORT,
) -> Thinking:
    """Reconcile every spelling in which a request can ask for thinking.

    ``chat_template_kwargs``: ``thinking`` or ``enable_thinking`` (true/false), ``thinking_effort`` (low, high, max) and
    ``reasoning_effort``; ``reasoning_effort``: the request's own field (none, low, high, max). Without any of them:
    thinking is on with ``default_effort``, as in the released tokenizer.

    An effort beside ``thinking: false`` is checked and has no effect, as in the released encoder. Refused (ChatError):
    other values, two different answers to one question, and ``thinking: true`` beside ``reasoning_effort: none``.
    """
    given = dict(chat_template_kwargs or {})
    switches = {
        name: check_bool(given[name], f"chat_template_kwargs.{name}")
        for name in ("thinking", "enable_thinking")
        if given.get(name) is not None
    }
    efforts: dict[str, str] = {}
    for name, value in (
        ("thinking_effort", given.get("thinking_effort")),
        ("reasoning_effort", given.get("reasoning_effort")),
        ("reasoning_effort", reasoning_effort),
    ):
        if value is None:
            continue
        if name == "reasoning_effort" and value == "none":
            switches["reasoning_effort"] = False
            continue
        checked = str(check_effort(value, name))
        if efforts.setdefault(name, checked) != checked:
            raise ChatError(f"reasoning_effort is given twice, as {efforts[name]!r} and {checked!r}")
    if len(set(switches.values())) > 1:
        raise ChatError(f"thinking is switched both on and off: {switches}; give one of them")
    if len(set(efforts.values())) > 1:
        raise ChatError(f"two different efforts: {efforts}; give one of them")
    thinking = next(iter(switches.values()), True)
    if not thinking:
        return Thinking(False, None)
    return Thinking(True, next(iter(efforts.values()), default_effort))


def check_tool_choice(choice: Any, tools: list[Any] | None) -> str | None:
    """The choice as ``auto``, ``none``, ``required`` or None; a named function gives None (the prompt says nothing).

    Raises ChatError for anything else, and for a named function that is not among ``tools``.
    """
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    name = None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ChatError(
            f"tool_choice={choice!r} is not understood; give 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}'
        )
    names = [function_name(tool) for tool in tools or []]
    if tools and name not in names:
        raise ChatError(f"tool_choice names the function {name!r}, which is not among the tools {names}")
    return None


def function_name(tool: Any) -> str | None:
    """Name of a declared tool, in the chat (nested ``function``) or the flat form."""
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def check_response_format(response_format: Any, response_schema: Any = None) -> tuple[str | None, Any]:
    """(``json_object`` | ``json_schema`` | None, schema). Raises ChatError for an unknown type or a missing schema."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if kind in (None, "text", "structural_tag") and (response_format is None or kind is not None):
        return None, None
    if kind == "json_object":
        return "json_object", None
    if kind != "json_schema":
        raise ChatError(
            f"response_format={response_format!r} is not understood; use text, json_object or json_schema and a schema"
        )
    schema = response_schema
    if schema is None and isinstance(response_format, Mapping):
        outer = response_format.get("json_schema", response_format)
        if isinstance(outer, Mapping):
            schema = outer.get("schema", outer.get("json_schema", outer if "json_schema" in response_format else None))
    if not isinstance(schema, Mapping | bool):
        raise ChatError("response_format json_schema needs an object under json_schema.schema")
    return "json_schema", schema


def check_image_prompts(image_prompts: Any) -> list[str] | None:
    """The prompts if each is text with no special token but the media ones, else ChatError."""
    if image_prompts is None:
        return None
    if isinstance(image_prompts, str) or not isinstance(image_prompts, list | tuple):
        raise ChatError("image_prompts must be a list of strings, one an image")
    media = (protocol.MEDIA_BEGIN, protocol.MEDIA_CONTENT, protocol.MEDIA_END, protocol.MEDIA_PAD)
    for index, prompt in enumerate(image_prompts):
        if not isinstance(prompt, str) or not prompt:
            raise ChatError(f"image_prompts[{index}] must be a non-empty string")
        rest = prompt
        for token in media:
            rest = rest.replace(token, "")
        if "<|" in rest or any(token in rest for token in protocol.SPECIAL_OFFSETS):
            raise ChatError(f"image_prompts[{index}] holds a special token that is no media token: {prompt[:80]!r}")
    return list(image_prompts)
