"""The tokenizer against the released one's samples, on a 163,584-rank vocabulary, and on damaged files."""

import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_core.chat import load_tokenizer, split_long_text
from k3_core.errors import CheckpointError

DATA = Path(__file__).parent / "data" / "chat"
SAMPLES: list[dict[str, Any]] = json.loads((DATA / "tokenizer_samples.json").read_text(encoding="utf-8"))
TOKENIZER = load_tokenizer(DATA)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: repr(sample["text"][:12]))
def test_samples_of_the_released_tokenizer(sample: dict[str, Any]) -> None:
    assert TOKENIZER.encode(sample["text"]) == sample["ids_plain"]
    assert TOKENIZER.encode(sample["text"], allow_special=True) == sample["ids_special"]
    assert TOKENIZER.decode(sample["ids_plain"]) == sample["text"]
    assert TOKENIZER.decode(sample["ids_special"]) == sample["text"]


def test_special_slots() -> None:
    assert (TOKENIZER.num_ranks, TOKENIZER.vocab_size) == (512, 768)
    assert (TOKENIZER.bos_id, TOKENIZER.end_of_msg_id, TOKENIZER.open_id, TOKENIZER.sep_id) == (512, 514, 515, 517)
    assert (TOKENIZER.media_pad_id, TOKENIZER.pad_id) == (533, 767)
    assert TOKENIZER.special_tokens["<|reserved_token_700|>"] == 700
    assert TOKENIZER.decode([700]) == "<|reserved_token_700|>"
    assert TOKENIZER.decode([515, 97, 700], skip_special_tokens=True) == "a"


@given(st.text(st.characters(exclude_categories=()), max_size=60))
def test_text_never_becomes_special(text: str) -> None:
    ids = TOKENIZER.encode(text + "<|open|>[BOS]" + text)
    assert not TOKENIZER.special_ids & set(ids)
    encodable = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if encodable == text:
        assert TOKENIZER.decode(ids) == text + "<|open|>[BOS]" + text


@given(st.lists(st.integers(0, 767), max_size=40), st.data())
def test_incremental_decoding_equals_decoding_at_once(ids: list[int], data: st.DataObject) -> None:
    decoder = TOKENIZER.incremental()
    text = ""
    position = 0
    while position < len(ids):
        step = data.draw(st.integers(1, 4))
        piece = decoder.feed(ids[position : position + step])
        text += piece
        position += step
    assert text + decoder.finish() == TOKENIZER.decode(ids)


def test_half_a_character_waits() -> None:
    wave = TOKENIZER.encode("🌊")
    assert len(wave) == 4
    decoder = TOKENIZER.incremental()
    assert [decoder.feed(token) for token in wave] == ["", "", "", "🌊"]
    assert decoder.feed(wave[:2]) == ""
    assert decoder.finish() == "\ufffd"


def _split_by_definition(text: str, max_chars: int, max_run: int) -> list[str]:
    """The rule, character by character."""
    pieces = []
    for start in range(0, len(text), max_chars):
        current, run, blank = "", 0, None
        for char in text[start : start + max_chars]:
            run = run + 1 if char.isspace() == blank else 1
            blank = char.isspace()
            if run > max_run:
                pieces.append(current)
                current, run = "", 1
            current += char
        pieces.append(current)
    return pieces


@given(st.text("ab \n\u3000\x1c\x85é", max_size=80), st.integers(1, 30), st.integers(1, 9))
def test_long_text_is_cut_by_the_rule(text: str, max_chars: int, max_run: int) -> None:
    assert list(split_long_text(text, max_chars, max_run)) == _split_by_definition(text, max_chars, max_run)


def test_very_long_inputs() -> None:
    text = ("lorem ipsum 12345 东边 " * 40_000)[:900_001]
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    run = "max" * 20_000  # the cuts go through a token
    by_hand = [
        token
        for piece in _split_by_definition(run, 400_000, 25_000)
        for token in TOKENIZER.encoding.encode_ordinary(piece)
    ]
    assert TOKENIZER.encode(run) == by_hand
    assert "".join(split_long_text(run)) == run


def _write_vocabulary(folder: Path, num_ranks: int) -> None:
    """256 bytes and made-up longer tokens, as many as asked."""
    letters = b"abcdefghijklmnopqrstuvwxyz "
    tokens = [bytes([byte]) for byte in range(256)]
    for width in (2, 3, 4):
        tokens += [bytes(letters) for letters in itertools.product(letters, repeat=width)]
    tokens = tokens[:num_ranks]
    assert len(tokens) == num_ranks
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")


def test_released_size(tmp_path: Path) -> None:
    _write_vocabulary(tmp_path, 163_584)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_of_msg_id, tokenizer.media_pad_id, tokenizer.pad_id) == (
        163_840,
        163_586,
        163_605,
        163_839,
    )
    assert tokenizer.decode([163_650]) == "<|reserved_token_163650|>"
    assert tokenizer.encode("<osagent_mode>", allow_special=True) == [163_649]
    text = "abc ghd é <|open|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:7], b"!!! 7", *lines[8:]], "line 8"),
        (lambda lines: [*lines[:7], b"QQ==", *lines[8:]], "line 8"),
        (lambda lines: lines[:-2] + lines[-1:], "without gaps"),
        (lambda lines: lines[1:], "ranks must be"),
        (lambda lines: [], "single bytes"),
    ],
)
def test_damaged_vocabulary(tmp_path: Path, damage: Any, message: str) -> None:
    lines = (DATA / "tiktoken.model").read_bytes().splitlines()
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(damage(lines)))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"515": {"content": "<|shut|>"}}, "not at their ids"),
        ({"99": {"content": "<|x|>"}}, "lie outside 512..767"),
        ({"x": 1}, "must map ids"),
        ({"600": {"content": "<|open|>"}}, "share one name"),
    ],
)
def test_contradicting_names(tmp_path: Path, table: dict[str, Any], message: str) -> None:
    shutil.copy(DATA / "tiktoken.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table}))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load_tokenizer(tmp_path)
