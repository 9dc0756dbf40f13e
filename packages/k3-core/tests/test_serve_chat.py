"""Chats through the real ``vllm serve`` and the OpenAI client: streaming equals not streaming, both equal the decoder.

The tiny model is random, so it is made to speak: by a script (a logits processor that forces tokens), by grammars with
a logit bias towards closing tokens, or not at all, which gives a soup of special tokens that must not leak either.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import chat_cases as cases
import docs_blocks
import openai
from PIL import Image
from serve_support import Server, data_url
from typer.testing import CliRunner

from k3_core.chat import K3Tokenizer, encode, image_prompt, load_tokenizer, parse
from k3_core.cli.app import app
from k3_core.multimodal import image_geometry

pytestmark = [pytest.mark.serve, pytest.mark.slow]

OP, CL, SP = "<|open|>", "<|close|>", "<|sep|>"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "enum": ["sea", "sky"]}, "n": {"type": "integer"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ASK = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(long_memory_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--dtype", "float32", "--max-model-len", "2048", "--logits-processors", "scripted_logits:Scripted"]
    options += ["--reasoning-parser", "kimi_k3", "--tool-call-parser", "kimi_k3", "--enable-auto-tool-choice"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    log = tmp_path_factory.mktemp("serve-chat") / "log"
    server = Server(long_memory_tiny, log, *options, env={"PYTHONPATH": path})
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return server.client()


@pytest.fixture(scope="module")
def tokenizer(long_memory_tiny: Path) -> K3Tokenizer:
    return load_tokenizer(long_memory_tiny)


def seen(message: Any, finish: str, usage: Any) -> dict[str, Any]:
    """What a client has of a reply, in comparable form."""
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None)
    details = usage.completion_tokens_details
    counted = (usage.prompt_tokens, usage.completion_tokens, details.reasoning_tokens if details else None)
    return {
        "reasoning": reasoning or "",
        "content": message.content or "",
        "calls": calls,
        "finish": finish,
        "usage": counted,
    }


def whole(client: Any, **options: Any) -> dict[str, Any]:
    reply = client.chat.completions.create(model="k3", **options)
    return seen(reply.choices[0].message, reply.choices[0].finish_reason, reply.usage)


def streamed(client: Any, **options: Any) -> dict[str, Any]:
    """The same from a stream, added up as clients do."""
    stream = client.chat.completions.create(model="k3", stream=True, stream_options={"include_usage": True}, **options)
    texts = {"reasoning": "", "content": ""}
    calls: dict[int, list[str]] = {}
    finish = usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            texts["content"] += choice.delta.content or ""
            texts["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for part in choice.delta.tool_calls or []:
                entry = calls.setdefault(part.index, ["", "", ""])
                entry[0] += part.id or ""
                entry[1] += part.function.name or ""
                entry[2] += part.function.arguments or ""
    assert usage is not None
    details = usage.completion_tokens_details
    counted = (usage.prompt_tokens, usage.completion_tokens, details.reasoning_tokens if details else None)
    return {**texts, "calls": [tuple(entry) for entry in calls.values()], "finish": finish, "usage": counted}


def both(client: Any, **options: Any) -> dict[str, Any]:
    """The reply, streamed and not, after checking that they are the same."""
    one, other = whole(client, **options), streamed(client, **options)
    assert one == other
    return one


def scripted(tokens: list[int], **extra: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": len(tokens) + 8, "extra_body": {"vllm_xargs": {"script": tokens}, **extra}}


def test_scripted_replies_arrive_as_they_were_encoded(client: Any, tokenizer: K3Tokenizer) -> None:
    """Generated replies with reasoning, content and calls, thinking on and off, with markers spelt in their texts."""
    rng = random.Random(8)
    for _ in range(6):
        message = cases.assistant(rng)
        message["content"] += f" {CL}response{SP}"
        thinking = rng.random() < 0.7
        prompt = encode(ASK, tokenizer=tokenizer, thinking=thinking)
        full = encode([*ASK, message], tokenizer=tokenizer, thinking=thinking, add_generation_prompt=False)
        script = full.ids[len(prompt.ids) :]
        expected = parse(script, thinking, tokenizer=tokenizer)
        options = scripted(script, chat_template_kwargs={"thinking": thinking})
        reply = both(client, messages=ASK, tools=[TOOL], tool_choice="auto", **strictless(options))
        assert (reply["reasoning"], reply["content"]) == (expected.reasoning, expected.content)
        assert reply["calls"] == [(call.id, call.name, call.arguments) for call in expected.tool_calls]
        assert reply["finish"] == expected.finish
        assert reply["usage"][1] == len(script)


def strictless(options: dict[str, Any]) -> dict[str, Any]:
    """The script decides; no grammar may contradict it."""
    TOOL["function"].pop("strict", None)
    return options


def test_arguments_arrive_before_the_call_closes(client: Any, tokenizer: K3Tokenizer) -> None:
    text = f'{CL}think{SP}{OP}tools{SP}{OP}call tool="look" index="1"{SP}{OP}argument key="at" type="string"{SP}'
    script = [*tokenizer.encode(text, allow_special=True), *tokenizer.encode("a long text that goes on and on")]
    stream = client.chat.completions.create(
        model="k3", stream=True, messages=ASK, tools=[TOOL], **cut(scripted(script))
    )
    parts = [
        call.function.arguments
        for chunk in stream
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
        if call.function.arguments
    ]
    assert len(parts) > 5
    assert "".join(parts) == '{"at": "a long text that goes on and on'


def cut(options: dict[str, Any]) -> dict[str, Any]:
    """The script is all that may be said."""
    return {**options, "max_tokens": len(options["extra_body"]["vllm_xargs"]["script"])}


def test_truncation_says_length(client: Any, tokenizer: K3Tokenizer) -> None:
    """max_tokens anywhere in a reply with two calls: complete calls only, and an honest finish_reason."""
    call = f'{OP}call tool="look" index="1"{SP}{OP}argument key="at" type="string"{SP}sea{CL}argument{SP}{CL}call{SP}'
    text = f"r{CL}think{SP}{OP}response{SP}Hi{CL}response{SP}{OP}tools{SP}{call}{call}{CL}tools{SP}{CL}message{SP}"
    script = tokenizer.encode(text, allow_special=True)
    for end in range(1, len(script), 8):
        options = cut(scripted(script[:end]))
        reply = whole(client, messages=ASK, tools=[TOOL], **options)
        expected = parse(script[:end], tokenizer=tokenizer)
        assert reply["finish"] == "length"
        assert reply["calls"] == [(made.id, made.name, made.arguments) for made in expected.tool_calls]
        other = streamed(client, messages=ASK, tools=[TOOL], **options)
        assert other["finish"] == "length"
        assert (other["reasoning"], other["content"]) == (reply["reasoning"], reply["content"])
        assert other["calls"][: len(reply["calls"])] == reply["calls"]
        assert len(other["calls"]) <= len(reply["calls"]) + 1


def test_a_stop_string_says_stop(client: Any, tokenizer: K3Tokenizer) -> None:
    """Inside a call or behind a whole one: the model did not end its message with calls, streamed or not."""
    argument = f'{OP}argument key="at" type="string"{SP}a sea shore{CL}argument{SP}'
    call = f'{OP}call tool="look" index="1"{SP}{argument}{CL}call{SP}'
    text = f"{CL}think{SP}{OP}response{SP}Hi{CL}response{SP}{OP}tools{SP}{call}"
    script = tokenizer.encode(text, allow_special=True)
    more = tokenizer.encode(f"{OP}response{SP}and then", allow_special=True)
    options = strictless(scripted([*script, *more])) | {"messages": ASK, "tools": [TOOL]}
    inside = {**options, "stop": ["sea sh"]}
    assert whole(client, **inside)["finish"] == streamed(client, **inside)["finish"] == "stop"
    assert whole(client, **inside)["calls"] == []
    behind = {**options, "stop": ["then"]}
    reply = whole(client, **behind)
    assert reply["finish"] == streamed(client, **behind)["finish"] == "stop"
    assert [name for _, name, _ in reply["calls"]] == ["look"]


def test_a_random_soup_of_special_tokens_never_leaks(client: Any) -> None:
    for seed in range(6):
        options = {"messages": ASK, "temperature": 1.5, "seed": seed, "max_tokens": 60, "tools": [TOOL]}
        options["extra_body"] = {"ignore_eos": True, "chat_template_kwargs": {"thinking": seed % 2 == 0}}
        reply = whole(client, **options)
        other = streamed(client, **options)
        assert (reply["reasoning"], reply["content"], reply["usage"]) == (
            other["reasoning"],
            other["content"],
            other["usage"],
        )
        assert not any(marker in reply["reasoning"] + reply["content"] for marker in cases.MARKER_BYTES)


def test_images(client: Any, tokenizer: K3Tokenizer) -> None:
    """Two pictures bind to the two image parts; the placeholder typed in between stays text."""
    sizes = [(56, 28), (30, 90)]
    typed = "typed <|kimi_image_placeholder|> and <|media_pad|>"
    parts: list[dict[str, Any]] = [{"type": "text", "text": typed}]
    for size in sizes:
        url = data_url(Image.new("RGB", size, "navy"))
        parts[-1:] = [parts[-1], {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": typed}]
    messages = [{"role": "user", "content": parts}]
    prompts = [image_prompt(*size, image_geometry(*size).num_tokens) for size in sizes]
    expected = encode(messages, tokenizer=tokenizer, image_prompts=prompts, thinking_effort="max")
    text = f"two{CL}think{SP}{OP}response{SP}Boats{CL}response{SP}{CL}message{SP}"
    reply = both(
        client, messages=messages, **scripted([*tokenizer.encode(text, allow_special=True), tokenizer.end_of_msg_id])
    )
    assert (reply["reasoning"], reply["content"], reply["finish"]) == ("two", "Boats", "stop")
    assert reply["usage"][0] == len(expected.ids)


# --- structured output ----------------------------------------------------------------------------------------------
def biased(tokenizer: K3Tokenizer, **extra: Any) -> dict[str, Any]:
    """Greedy, with a pull towards what closes texts and values, so that a random model comes to an end."""
    bias = {str(tokenizer.close_id): 90, str(tokenizer.encode("}")[0]): 60, str(tokenizer.encode('"')[0]): 50}
    return {"temperature": 0, "max_tokens": 200, "logit_bias": bias, "extra_body": extra}


@pytest.mark.parametrize("kwargs", [{"chat_template_kwargs": {"thinking": False}}, {"include_reasoning": False}])
@pytest.mark.parametrize("form", [FORMAT, {"type": "json_object"}])
def test_json(client: Any, tokenizer: K3Tokenizer, kwargs: dict[str, Any], form: dict[str, Any]) -> None:
    reply = both(client, messages=ASK, response_format=form, **biased(tokenizer, **kwargs))
    answer = json.loads(reply["content"])
    assert isinstance(answer, dict)
    assert form is not FORMAT or set(answer) == {"ok"}
    assert reply["finish"] == "stop"


def test_json_behind_the_reasoning(client: Any, tokenizer: K3Tokenizer) -> None:
    """The constraint starts where the model closes its reasoning, not before."""
    script = [*tokenizer.encode('I "think" {'), tokenizer.close_id, *tokenizer.encode("think"), tokenizer.sep_id]
    options = biased(tokenizer, vllm_xargs={"script": script})
    reply = both(client, messages=ASK, response_format=FORMAT, **options)
    assert reply["reasoning"] == 'I "think" {'
    assert set(json.loads(reply["content"])) == {"ok"}
    assert reply["finish"] == "stop"
    assert reply["usage"][2] in (None, len(tokenizer.encode('I "think" {')))  # vLLM 0.27 does not report it


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "look"}}, "stop")],
)
@pytest.mark.parametrize("kwargs", [{"chat_template_kwargs": {"thinking": False}}, {"include_reasoning": False}])
def test_forced_calls(client: Any, tokenizer: K3Tokenizer, choice: Any, finish: str, kwargs: dict[str, Any]) -> None:
    tool = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    options = biased(tokenizer, parallel_tool_calls=False, **kwargs)
    reply = both(client, messages=ASK, tools=[tool], tool_choice=choice, **options)
    ((call_id, name, arguments),) = reply["calls"]
    assert (call_id, name) == ("functions.look:0", "look")
    assert json.loads(arguments)["at"] in ("sea", "sky")
    assert reply["finish"] == finish


def test_a_required_call_that_never_came_says_stop(client: Any, tokenizer: K3Tokenizer) -> None:
    """The model may end its message inside the reasoning, where no grammar holds it: then there is no call to make."""
    script = [*tokenizer.encode("Hm."), tokenizer.end_of_msg_id]
    reply = both(client, messages=ASK, tools=[TOOL], tool_choice="required", **scripted(script))
    assert reply["reasoning"] == "Hm."
    assert reply["calls"] == []
    assert reply["finish"] == "stop"


@pytest.mark.parametrize(
    "wish", [{"choice": ["yes", "no"]}, {"regex": "(yes|no)"}, {"grammar": 'root ::= "yes" | "no"'}], ids=str
)
def test_a_constraint_on_a_raw_completion_holds_from_the_first_token(client: Any, wish: dict[str, Any]) -> None:
    """A raw prompt opens no reasoning that the constraint would have to wait for."""
    reply = client.completions.create(
        model="k3", prompt="Boats float:", max_tokens=12, temperature=0, extra_body={"structured_outputs": wish}
    )
    assert reply.choices[0].text in ("yes", "no")


# --- what is refused ------------------------------------------------------------------------------------------------
REFUSED = [
    ({"messages": [{"role": "critic", "content": "x"}]}, "critic"),
    ({"messages": ASK, "reasoning_effort": "medium"}, "medium"),
    ({"messages": ASK, "extra_body": {"chat_template_kwargs": {"thinking": "yes"}}}, "thinking"),
    ({"messages": ASK, "extra_body": {"chat_template_kwargs": {"colour": "red"}}}, "colour"),
    ({"messages": ASK, "extra_body": {"chat_template_kwargs": {"tools": 5}}}, "tools must be a list"),
    ({"messages": ASK, "extra_body": {"structured_outputs": {"grammar": "no grammar"}}}, "neither EBNF .* nor Lark"),
    (
        {"messages": ASK, "response_format": {**FORMAT, "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
        "no finite",
    ),
    (
        {
            "messages": ASK,
            "tools": [
                {
                    **TOOL,
                    "function": {
                        **TOOL["function"],
                        "parameters": {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
                    },
                }
            ],
        },
        "strict tool look: no finite value",
    ),
    ({"messages": ASK, "extra_body": {"chat_template_kwargs": {"image_prompts": ["x"]}}}, "image_prompts"),
]


@pytest.mark.parametrize(("options", "word"), REFUSED)
def test_refused_with_a_reason(client: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        client.chat.completions.create(model="k3", max_tokens=4, **options)


def test_developer_and_efforts_reach_the_prompt(client: Any, tokenizer: K3Tokenizer) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *ASK]
    for effort, thinking in (("low", "low"), ("high", "high"), (None, "max")):
        options = {"reasoning_effort": effort} if effort else {}
        usage = client.chat.completions.create(model="k3", messages=messages, max_tokens=1, **options).usage
        assert usage.prompt_tokens == len(encode(messages, tokenizer=tokenizer, thinking_effort=thinking).ids)
    usage = client.chat.completions.create(model="k3", messages=messages, max_tokens=1, reasoning_effort="none").usage
    assert usage.prompt_tokens == len(encode(messages, tokenizer=tokenizer, thinking=False).ids)


def test_history_with_calls_is_encoded_as_it_was_sent(client: Any, tokenizer: K3Tokenizer) -> None:
    """Argument spelling, result order and null fields: the prompt is the encoder's."""
    calls = [
        {"id": "b", "type": "function", "function": {"name": "look", "arguments": '{"n": 1e2, "l": [1,2]}'}},
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]
    added = [{"type": "function", "function": {"name": "later"}}]
    messages = [
        *ASK,
        {"role": "system", "tools": added},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls},
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": [{"type": "text", "text": "sec"}, {"type": "text", "text": "ond"}],
        },
        {"role": "tool", "tool_call_id": "b", "content": "first"},
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    usage = client.chat.completions.create(model="k3", messages=messages, tools=[tool], max_tokens=1).usage
    assert usage.prompt_tokens == len(encode(messages, [tool], tokenizer=tokenizer, thinking_effort="max").ids)


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.loads(answer.read()))


def test_responses_api(client: Any, tokenizer: K3Tokenizer) -> None:
    script = tokenizer.encode(f"r{CL}think{SP}{OP}response{SP}Hi{CL}response{SP}{CL}message{SP}", allow_special=True)
    body = {"vllm_xargs": {"script": [*script, tokenizer.end_of_msg_id]}}
    reply = client.responses.create(model="k3", input="Hello", temperature=0, max_output_tokens=40, extra_body=body)
    assert reply.output_text == "Hi"
    assert [item.type for item in reply.output] == ["reasoning", "message"]


def test_anthropic_messages_api(server: Server) -> None:
    body = {"model": "k3", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
    reply = post(server, "/v1/messages", body)
    assert reply["stop_reason"] == "max_tokens"
    assert reply["usage"]["output_tokens"] == 5
    text = json.dumps(reply["content"])
    assert not any(marker in text for marker in cases.MARKER_BYTES)


# ------------------------------------------------------------------------------------------------------- documentation


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model never ends its message: replies to requests that state no limit have 24 tokens."""
    from openai.resources.chat.completions import Completions

    create = Completions.create
    monkeypatch.setattr(Completions, "create", lambda self, **options: create(self, **{"max_tokens": 24, **options}))


def at(server: Server, text: str) -> str:
    """The documentation's address, replaced by this server's."""
    assert "127.0.0.1:8000" in text
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")


def documented(*languages: str, mark: str = "serve") -> list[Any]:
    return [b for b in docs_blocks.blocks() if b.mark == mark and b.language in languages]


@pytest.mark.usefixtures("short")
def test_python_of_the_documentation_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the page, in one program."""
    names: dict[str, Any] = {}
    for block in documented("python"):
        text = block.text if "client" in names else at(server, block.text)
        exec(compile(text, block.page, "exec"), names)
    assert names["messages"][-2]["role"] in ("user", "assistant", "tool")
    assert capsys.readouterr().out


def test_shell_of_the_documentation_runs(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """curl as it stands but for a limit of tokens; `k3 bench serve` with fewer and shorter requests."""
    monkeypatch.chdir(tmp_path)
    for block in documented("sh"):
        text = at(server, block.text)
        if text.startswith("curl"):
            if shutil.which("curl") is None:
                continue
            text = text.replace('"model": "k3",', '"model": "k3", "max_tokens": 8,')
            done = subprocess.run(["bash", "-c", f"{text.strip()} --fail -s"], capture_output=True, text=True)
            assert 1 <= json.loads(done.stdout)["usage"]["completion_tokens"] <= 8, done.stderr
        else:
            (line,) = text.splitlines()
            words = [*shlex.split(line)[1:], *shlex.split("--prompts 3 --input-len 9 --output-len 4 --concurrency 2")]
            ran = CliRunner().invoke(app, words)
            assert ran.exit_code == 0, (ran.output, ran.exception)
            rows = json.loads((tmp_path / "result.json").read_text())["rows"]
            assert [(row["concurrency"], row["completed"]) for row in rows] == [(2, 3)]


def test_the_documented_parsers_are_the_servers(server: Server) -> None:
    (block,) = [b for b in docs_blocks.blocks() if b.page == "docs/chat.md" and "vllm serve" in b.text]
    words = block.text.replace("\\\n", " ").split()
    assert [word for word in words if word.startswith("--reasoning") or word.startswith("--tool")]
    assert set(words[3:]) <= set(server.command)


@pytest.mark.usefixtures("short")
def test_langchain_of_the_documentation_runs(server: Server) -> None:
    pytest.importorskip("langchain_openai")
    (block,) = documented("python", mark="serve: langchain-openai")
    names: dict[str, Any] = {}
    exec(compile(at(server, block.text), block.page, "exec"), names)
    model = names["model"]
    reply = model.invoke("Weather in Lisbon?", max_tokens=16)
    assert reply.usage_metadata["output_tokens"] == 16
    pieces = list(model.stream("Weather in Lisbon?", max_tokens=16))
    assert "".join(piece.text() if callable(piece.text) else piece.text for piece in pieces) == reply.content
