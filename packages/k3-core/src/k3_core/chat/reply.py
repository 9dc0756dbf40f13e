"""What the decoder gives: events while the model writes, and the reply that they add up to."""

from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal["reasoning", "content", "call", "arguments", "call_end", "finish"]
FinishReason = Literal["stop", "tool_calls", "length"]


@dataclass(frozen=True)
class Event:
    """One step of a reply.

    ``reasoning``, ``content``: ``text`` is appended. ``call``: call number ``index`` (0-based) opens, with ``id`` and
    ``name``. ``arguments``: ``text`` is appended to the arguments of call ``index``; at ``call_end`` they are a whole
    JSON object. ``finish``: the reply is over, ``text`` is the reason; it is the last event and comes once.
    """

    kind: EventKind
    text: str = ""
    index: int = -1
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A complete call. ``arguments`` is a JSON object as text."""

    id: str
    name: str
    arguments: str
    index: int


@dataclass(frozen=True)
class Reply:
    """A decoded reply. Texts are empty where there is none; ``tool_calls`` holds complete calls only.

    ``finish``: ``stop`` or ``tool_calls`` when the message was ended by the model, ``length`` when it broke off.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish: FinishReason = "length"
