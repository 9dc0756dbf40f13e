"""A small working tokenizer in the released layout: `tiktoken.model` and `tokenizer_config.json`.

The ranks are byte-complete (any text encodes) and every longer token is the merge of two earlier ones, as tiktoken
requires. They are learnt here, deterministically, from the sample text below. The 256 special slots follow the ranks in
the released order, so that the id of a special token is its released id - 163584 + the number of ranks (K3-SPEC 8.1).
"""

import base64
import re
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any

from k3_core.checkpoint.tiny_config import NUM_RANKS, NUM_SPECIALS
from k3_core.errors import ConfigError

#: Special tokens with a name, by slot; every other slot is `<|reserved_token_N|>`.
K3_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
#: Kimi-Linear keeps the chat set of Kimi-K2.
LINEAR_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}
_NOT_ADDITIONAL = ("[BOS]", "[EOS]", "[UNK]", "[PAD]")

_SAMPLE = """
The ferry leaves the harbour at seven in the morning and returns before the tide turns. What is in the picture?
The picture shows a small red lighthouse on a rock, and the sea around it is calm. Please answer in one sentence.
A system message tells the assistant how to answer; a user asks; the assistant thinks, responds and may call a tool.
message role="system" message role="user" message role="assistant" think response tools call argument key type="string"
{"name": "get_weather", "description": "the weather of a city", "parameters": {"type": "object", "properties": {}}}
def area(width, height):
    return width * height
for i in range(10):
    print(i, area(i, i + 1))
image 448x448 image 1024x768 image 640x480; 0 1 2 3 10 100 1000 2026; 3.14159, 2.71828.
Wie spät ist es? Où est la gare? ¿Dónde está el puerto? Который час? 今天天气很好。图片里有一座灯塔。港に船があります。
Counting the waves, the keeper writes: first, second, third, fourth; then the counting starts again, and again.
"""


@lru_cache(maxsize=4)
def mergeable_ranks(num_ranks: int = NUM_RANKS) -> tuple[bytes, ...]:
    """The tokens in rank order: the 256 bytes, then merges of the most frequent neighbouring pair.

    Raises ConfigError for fewer than 256 ranks, or more than the sample text can give.
    """
    if num_ranks < 256:
        raise ConfigError(f"num_ranks = {num_ranks}: the 256 single bytes are needed so that every text encodes")
    words = Counter(re.findall(r" ?\w+|[^\w\s]+|\s+", _SAMPLE))
    pieces = {word: [bytes([b]) for b in word.encode()] for word in words}
    ranks = [bytes([b]) for b in range(256)]
    while len(ranks) < num_ranks:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, parts in pieces.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            raise ConfigError(f"num_ranks = {num_ranks}: the built-in sample gives only {len(ranks)} ranks")
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.append(best[0] + best[1])
        pieces = {word: _merge(parts, best) for word, parts in pieces.items()}
    return tuple(ranks)


def _merge(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged: list[bytes] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def tiktoken_file(num_ranks: int = NUM_RANKS) -> str:
    """The text of `tiktoken.model`: one base64 token and its rank a line."""
    return "".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(mergeable_ranks(num_ranks)))


def tokenizer_config(specials: dict[int, str], num_ranks: int = NUM_RANKS) -> dict[str, Any]:
    """The content of `tokenizer_config.json` with the named special tokens at their slots."""
    added = {
        str(num_ranks + slot): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for slot, name in sorted(specials.items())
        if slot < NUM_SPECIALS
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": [n for _, n in sorted(specials.items()) if n not in _NOT_ADDITIONAL],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": 1000000,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
