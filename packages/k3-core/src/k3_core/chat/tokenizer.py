"""The checkpoint's own tokenizer: tiktoken ranks plus 256 special slots. No vLLM, no transformers, no remote code.

The file ``tiktoken.model`` has one line a rank: base64 bytes, blank, rank. The ranks 0..R-1 are followed by 256 special
ids R..R+255 (R = 163,584 released, 512 in the tiny test vocabulary); their names come from the folder's
``tokenizer_config.json`` where there is one, else from :data:`k3_core.chat.protocol.SPECIAL_OFFSETS`. Unnamed slots are
``<|reserved_token_<id>|>``.

Text is encoded with specials *disabled* unless the caller says otherwise, so text can never become structure. Very long
text is cut as the released tokenizer cuts it (:func:`split_long_text`), because cuts are visible in the ids.
"""

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tiktoken

from k3_core.chat import protocol
from k3_core.errors import CheckpointError

_RUNS = re.compile(r"\s+|\S+")


def split_long_text(
    text: str, max_chars: int = protocol.MAX_ENCODE_CHARS, max_run: int = protocol.MAX_RUN_CHARS
) -> Iterator[str]:
    """Cut ``text`` into pieces of at most ``max_chars`` characters without a (non-)blank run above ``max_run``.

    A run is a maximal row of blank or of non-blank characters (``str.isspace``) inside one ``max_chars`` slice; a run
    longer than ``max_run`` is cut after every ``max_run`` characters. Source: the released tokenizer.
    """
    for start in range(0, len(text), max_chars):
        piece = text[start : start + max_chars]
        if len(piece) <= max_run:
            yield piece
            continue
        begin = 0
        for run in _RUNS.finditer(piece):
            for cut in range(run.start() + max_run, run.end(), max_run):
                yield piece[begin:cut]
                begin = cut
        yield piece[begin:]


class K3Tokenizer:
    """Byte-level BPE of Kimi K3. Build it with :func:`load_tokenizer`.

    ``ranks``: token bytes -> rank, exactly 0..R-1. ``names``: id -> name of the named special slots.
    """

    def __init__(self, ranks: dict[bytes, int], names: dict[int, str], source: str = "tiktoken.model") -> None:
        self.num_ranks = len(ranks)
        self.vocab_size = self.num_ranks + protocol.NUM_SPECIAL_SLOTS
        self.source = source
        slots = range(self.num_ranks, self.vocab_size)
        self.special_tokens: dict[str, int] = {
            names.get(slot, protocol.RESERVED_NAME.format(id=slot)): slot for slot in slots
        }
        if len(self.special_tokens) != protocol.NUM_SPECIAL_SLOTS:
            raise CheckpointError(f"{source}: two special tokens share one name; check added_tokens_decoder")
        missing = [name for name in protocol.SPECIAL_OFFSETS if name not in self.special_tokens]
        if missing:
            raise CheckpointError(f"{source}: the special tokens {missing} are missing; this is no Kimi K3 tokenizer")
        self.special_ids = frozenset(slots)
        self._special_bytes = [name.encode() for name in self.special_tokens]
        self._rank_bytes = sorted(ranks, key=ranks.__getitem__)
        self.encoding = tiktoken.Encoding(
            name=f"kimi-k3-{self.num_ranks}",
            pat_str=protocol.SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.special_tokens,
        )
        self.bos_id = self.special_tokens[protocol.BOS]
        self.eos_id = self.special_tokens[protocol.EOS]
        self.pad_id = self.special_tokens[protocol.PAD]
        self.unk_id = self.special_tokens[protocol.UNK]
        self.end_of_msg_id = self.special_tokens[protocol.END_OF_MSG]
        self.open_id = self.special_tokens[protocol.OPEN]
        self.close_id = self.special_tokens[protocol.CLOSE]
        self.sep_id = self.special_tokens[protocol.SEP]
        self.media_begin_id = self.special_tokens[protocol.MEDIA_BEGIN]
        self.media_content_id = self.special_tokens[protocol.MEDIA_CONTENT]
        self.media_end_id = self.special_tokens[protocol.MEDIA_END]
        self.media_pad_id = self.special_tokens[protocol.MEDIA_PAD]

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of ``text``; the names of special tokens become their ids only with ``allow_special``."""
        if allow_special and text in self.special_tokens:
            return [self.special_tokens[text]]
        ids: list[int] = []
        for piece in split_long_text(text):
            if allow_special:
                ids.extend(self.encoding.encode(piece, allowed_special="all", disallowed_special=()))
            else:
                ids.extend(self.encoding.encode_ordinary(piece))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; the name of a special one. Raises IndexError outside 0..vocab_size-1."""
        if token_id < 0 or token_id >= self.vocab_size:
            raise IndexError(f"token id {token_id} is outside 0..{self.vocab_size - 1}")
        if token_id < self.num_ranks:
            return self._rank_bytes[token_id]
        return self._special_bytes[token_id - self.num_ranks]

    def decode_bytes(self, ids: Iterable[int], skip_special_tokens: bool = False) -> bytes:
        """Bytes of ``ids``. Raises IndexError for an id outside the vocabulary."""
        wanted = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(self.token_bytes(i) for i in wanted)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special_tokens).decode("utf-8", errors="replace")

    def incremental(self, skip_special_tokens: bool = False) -> "IncrementalDecoder":
        """A detokeniser for one stream."""
        return IncrementalDecoder(self, skip_special_tokens)


class IncrementalDecoder:
    """Ids in, text out, never half a character: bytes of an unfinished UTF-8 sequence wait for the next token.

    The concatenation of all results of :meth:`feed` and :meth:`finish` equals :meth:`K3Tokenizer.decode` of all ids,
    however they were cut. Cost per token is constant.
    """

    def __init__(self, tokenizer: K3Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: int | Sequence[int]) -> str:
        """Text that the next id or ids complete."""
        row = [ids] if isinstance(ids, int) else ids
        return self._utf8.decode(self._tokenizer.decode_bytes(row, self._skip))

    def finish(self) -> str:
        """What is left at the end of the stream: U+FFFD for bytes that never became a character."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(path: str | Path) -> K3Tokenizer:
    """Read ``tiktoken.model`` (``path``: the file or its folder) and the names in ``tokenizer_config.json`` beside it.

    Raises CheckpointError when the file is missing, damaged or no Kimi K3 vocabulary.
    """
    path = Path(path)
    file = path / "tiktoken.model" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; a Kimi K3 checkpoint holds its vocabulary in tiktoken.model")
    ranks = _read_ranks(file)
    first = len(ranks)
    names = {first + offset: name for name, offset in protocol.SPECIAL_OFFSETS.items()}
    config = file.parent / "tokenizer_config.json"
    if config.is_file():
        names = _read_names(config, first)
    return K3Tokenizer(ranks, names, source=str(file))


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"{file}, line {number}: expected '<base64> <rank>', found {line[:60]!r}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file}: ranks must be 0..{len(ranks) - 1} without gaps or repeats")
    lost = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lost:
        raise CheckpointError(f"{file}: {len(lost)} of the 256 single bytes have no rank (first: {lost[0]})")
    return ranks


def _read_names(config: Path, first: int) -> dict[int, str]:
    try:
        table = json.loads(config.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        names = {int(slot): str(entry["content"]) for slot, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{config}: added_tokens_decoder must map ids to {{content: name}}") from error
    last = first + protocol.NUM_SPECIAL_SLOTS - 1
    outside = sorted(slot for slot in names if not first <= slot <= last)
    if outside:
        raise CheckpointError(f"{config}: special token ids {outside[:5]} lie outside {first}..{last}, the 256 slots")
    wrong = {n: first + o for n, o in protocol.SPECIAL_OFFSETS.items() if names.get(first + o, n) != n}
    if wrong:
        raise CheckpointError(f"{config}: these special tokens are not at their ids: {wrong}")
    return {first + o: n for n, o in protocol.SPECIAL_OFFSETS.items()} | names
