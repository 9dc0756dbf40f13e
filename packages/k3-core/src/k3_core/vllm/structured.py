"""Structured output for Kimi K3: xgrammar structural tags for the whole reply, so that constraint and format agree.

A JSON grammar alone does not fit K3: the reply starts with ``<|open|>response<|sep|>`` (thinking) and must end its
channel, and tool calls are XTML, not JSON. :func:`reply_tag` builds one tag for a whole reply::

    [think] OPEN(response) body CLOSE(response) [ OPEN(tools) call+ CLOSE(tools) ] CLOSE(message)

Markers are matched by token *id* and free text by "any characters", which no special token is, because
:func:`tokenizer_info` shows special tokens to the grammar as bytes that no text contains. So all that it admits is read
back by :class:`k3_core.chat.StreamParser` as the same content and calls.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3_core.chat import K3Tokenizer, protocol
from k3_core.chat.finite import check_finite
from k3_core.chat.options import function_name
from k3_core.errors import ChatError

Format = dict[str, Any]
_TYPES = ("string", "number", "boolean", "null", "object", "array")
_MAX_DEPTH = 16
_KEPT_GRAMMARS = 128


@dataclass(frozen=True)
class Wish:
    """What a request asks of the reply's form.

    ``body``: format of the content, None for free text. ``tools``: declarations. ``choice``: ``none`` (no tools),
    ``auto``, ``required`` or a function's name. ``parallel``: more than one call allowed. ``strict``: ``declared`` (the
    flag of each tool) or ``all``. ``opens_response``: whether the reply has to open ``response`` (thinking mode);
    ``covers_think``: whether the constraint starts inside ``think``.
    """

    body: Format | None = None
    tools: Sequence[Any] = field(default_factory=list)
    choice: str = "none"
    parallel: bool = True
    strict: str = "declared"
    opens_response: bool = True
    covers_think: bool = False


def reply_tag(wish: Wish, tokenizer: K3Tokenizer) -> str:
    """The structural tag of a reply, as JSON for ``StructuredOutputsParams(structural_tag=...)``.

    Raises ChatError where a forced tool does not exist.
    """
    builder = _Tags(tokenizer)
    parts: list[Format] = []
    if wish.covers_think:
        parts += [_any_text(), builder.close(protocol.TAG_THINK)]
    if wish.opens_response:
        parts.append(builder.open(protocol.TAG_RESPONSE))
    parts += [builder.after_open(wish), builder.close(protocol.TAG_MESSAGE)]
    return json.dumps({"type": "structural_tag", "format": _sequence(*parts)}, ensure_ascii=False)


def _sequence(*elements: Format) -> Format:
    """The elements one behind the other; inner sequences are opened, since vLLM bounds the nesting of a tag."""
    flat: list[Format] = []
    for element in elements:
        flat += element["elements"] if element.get("type") == "sequence" else [element]
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat}


def _either(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _any_text() -> Format:
    return _regex(r"[\s\S]*")


def _json(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


class _Tags:
    """Formats of K3's elements for one vocabulary."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._open = {"type": "token", "token": tokenizer.open_id}
        self._close = {"type": "token", "token": tokenizer.close_id}
        self._sep = {"type": "token", "token": tokenizer.sep_id}

    def open(self, tag: str) -> Format:
        return _sequence(self._open, _text(tag), self._sep)

    def close(self, tag: str) -> Format:
        return _sequence(self._close, _text(tag), self._sep)

    def after_open(self, wish: Wish) -> Format:
        """Everything between the open response and the end of the message."""
        closed = self.close(protocol.TAG_RESPONSE)
        body = wish.body if wish.body is not None else _any_text()
        if wish.choice == "none" or not wish.tools:
            return _sequence(body, closed)
        tools = self._tools_channel(wish)
        if wish.choice != "auto":
            return _sequence(_any_text(), closed, tools)
        if wish.body is None:
            return _sequence(body, closed, {"type": "optional", "content": tools})
        # A constrained answer, or calls without one: the constraint is about the final answer.
        return _either([_sequence(body, closed), _sequence(closed, tools)])

    def _tools_channel(self, wish: Wish) -> Format:
        tools = list(wish.tools)
        named = wish.choice not in ("auto", "required")
        if named:
            tools = [tool for tool in tools if function_name(tool) == wish.choice]
        calls = [self._call(tool, wish) for tool in tools if function_name(tool)]
        if not calls:
            raise ChatError(f"tool_choice={wish.choice!r} needs a function tool, and there is none such")
        call = _either(calls)
        repeated = call if named or not wish.parallel else {"type": "plus", "content": call}
        return _sequence(self.open(protocol.TAG_TOOLS), repeated, self.close(protocol.TAG_TOOLS))

    def _call(self, tool: Mapping[str, Any], wish: Wish) -> Format:
        function = tool.get("function", tool)
        strict = wish.strict == "all" or function.get("strict") is True
        head = f'{protocol.TAG_CALL} {protocol.ATTR_TOOL}="{_attribute(str(function["name"]))}" {protocol.ATTR_INDEX}="'
        index = _regex("[1-9][0-9]{0,2}") if wish.parallel and wish.choice in ("auto", "required") else _text("1")
        if strict:
            check_finite(function.get("parameters"), f"parameters of the strict tool {function['name']}")
        arguments = self._arguments(function.get("parameters")) if strict else [self._free_arguments()]
        return _sequence(
            self._open, _text(head), index, _text('"'), self._sep, *arguments, self.close(protocol.TAG_CALL)
        )

    def _arguments(self, parameters: Any) -> list[Format]:
        """The declared properties in their order, each once, the optional ones optional."""
        if parameters is None:
            return []
        schema = _resolve(parameters, parameters) if isinstance(parameters, Mapping) else parameters
        if not isinstance(schema, Mapping) or any(key in schema for key in ("anyOf", "oneOf", "allOf", "not", "if")):
            return [self._free_arguments()]
        required = schema.get("required") or []
        formats: list[Format] = []
        for key, value in (schema.get("properties") or {}).items():
            argument = self._argument(key, value, parameters)
            formats.append(argument if key in required else {"type": "optional", "content": argument})
        if schema.get("additionalProperties", False) is not False or schema.get("patternProperties"):
            formats.append(self._free_arguments())
        return formats

    def _argument(self, key: str, schema: Any, root: Mapping[str, Any]) -> Format:
        values = _typed_values(schema, root)
        return _either([self._element(_text(_attribute(key)), kind, value) for kind, value in values])

    def _element(self, key: Format, kind: str, value: Format) -> Format:
        return _sequence(
            self._open,
            _text(f'{protocol.TAG_ARGUMENT} {protocol.ATTR_KEY}="'),
            key,
            _text(f'" {protocol.ATTR_TYPE}="{kind}"'),
            self._sep,
            value,
            self.close(protocol.TAG_ARGUMENT),
        )

    def _free_arguments(self) -> Format:
        """Any number of arguments with any keys; the values fit their types."""
        key = _regex(r'([^"&]|&amp;|&quot;)+')
        return {"type": "star", "content": _either([self._element(key, k, v) for k, v in _typed_values({}, {})])}


def _attribute(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


# --- JSON schema to typed XTML values -------------------------------------------------------------------------------
def _typed_values(schema: Any, root: Mapping[str, Any]) -> list[tuple[str, Format]]:
    """The XTML types that a value of ``schema`` can have, each with the format of its text."""
    values: list[tuple[str, Format]] = []
    for leaf in _leaves(schema, root, _MAX_DEPTH):
        for kind in _kinds(leaf):
            value = (kind, _value(kind, leaf, root))
            if value not in values:
                values.append(value)
    return values or [(kind, _value(kind, {}, root)) for kind in _TYPES]


def _leaves(schema: Any, root: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
    """The alternatives of a schema, with references resolved and unions opened at the top."""
    if not isinstance(schema, Mapping) or depth == 0:
        return [{}]
    schema = _resolve(schema, root)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            rest = {name: value for name, value in schema.items() if name != key}
            return [{**rest, **leaf} for option in schema[key] for leaf in _leaves(option, root, depth - 1)]
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
        rest = {name: value for name, value in schema.items() if name != "allOf"}
        return [{**rest, **leaf} for leaf in _leaves(schema["allOf"][0], root, depth - 1)]
    return [schema]


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        target: Any = root
        for step in filter(None, reference[1:].split("/")):
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return {}
        schema = {**{key: value for key, value in schema.items() if key != "$ref"}, **target}
    return {}


def _kinds(leaf: Mapping[str, Any]) -> list[str]:
    """XTML types of a leaf, from ``enum``/``const``, else ``type``, else all."""
    if "const" in leaf or isinstance(leaf.get("enum"), list):
        members = [leaf["const"]] if "const" in leaf else leaf["enum"]
        return list(dict.fromkeys(_kind_of(member) for member in members))
    declared = leaf.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else list(_TYPES)
    kinds = ["number" if name == "integer" else name for name in names]
    return [kind for kind in dict.fromkeys(kinds) if kind in _TYPES]


def _kind_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (type(None), "null"), (int | float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "object" if isinstance(value, Mapping) else "array"


def _value(kind: str, leaf: Mapping[str, Any], root: Mapping[str, Any]) -> Format:
    if "const" in leaf or isinstance(leaf.get("enum"), list):
        members = [leaf["const"]] if "const" in leaf else leaf["enum"]
        fitting = [member for member in members if _kind_of(member) == kind]
        return _either([_text(m if kind == "string" else json.dumps(m, ensure_ascii=False)) for m in fitting])
    if kind == "string":
        return _string(leaf)
    declared = leaf.get("type")
    integer = kind == "number" and (declared == "integer" or (isinstance(declared, list) and "number" not in declared))
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return _json({**definitions, **leaf, "type": "integer" if integer else kind})


def _string(leaf: Mapping[str, Any]) -> Format:
    """Raw text, held to an anchored ``pattern`` or to its length where the schema bounds it."""
    pattern = leaf.get("pattern")
    if isinstance(pattern, str) and _is_anchored(pattern):
        return _regex(pattern[1:-1])
    least, most = leaf.get("minLength", 0), leaf.get("maxLength")
    if isinstance(most, int) and isinstance(least, int) and 0 <= least <= most <= 65_536:
        return _regex(rf"[\s\S]{{{least},{most}}}")
    if isinstance(least, int) and 0 < least <= 65_536:
        return _regex(rf"[\s\S]{{{least},}}")
    return _any_text()


def _is_anchored(pattern: str) -> bool:
    """Whether the pattern pins both ends of the whole string (an alternative at its top would not)."""
    if len(pattern) < 2 or pattern[0] != "^" or pattern[-1] != "$" or pattern.endswith("\\$"):
        return False
    depth = 0
    for char in pattern:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "|" and depth == 0:
            return False
    return True


# --- requests -------------------------------------------------------------------------------------------------------
def body_format(params: Any) -> Format | None:
    """Format of the content for vLLM's ``StructuredOutputsParams``; None where they ask for nothing.

    Raises ChatError (400) for a JSON schema that no finite value fits.
    """
    if params is None:
        return None
    if params.json_object:
        return _json({"type": "object"})
    if params.json is not None:
        schema = json.loads(params.json) if isinstance(params.json, str) else params.json
        check_finite(schema, "the JSON schema of the answer")
        return _json(schema)
    if params.regex is not None:
        return _regex(params.regex)
    if params.choice is not None:
        return _either([_text(choice) for choice in params.choice])
    if params.grammar is not None:
        return {"type": "grammar", "grammar": _ebnf(params.grammar)}
    if params.structural_tag is None:
        return None
    tag = json.loads(params.structural_tag)
    if "structures" not in tag:
        return dict(tag["format"])
    tags = [
        {"type": "tag", "begin": one["begin"], "content": _json(one["schema"]), "end": one["end"]}
        for one in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _ebnf(grammar: str) -> str:
    """A user's grammar, which vLLM takes in Lark's form or as EBNF, as EBNF.

    Raises ChatError (400) for a grammar in Lark's form that cannot be read; xgrammar's own error would be a 500.
    """
    from vllm.v1.structured_output import utils

    if not utils.grammar_is_likely_lark(grammar):
        return grammar
    import xgrammar

    convert = getattr(utils, "convert_lark_to_ebnf", None)  # releases up to 0.27
    try:
        if convert is None:
            return str(xgrammar.Grammar.from_lark(grammar))
        return str(xgrammar.Grammar.from_ebnf(convert(grammar)))  # it converts what it cannot read, too
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ChatError(f"structured_outputs.grammar is neither EBNF (root ::= ...) nor Lark: {reason}") from error


# --- vocabulary -----------------------------------------------------------------------------------------------------
def tokenizer_info(tokenizer: Any, vocab_size: int | None = None, stop_token_ids: Any = None) -> Any:
    """xgrammar's view of the vocabulary: raw bytes; special tokens as bytes outside UTF-8, which no text matches."""
    import xgrammar

    k3: K3Tokenizer = tokenizer.k3
    size = vocab_size or k3.vocab_size
    vocabulary: list[bytes] = [k3.token_bytes(token) for token in range(min(k3.num_ranks, size))]
    vocabulary += [b"\xff" + k3.token_bytes(token) for token in range(k3.num_ranks, min(k3.vocab_size, size))]
    vocabulary += [b""] * (size - len(vocabulary))
    stops = [stop_token_ids] if isinstance(stop_token_ids, int) else stop_token_ids
    return xgrammar.TokenizerInfo(
        vocabulary,
        xgrammar.VocabType.RAW,
        vocab_size=size,
        stop_token_ids=list(stops) if stops else [k3.end_of_msg_id, k3.eos_id],
    )


def install() -> Any:
    """Teach xgrammar our vocabulary, for our tokenizer only. Returns the undo; a second call does nothing.

    Two things are wrapped. ``TokenizerInfo.from_huggingface`` gives :func:`tokenizer_info`. ``GrammarCompiler`` gets no
    cache of its own for that vocabulary: xgrammar 0.2.8 shares rules between grammars by a hash that leaves out
    token ids, so that the mask offers another grammar's marker, which is rejected when sampled (0.2.9 did not show it).
    Whole grammars are cached here instead.
    """
    import xgrammar

    info_class, compiler_class = xgrammar.TokenizerInfo, xgrammar.GrammarCompiler
    if getattr(info_class, "knows_kimi_k3", False):
        return lambda: None
    before, init = info_class.__dict__["from_huggingface"], compiler_class.__init__
    original = info_class.from_huggingface

    def from_huggingface(tokenizer: Any, *, vocab_size: int | None = None, stop_token_ids: Any = None) -> Any:
        if isinstance(getattr(tokenizer, "k3", None), K3Tokenizer):
            info = tokenizer_info(tokenizer, vocab_size, stop_token_ids)
            info.is_kimi_k3 = True
            return info
        return original(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids)

    def compiler_init(self: Any, info: Any, *args: Any, **kwargs: Any) -> None:
        ours = getattr(info, "is_kimi_k3", False)
        init(self, info, *args, **{**kwargs, "cache_enabled": False} if ours else kwargs)
        if ours:
            self.compile_structural_tag = _cached(self.compile_structural_tag)

    info_class.from_huggingface = staticmethod(from_huggingface)
    info_class.knows_kimi_k3 = True
    compiler_class.__init__ = compiler_init

    def undo() -> None:
        info_class.from_huggingface = before
        del info_class.knows_kimi_k3
        compiler_class.__init__ = init

    return undo


def _cached(compile_tag: Any) -> Any:
    """``compile_tag`` with the last grammars kept, for the one form that serving uses: a tag as JSON text."""
    remembered = functools.lru_cache(maxsize=_KEPT_GRAMMARS)(compile_tag)
    return lambda *tag: remembered(*tag) if all(isinstance(part, str) for part in tag) else compile_tag(*tag)
