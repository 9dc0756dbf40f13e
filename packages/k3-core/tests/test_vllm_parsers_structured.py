# ruff: noqa: E402 - nothing of vLLM is imported where it or xgrammar is missing
"""Structural tags: whatever the grammar admits is read back; what requests ask for is what the tag holds."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
xgrammar = pytest.importorskip("xgrammar")

import chat_cases as cases
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from k3_core.chat import Reply, encode, parse
from k3_core.errors import ChatError
from k3_core.vllm import compat, structured
from k3_core.vllm.structured import Wish, reply_tag
from k3_core.vllm.tokenizer import KimiK3Tokenizer

TOKENIZER = KimiK3Tokenizer.from_pretrained(cases.DATA)
K3 = TOKENIZER.k3
STRICT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": 'get "w" & more',
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", 'Rio & "x"', ""]},
                "days": {"type": "integer"},
                "unit": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
                "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
                "where": {"$ref": "#/$defs/Place"},
                "flags": {"type": ["array", "boolean"], "items": {"type": "number"}},
                "mode": {"enum": [1, "one", None, {"k": "v"}]},
            },
            "required": ["city", "where", "code"],
            "additionalProperties": False,
            "$defs": {
                "Place": {
                    "type": "object",
                    "properties": {"x": {"type": "string"}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            },
        },
    },
}
LOOSE: dict[str, Any] = {"type": "function", "function": {"name": "loose", "parameters": {"type": "object"}}}
ANSWER = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["a", "n"]}


@pytest.fixture(scope="module")
def compiler() -> Any:
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=768))


def walk(compiler: Any, tag: str, seed: int, most: int = 600) -> list[int] | None:
    """A random reply that the grammar admits, as a sampler would make it: only masked-in tokens, each accepted.

    None if it did not come to an end within ``most`` tokens.
    """
    rng = random.Random(seed)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
    mask = xgrammar.allocate_token_bitmask(1, 768)
    reply: list[int] = []
    patience = rng.choice([10, 80, 200])
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [token for token in range(768) if (words[token // 32] >> (token % 32)) & 1]
        special = [token for token in allowed if token in K3.special_ids]
        closing = [token for token in allowed if K3.token_bytes(token) in (b'"', b"}", b"]")]
        if special and (rng.random() < 0.3 or len(reply) > patience):
            token = rng.choice(special)
        elif closing and len(reply) > patience:
            token = rng.choice(closing)
        else:
            token = rng.choice(allowed)
        assert matcher.accept_token(token), (K3.decode(reply), K3.decode([token]))
        reply.append(token)
        if len(reply) > most:
            return None
    return reply


def again(reply: Reply, thinking: bool) -> list[tuple[str, Any]]:
    """The calls of ``reply`` after encoding it as history and decoding that."""
    message = {
        "role": "assistant",
        "content": reply.content,
        "reasoning_content": reply.reasoning,
        "tool_calls": [{"function": {"name": call.name, "arguments": call.arguments}} for call in reply.tool_calls],
    }
    prompt = encode([], tokenizer=K3, thinking=thinking)
    whole = encode([message], tokenizer=K3, thinking=thinking, add_generation_prompt=False)
    read = parse(whole.ids[len(prompt.ids) :], thinking, tokenizer=K3)
    assert read.content == reply.content
    return [(call.name, json.loads(call.arguments)) for call in read.tool_calls]


def check_strict(arguments: dict[str, Any]) -> None:
    assert {"city", "where", "code"} <= set(arguments) <= set(STRICT["function"]["parameters"]["properties"])
    assert arguments["city"] in ("Oslo", 'Rio & "x"', "")
    assert set(arguments["where"]) == {"x"}
    assert isinstance(arguments["where"]["x"], str)
    assert set(arguments["code"]) <= set("abc")
    assert len(arguments["code"]) in (2, 3)
    unit = arguments.get("unit")
    assert unit is None or len(unit) <= 4
    assert isinstance(arguments.get("days", 0), int)
    assert isinstance(arguments.get("flags", True), bool | list)
    assert arguments.get("mode") in [1, "one", None, {"k": "v"}]


TOOLS = [STRICT, LOOSE]
WISHES: dict[str, tuple[Wish, str]] = {
    "required": (Wish(tools=TOOLS, choice="required"), "+"),
    "required, one call": (Wish(tools=TOOLS, choice="required", parallel=False), "1"),
    "named": (Wish(tools=TOOLS, choice="loose"), "1"),
    "named, thinking off": (Wish(tools=TOOLS, choice='get "w" & more', opens_response=False), "1"),
    "auto": (Wish(tools=TOOLS, choice="auto"), "*"),
    "auto, thinking off": (Wish(tools=TOOLS, choice="auto", opens_response=False), "*"),
    "from inside think": (Wish(tools=TOOLS, choice="required", covers_think=True), "+"),
    "json": (Wish(body=structured._json(ANSWER)), "0"),
    "json, thinking off": (Wish(body=structured._json(ANSWER), opens_response=False), "0"),
    "json from inside think": (Wish(body=structured._json(ANSWER), covers_think=True), "0"),
    "json or calls": (Wish(body=structured._json(ANSWER), tools=TOOLS, choice="auto"), "*"),
    "tools that may not be called": (Wish(body=structured._json(ANSWER), tools=TOOLS, choice="none"), "0"),
    "all strict": (Wish(tools=[STRICT], choice="auto", strict="all"), "*"),
}


@pytest.mark.parametrize("name", WISHES)
def test_what_the_grammar_admits_is_read_back(compiler: Any, name: str) -> None:
    wish, count = WISHES[name]
    tag = reply_tag(wish, K3)
    validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tag)))
    walks = [tokens for seed in range(10) if (tokens := walk(compiler, tag, seed)) is not None]
    assert len(walks) >= 5
    for tokens in walks:
        check_walk(wish, count, tokens)


def check_walk(wish: Wish, count: str, tokens: list[int]) -> None:
    # A constraint that starts behind the reasoning is preceded by it in the real stream.
    thought = (
        []
        if wish.covers_think or not wish.opens_response
        else [*K3.encode("hm"), K3.close_id, *K3.encode("think"), K3.sep_id]
    )
    reply = parse([*thought, *tokens], wish.opens_response, tokenizer=K3)
    assert reply.finish == ("tool_calls" if reply.tool_calls else "stop")
    assert {"0": not reply.tool_calls, "1": len(reply.tool_calls) == 1, "+": reply.tool_calls, "*": True}[count]
    made = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
    for called, arguments in made:
        if called == STRICT["function"]["name"]:
            check_strict(arguments)
        else:
            assert called == "loose"
    if wish.body is not None and not made:
        answer = json.loads(reply.content)
        assert isinstance(answer["a"], str)
        assert isinstance(answer["n"], int)
    # Loose arguments may repeat a key; a JSON object cannot carry that through a history.
    assert again(reply, wish.opens_response) == made


def test_no_text_region_admits_a_special_token(compiler: Any) -> None:
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(reply_tag(WISHES["json, thinking off"][0], K3)))
    assert matcher.accept_string('{"a": "x')
    mask = xgrammar.allocate_token_bitmask(1, 768)
    matcher.fill_next_token_bitmask(mask)
    words = mask[0].tolist()
    assert not [token for token in K3.special_ids if (words[token // 32] >> (token % 32)) & 1]


def test_tags_leave_room_for_deep_schemas() -> None:
    """vLLM allows a tag 80 levels, a schema alone 64; so schemas of 62 levels fit in every tag (OpenAI allows 10)."""

    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    for wish, _ in WISHES.values():
        schemas = [ANSWER, *(tool["function"]["parameters"] for tool in wish.tools)]
        assert depth(json.loads(reply_tag(wish, K3))) <= max(map(depth, schemas)) + 18


def test_a_forced_function_must_exist() -> None:
    with pytest.raises(ChatError, match="needs a function tool"):
        reply_tag(Wish(tools=TOOLS, choice="missing"), K3)


def test_other_tokenizers_are_left_alone() -> None:
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    with pytest.raises(ValueError, match="Unsupported tokenizer"):
        xgrammar.TokenizerInfo.from_huggingface(Other())


# --- requests -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def composed() -> Iterator[Any]:
    undo = compat.register_parsers()
    yield ParserManager.get_parser("kimi_k3", "kimi_k3", enable_auto_tools=True, model_name="k3")
    undo()


def adjusted(composed: Any, kwargs: dict[str, Any] | None = None, **fields: Any) -> Any:
    asked = ChatCompletionRequest(**{"model": "k3", "messages": [{"role": "user", "content": "x"}], **fields})
    return composed(TOKENIZER, asked.tools, chat_template_kwargs=kwargs or {}).adjust_request(asked)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": ANSWER}}


@pytest.mark.parametrize(
    ("kwargs", "fields", "wish"),
    [
        ({}, {"response_format": SCHEMA}, Wish(body=structured._json(ANSWER))),
        ({"thinking": False}, {"response_format": SCHEMA}, Wish(body=structured._json(ANSWER), opens_response=False)),
        ({}, {"response_format": {"type": "json_object"}}, Wish(body=structured._json({"type": "object"}))),
        (
            {},
            {"response_format": SCHEMA, "include_reasoning": False},
            Wish(body=structured._json(ANSWER), covers_think=True),
        ),
        (
            {},
            {"structured_outputs": {"choice": ["a", "b"]}},
            Wish(body=structured.body_format(StructuredOutputsParams(choice=["a", "b"]))),
        ),
        ({}, {"structured_outputs": {"regex": "[ab]+"}}, Wish(body={"type": "regex", "pattern": "[ab]+"})),
        ({}, {"tools": TOOLS, "tool_choice": "required"}, Wish(tools=TOOLS, choice="required")),
        (
            {},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "loose"}}},
            Wish(tools=TOOLS, choice="loose"),
        ),
        ({}, {"tools": TOOLS}, Wish(tools=TOOLS, choice="auto")),
        ({}, {"tools": [LOOSE], "parallel_tool_calls": False}, Wish(tools=[LOOSE], choice="auto", parallel=False)),
        (
            {},
            {"tools": [LOOSE], "response_format": SCHEMA},
            Wish(body=structured._json(ANSWER), tools=[LOOSE], choice="auto"),
        ),
        ({}, {"tools": [LOOSE], "tool_choice": "none", "response_format": SCHEMA}, Wish(body=structured._json(ANSWER))),
    ],
)
def test_requests_become_tags(composed: Any, kwargs: dict[str, Any], fields: dict[str, Any], wish: Wish) -> None:
    asked = adjusted(composed, kwargs, **fields)
    assert json.loads(asked.structured_outputs.structural_tag) == json.loads(reply_tag(wish, K3))
    assert asked.response_format is None
    assert asked.skip_special_tokens is False
    assert asked.spaces_between_special_tokens is False


@pytest.mark.parametrize("fields", [{}, {"tools": [LOOSE]}, {"tools": TOOLS, "tool_choice": "none"}])
def test_requests_without_a_constraint_stay_free(composed: Any, fields: dict[str, Any]) -> None:
    asked = adjusted(composed, **fields)
    assert asked.structured_outputs is None
    assert asked.skip_special_tokens is False


@pytest.mark.parametrize("grammar", ['root ::= "a" | "b"', 'start: "a" | "b"'])
def test_users_grammars(composed: Any, compiler: Any, grammar: str) -> None:
    asked = adjusted(composed, {"thinking": False}, structured_outputs={"grammar": grammar})
    tokens = walk(compiler, asked.structured_outputs.structural_tag, 1)
    assert tokens is not None
    assert parse(tokens, False, tokenizer=K3).content in ("a", "b")


def test_users_structural_tags(composed: Any, compiler: Any) -> None:
    """Old and new form: the body of the reply, inside K3's own markers."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    new = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    tag = adjusted(composed, {"thinking": False}, response_format=new).structured_outputs.structural_tag
    tokens = next(tokens for seed in range(20) if (tokens := walk(compiler, tag, seed)) is not None)
    assert isinstance(json.loads(parse(tokens, False, tokenizer=K3).content)["n"], int)
    old = {
        "type": "structural_tag",
        "triggers": ["<n"],
        "structures": [{"begin": "<n>", "schema": schema, "end": "</n>"}],
    }
    tag = adjusted(composed, {"thinking": False}, response_format=old).structured_outputs.structural_tag
    assert json.loads(tag)["format"]["elements"][0]["type"] == "triggered_tags"
    assert compiler.compile_structural_tag(tag) is not None


def test_without_a_reasoning_parser_the_tag_covers_the_reasoning(composed: Any) -> None:
    alone = ParserManager.get_parser("kimi_k3", None, enable_auto_tools=True, model_name="k3")
    asked = adjusted(alone, response_format=SCHEMA)
    assert json.loads(asked.structured_outputs.structural_tag) == json.loads(
        reply_tag(Wish(body=structured._json(ANSWER), covers_think=True), K3)
    )


def test_a_schema_without_an_end_is_refused_before_the_engine_has_it() -> None:
    """Its grammar offers no token, and the request would end with an error of the server."""
    loop = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
    with pytest.raises(ChatError, match="no finite value fits the schema at #/properties/a"):
        structured.body_format(StructuredOutputsParams(json=loop))
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": loop}}
    with pytest.raises(ChatError, match="strict tool f: no finite value"):
        reply_tag(Wish(tools=[tool], choice="auto"), TOKENIZER.k3)
    reply_tag(Wish(tools=[{**tool, "function": {**tool["function"], "strict": False}}], choice="auto"), TOKENIZER.k3)


@pytest.mark.parametrize("text", ["no grammar", "start: ("])
def test_a_grammar_that_cannot_be_read_is_the_clients_error(text: str) -> None:
    with pytest.raises(ChatError, match="neither EBNF"):
        structured.body_format(StructuredOutputsParams(grammar=text))
