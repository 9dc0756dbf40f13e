"""Our parsers against vLLM's in-tree Kimi K3 parsers, in one process: time per token, and the field's reported faults.

    python bench_chat.py [--tokens 1000,10000,100000] [--repeat 5] [--out FOLDER]

Time: a stream of N tokens is given in one step, then single tokens follow and are timed, as the serving layer feeds
them (``Parser.parse_delta`` with text and ids). Three streams: reasoning, content, one string argument of a tool call.
The median of --repeat runs of 50 tokens is reported.

Faults: each row is an input from a public report (docs/chat.md names the threads) and the property it broke. Prints a
table and writes chat.json and chat.md to FOLDER (default: results beside this script; "-" writes nothing). Needs a vLLM
that has the in-tree parsers (0.27 or later); nothing else of it is measured.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import __version__ as vllm_version
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.renderers.chat_utils import _postprocess_messages

from k3_core.chat import encode, remember_fields, restore_fields
from k3_core.vllm import compat, structured
from k3_core.vllm.tokenizer import KimiK3Tokenizer

TESTS = Path(__file__).parents[1] / "tests"
TOKENIZER = KimiK3Tokenizer(TESTS / "data" / "chat")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OP, CL, SP = "<|open|>", "<|close|>", "<|sep|>"
THINK, RESPONSE = f"{CL}think{SP}", f"{OP}response{SP}"
CALL = f'{OP}tools{SP}{OP}call tool="f" index="1"{SP}'
ARGUMENT = f'{OP}argument key="a" type="string"{SP}'
END = f"{CL}argument{SP}{CL}call{SP}{CL}tools{SP}{CL}message{SP}"


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="k3", messages=[{"role": "user", "content": "x"}], **{"tools": [TOOL], **fields})


@dataclass
class Reply:
    reasoning: str = ""
    content: str = ""
    arguments: str = ""
    calls: int = 0
    deltas: int = 0


def stream(parser_class: Any, text: str, asked: ChatCompletionRequest, ids: bool = True) -> Reply:
    """A reply fed token by token, added up as a client does. ``text`` may spell special tokens."""
    parser = parser_class(TOKENIZER, asked.tools, chat_template_kwargs={}, model_config=None)
    tokens = TOKENIZER.encode(text)
    reply = Reply()
    seen = set()
    for number, token in enumerate(tokens):
        delta = parser.parse_delta(
            TOKENIZER.decode([token]), [token] if ids else [], asked, [1, 2], finished=number == len(tokens) - 1
        )
        if delta is None:
            continue
        reply.reasoning += delta.reasoning or ""
        reply.content += delta.content or ""
        for call in delta.tool_calls:
            seen.add(call.index)
            reply.arguments += call.function.arguments or "" if call.function else ""
            reply.deltas += bool(call.function and call.function.arguments)
    reply.calls = len(seen)
    return reply


def whole(parser_class: Any, text: str, asked: ChatCompletionRequest) -> Reply:
    parser = parser_class(TOKENIZER, asked.tools, chat_template_kwargs={}, model_config=None)
    ids = TOKENIZER.encode(text)
    reasoning, content, calls = parser.parse(text, asked, enable_auto_tools=True, model_output_token_ids=ids)
    return Reply(reasoning or "", content or "", "".join(c.arguments for c in calls or []), len(calls or []))


# --- time -----------------------------------------------------------------------------------------------------------
STREAMS = {
    "reasoning": "",
    "content": THINK + RESPONSE,
    "argument": THINK + RESPONSE + f"{CL}response{SP}" + CALL + ARGUMENT,
}
PROBE = 50


def time_per_token(parser_class: Any, kind: str, length: int, repeat: int) -> float:
    """Microseconds of one more token behind ``length`` tokens of ``kind``: median over ``repeat`` runs of PROBE."""
    asked = request()
    head = TOKENIZER.encode(STREAMS[kind])
    word = TOKENIZER.encode("ab ")[:1]
    body = word * length
    parser = parser_class(TOKENIZER, asked.tools, chat_template_kwargs={}, model_config=None)
    if head:
        parser.parse_delta(TOKENIZER.decode(head), head, asked, [1, 2], finished=False)
    parser.parse_delta(TOKENIZER.decode(body), body, asked, [1, 2], finished=False)
    text = TOKENIZER.decode(word)
    runs = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(PROBE):
            parser.parse_delta(text, word, asked, [1, 2], finished=False)
        runs.append((time.perf_counter() - start) / PROBE)
    return statistics.median(runs) * 1e6


# --- faults ---------------------------------------------------------------------------------------------------------
def leaks(*texts: str) -> bool:
    return any(marker in text for text in texts for marker in (OP, CL, SP, "think<", "response<", "|>"))


def spaced_markers(parser: Any, ours: bool) -> bool:
    text = f"r{CL} think {SP}{OP} response {SP}Hello{CL} response {SP}{CL} message {SP}"
    replies = [read(parser, text, request(tools=tools)) for read in (stream, whole) for tools in ([TOOL], None)]
    return any((reply.reasoning, reply.content) != ("r", "Hello") for reply in replies)


def one_burst(parser: Any, ours: bool) -> bool:
    text = THINK + RESPONSE + f"{CL}response{SP}" + CALL + ARGUMENT + "a long text that takes minutes" + END
    return stream(parser, text, request()).deltas < 3


def skipped_think_close(parser: Any, ours: bool) -> bool:
    text = "r" + CALL + ARGUMENT + "x" + END
    return any(read(parser, text, request()).calls != 1 for read in (stream, whole))


def skipped_response_open(parser: Any, ours: bool) -> bool:
    text = f"r{THINK}Hello{CL}response{SP}{CL}message{SP}"
    return any(read(parser, text, request()).content != "Hello" for read in (stream, whole))


def skipped_call_close(parser: Any, ours: bool) -> bool:
    text = f"r{THINK}{RESPONSE}{CL}response{SP}{CALL}{ARGUMENT}x{CL}argument{SP}{CL}tools{SP}{CL}message{SP}"
    return any(read(parser, text, request()).calls != 1 for read in (stream, whole))


def cut_marker(parser: Any, ours: bool) -> bool:
    texts = [f"r{THINK}{RESPONSE}Hello{CL}respon", f"r{CL}thi", f"r{THINK}{RESPONSE}Hello{CL}response"]
    return any(
        leaks(r.reasoning, r.content) or r.reasoning + r.content not in ("r", "rHello")
        for text in texts
        for read in (stream, whole)
        for r in [read(parser, text, request(tools=None))]
    )


def spelt_marker(parser: Any, ours: bool) -> bool:
    """Text in ordinary tokens that spells a marker is text."""
    said = f"Close with {CL}response{SP} here"
    ids = [*TOKENIZER.encode(f"r{THINK}{RESPONSE}"), *TOKENIZER.encode(said, allow_special_tokens=False)]
    ids += TOKENIZER.encode(f"{CL}response{SP}{CL}message{SP}")
    made = parser(TOKENIZER, None, chat_template_kwargs={}, model_config=None)
    return made.parse(TOKENIZER.decode(ids), request(tools=None), model_output_token_ids=ids)[1] != said


def stream_differs(parser: Any, ours: bool) -> bool:
    """Ordinary, odd and cut replies (not cut inside a call: its beginning is streamed, and is no call of the whole)."""
    good = f"r{THINK}{RESPONSE}Hi{CL}response{SP}{CALL}{ARGUMENT}x{END}"
    texts = [good, good.replace(THINK, ""), good.replace(RESPONSE, ""), good + "more"]
    texts += [
        f"r{THINK}{RESPONSE}A{CL}response{SP}B{CL}message{SP}",
        f"r{THINK}{OP} response {SP}Hi",
        f"r{THINK}{RESPONSE}Hi",
    ]
    pairs = [(stream(parser, text, request()), whole(parser, text, request())) for text in texts]
    return any((a.reasoning, a.content, a.arguments) != (b.reasoning, b.content, b.arguments) for a, b in pairs)


def bare_json_format(parser: Any, ours: bool) -> bool:
    """A JSON response_format has to leave room for the response marker, or the model is forced out of its format."""
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    asked = request(tools=None, response_format=schema)
    made = parser(TOKENIZER, None, chat_template_kwargs={}, model_config=None).adjust_request(asked)
    wanted = made.extract_structured_outputs()
    return wanted is not None and wanted.structural_tag is None


def special_tokens_in_json(parser: Any, ours: bool) -> bool:
    """The grammar's mask inside a JSON string must not offer a special token: it would end the channel."""
    import xgrammar

    if ours:
        info = structured.tokenizer_info(TOKENIZER)
    else:  # names as vocabulary strings, as xgrammar takes them from a Hugging Face tokenizer
        info = xgrammar.TokenizerInfo([TOKENIZER.k3.token_bytes(i) for i in range(768)], vocab_size=768)
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_json_schema('{"type": "string"}'))
    matcher.accept_string('"a')
    mask = xgrammar.allocate_token_bitmask(1, 768)
    matcher.fill_next_token_bitmask(mask)
    close = TOKENIZER.k3.close_id
    return bool((int(mask[0][close // 32]) >> (close % 32)) & 1)


def respelt_arguments(parser: Any, ours: bool) -> bool:
    """Argument strings of past calls, on their way through vLLM's own message parsing into the prompt."""
    sent = '{"n": 1e2, "l": [1,2]}'
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": sent}}
    messages: list[Any] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    remembered = remember_fields(messages)
    _postprocess_messages(messages)
    rows = restore_fields(messages, remembered) if ours else messages
    text = encode(rows, tokenizer=TOKENIZER.k3).text
    return f"{SP}1e2{CL}" not in text or f"{SP}[1,2]{CL}" not in text


def dropped_role(parser: Any, ours: bool) -> bool:
    """The encoder that vLLM calls is the checkpoint's; its golden output lacks a developer message."""
    golden = json.loads((TESTS / "data" / "chat" / "chat.json").read_text())["14_developer_role"]
    content = golden["input"]["messages"][0]["content"]
    text = encode(**golden["input"], tokenizer=TOKENIZER.k3).text if ours else golden["encoder"]["text"]
    return content not in text


FAULTS: list[tuple[str, str, Callable[[Any, bool], bool]]] = [
    ("vllm#50367", "markers with blanks inside leak, or their text is lost or repeated", spaced_markers),
    ("vllm#50604", "arguments arrive in one burst when the call closes", one_burst),
    ("vllm#50543", "a developer message is dropped", dropped_role),
    ("vllm#50543", "argument strings are re-serialised on their way into the prompt", respelt_arguments),
    ("vllm#53246", "a call is lost when the model skips the close of think", skipped_think_close),
    ("asc#13204", "a JSON response_format shuts out the response marker", bare_json_format),
    ("xgrammar#806", "the grammar admits special tokens inside JSON text", special_tokens_in_json),
    ("-", "text is lost when the model skips the open of response", skipped_response_open),
    ("-", "a call is lost when the model skips its close", skipped_call_close),
    ("-", "a marker cut by max_tokens reaches the reader", cut_marker),
    ("-", "text that spells a marker in ordinary tokens is taken for structure", spelt_marker),
    ("-", "streaming and not streaming differ", stream_differs),
]


def judge(parser: Any, ours: bool, check: Callable[[Any, bool], bool]) -> str:
    try:
        return "has it" if check(parser, ours) else "no"
    except Exception as error:
        return f"fails: {type(error).__name__}"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tokens", default="1000,10000,100000")
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--out", default=str(Path(__file__).parent / "results"))
    given = options.parse_args()
    lengths = [int(part) for part in given.tokens.split(",")]
    rival = ParserManager.get_parser("kimi_k3", "kimi_k3", enable_auto_tools=True, model_name="k3")
    if "k3_core" in rival.__module__ or not rival.tool_parser_cls.__module__.startswith("vllm."):
        raise SystemExit("the in-tree parsers are already replaced in this process; run without the k3-core plugin")
    undo = compat.register_parsers()
    ours = ParserManager.get_parser("kimi_k3", "kimi_k3", enable_auto_tools=True, model_name="k3")
    undo()
    sides = {"k3-core": ours, "vLLM in-tree": rival}
    rows = [
        {
            "stream": kind,
            "tokens": length,
            **{s: round(time_per_token(p, kind, length, given.repeat), 1) for s, p in sides.items()},
        }
        for kind in STREAMS
        for length in lengths
    ]
    faults = [
        {"thread": thread, "fault": fault, **{side: judge(p, side == "k3-core", check) for side, p in sides.items()}}
        for thread, fault, check in FAULTS
    ]
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, vLLM {vllm_version}",
        "unit": "microseconds per token",
        "time": rows,
        "faults": faults,
    }
    page = render(report)
    print(page)
    if given.out != "-":
        folder = Path(given.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chat.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / "chat.md").write_text(page)
    return int(any(row["k3-core"] != "no" for row in faults))


def render(report: dict[str, Any]) -> str:
    lines = ["# Chat parsers", "", f"{report['date']}, {report['machine']}. Command: `python bench_chat.py`.", ""]
    lines += [
        "Time of one more streamed token, microseconds:",
        "",
        "| stream | tokens so far | k3-core | vLLM in-tree |",
    ]
    lines += ["|--|--:|--:|--:|"]
    lines += [f"| {r['stream']} | {r['tokens']:,} | {r['k3-core']} | {r['vLLM in-tree']} |" for r in report["time"]]
    lines += [
        "",
        "Faults (threads are named in docs/chat.md):",
        "",
        "| thread | fault | k3-core | vLLM in-tree |",
        "|--|--|--|--|",
    ]
    lines += [f"| {r['thread']} | {r['fault']} | {r['k3-core']} | {r['vLLM in-tree']} |" for r in report["faults"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
