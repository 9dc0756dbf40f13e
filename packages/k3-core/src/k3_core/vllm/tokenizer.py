"""The checkpoint's tokenizer as vLLM's ``TokenizerLike`` (``--tokenizer-mode kimi_k3``), without remote code.

All work is done by :class:`k3_core.chat.K3Tokenizer`, reachable as ``.k3``. Tokens are shown as strings in the usual
byte-level alphabet (one character a byte), special tokens by their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from k3_core.chat import K3Tokenizer, encode, load_tokenizer, protocol, resolve_thinking
from k3_core.chat.options import ENCODE_OPTIONS, THINKING_OPTIONS
from k3_core.chat.tools import drop_null_fields
from k3_core.errors import ChatError, CheckpointError

#: Options that callers pass to every tokenizer's chat template and that have no meaning here.
_IGNORED = frozenset({"chat_template", "return_dict", "return_tensors", "return_assistant_tokens_mask"})


def _byte_alphabet() -> list[str]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_CHARS = _byte_alphabet()
_BYTES = {char: byte for byte, char in enumerate(_CHARS)}


class KimiK3Tokenizer:
    """vLLM's view of the tokenizer. ``path``: folder or file of the vocabulary; ``truncation_side``: left or right."""

    chat_template: str | None = None
    padding_side = "left"
    is_fast = True  # the merging is native code; nothing here is slow
    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012 - transformers' name and form

    def __init__(self, path: str | Path, truncation_side: str = "left", name_or_path: str | None = None) -> None:
        self.k3: K3Tokenizer = load_tokenizer(path)
        self.path = str(path)
        self.name_or_path = name_or_path or str(path)
        self.truncation_side = truncation_side
        self.model_max_length = int(1e30)
        self.bos_token, self.eos_token = protocol.BOS, protocol.EOS
        self.pad_token, self.unk_token = protocol.PAD, protocol.UNK
        self.bos_token_id, self.eos_token_id = self.k3.bos_id, self.k3.eos_id
        self.pad_token_id, self.unk_token_id = self.k3.pad_id, self.k3.unk_id
        self.end_of_msg_id = self.k3.end_of_msg_id

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *args: Any,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
        truncation_side: str = "left",
        **kwargs: Any,
    ) -> KimiK3Tokenizer:
        """Load from a folder, or from the files of a repository (only the vocabulary is fetched, no code)."""
        path = Path(path_or_repo_id)
        if not path.exists():
            path = _download(
                str(path_or_repo_id), revision, kwargs.get("cache_dir") or download_dir, kwargs.get("token")
            )
        with contextlib.suppress(ImportError):  # without xgrammar there are no grammars to teach
            from k3_core.vllm import structured

            structured.install()
        return cls(path, truncation_side, name_or_path=str(path_or_repo_id))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.truncation_side, self.name_or_path)

    def __len__(self) -> int:
        return self.k3.vocab_size

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def tokenizer(self) -> Any:
        """The tiktoken encoding, under the name that grammar backends look for."""
        return self.k3.encoding

    @property
    def vocab_size(self) -> int:
        """Ranks and special slots together."""
        return self.k3.vocab_size

    @property
    def max_token_id(self) -> int:
        """The largest id."""
        return self.k3.vocab_size - 1

    @cached_property
    def max_chars_per_token(self) -> int:
        """Length of the longest token's string."""
        return max(map(len, self.get_vocab()))

    @property
    def all_special_tokens(self) -> list[str]:
        """Names of the 256 special slots."""
        return list(self.k3.special_tokens)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the 256 special slots."""
        return list(self.k3.special_tokens.values())

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Names of the tokens with a role in transformers' sense."""
        return {f"{role}_token": getattr(self, f"{role}_token") for role in ("bos", "eos", "pad", "unk")}

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """None: K3 puts no token around a text."""
        return 0

    @cached_property
    def _vocab(self) -> dict[str, int]:
        ordinary = {self._token(token): token for token in range(self.k3.num_ranks)}
        return ordinary | self.k3.special_tokens

    def get_vocab(self) -> dict[str, int]:
        """String of every token -> id."""
        return self._vocab

    def get_added_vocab(self) -> dict[str, int]:
        """The special tokens."""
        return dict(self.k3.special_tokens)

    # --- text to ids ------------------------------------------------------------------------------------------------
    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        truncation: bool | None = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        allow_special_tokens: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of ``text``. Names of special tokens become their ids, as in the released tokenizer's ``encode``.

        That is for whole prompts, as /v1/completions takes them; chats go through ``k3_core.chat.encode``, where text
        can never become structure.
        """
        if text_pair is not None:
            raise ChatError("Kimi K3's tokenizer has no text pairs")
        ids = self.k3.encode(text, allow_special=allow_special_tokens)
        return self._truncate(ids, max_length) if truncation and max_length is not None else ids

    def __call__(
        self,
        text: str | list[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool | None = False,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """``BatchEncoding`` with input_ids and attention_mask (and offset_mapping where asked for)."""
        from transformers import BatchEncoding

        texts = [text] if isinstance(text, str) else list(text)
        rows = [self.encode(item, text_pair, truncation, max_length) for item in texts]
        data: dict[str, Any] = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        if kwargs.get("return_offsets_mapping"):
            data["offset_mapping"] = [self._offsets(self.encode(t), r) for t, r in zip(texts, rows, strict=True)]
        return BatchEncoding({key: value[0] for key, value in data.items()} if isinstance(text, str) else data)

    def _truncate(self, ids: list[int], length: int) -> list[int]:
        if len(ids) <= length:
            return ids
        return ids[len(ids) - length :] if self.truncation_side == "left" else ids[:length]

    def _offsets(self, ids: list[int], kept: list[int]) -> list[tuple[int, int]]:
        """(start, end) characters of each kept token; a token inside a character has the character's end twice."""
        decoder, position, spans = self.k3.incremental(), 0, []
        for token in ids:
            end = position + len(decoder.feed(token))
            spans.append((position, end))
            position = end
        return spans[len(ids) - len(kept) :] if self.truncation_side == "left" else spans[: len(kept)]

    def apply_chat_template(
        self,
        conversation: list[Any] | None = None,
        tools: list[Any] | None = None,
        *,
        messages: list[Any] | None = None,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """Ids (with ``tokenize=False``: text) of a chat, as the released tokenizer makes them: effort max by default.

        Options: those of ``k3_core.chat.encode`` and every spelling of thinking. Unknown options are refused.
        """
        chat = conversation if conversation is not None else messages
        if kwargs.pop("continue_final_message", False):
            raise ChatError("continue_final_message is not supported: a Kimi K3 message cannot be left open")
        if kwargs.get("chat_template"):
            raise ChatError("Kimi K3 has no chat template to replace")
        if kwargs.pop("documents", None):
            raise ChatError(
                "documents are not supported: Kimi K3's chat format has no place for them; send them as text"
            )
        unknown = set(kwargs) - set(ENCODE_OPTIONS) - set(THINKING_OPTIONS) - _IGNORED
        if unknown:
            raise ChatError(f"unknown chat options {sorted(unknown)}")
        thinking = resolve_thinking({name: kwargs[name] for name in THINKING_OPTIONS if name in kwargs})
        options = {name: kwargs[name] for name in ENCODE_OPTIONS if name in kwargs}
        options |= {"thinking": thinking.thinking, "thinking_effort": thinking.effort}
        encoded = encode(chat or [], drop_null_fields(tools), tokenizer=self.k3, **options)
        return encoded.ids if tokenize else encoded.text

    # --- ids to text ------------------------------------------------------------------------------------------------
    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        """Text of ``ids``; ids outside the vocabulary give nothing."""
        row = [ids] if isinstance(ids, int) else ids
        known = [int(token) for token in row if 0 <= int(token) < self.k3.vocab_size]
        return self.k3.decode(known, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False, **_: Any
    ) -> list[str]:
        """:meth:`decode` of each."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """Token strings; ids outside the vocabulary give empty strings."""
        if isinstance(ids, int):
            return self._token(ids)
        special = self.k3.special_ids
        return [self._token(int(token)) for token in ids if not (skip_special_tokens and int(token) in special)]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Ids of token strings; unknown strings give the id of [UNK]."""
        if isinstance(tokens, str):
            return self._vocab.get(tokens, self.k3.unk_id)
        return [self._vocab.get(token, self.k3.unk_id) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Text of token strings; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self._token_bytes, tokens)).decode("utf-8", errors="replace")

    def _token(self, token: int) -> str:
        if token in self.k3.special_ids:
            return self.k3.token_bytes(token).decode()
        if not 0 <= token < self.k3.vocab_size:
            return ""
        return "".join(_CHARS[byte] for byte in self.k3.token_bytes(token))

    def _token_bytes(self, token: str) -> bytes:
        if token in self.k3.special_tokens:
            return token.encode()
        return bytes(_BYTES[char] for char in token if char in _BYTES)


def _download(repo: str, revision: str | None, cache: str | None, token: Any) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    options: dict[str, Any] = {"revision": revision, "cache_dir": cache, "token": token}
    try:
        vocabulary = hf_hub_download(repo, "tiktoken.model", **options)
    except EntryNotFoundError as error:
        raise CheckpointError(f"{repo} has no tiktoken.model; it is no Kimi K3 checkpoint") from error
    with contextlib.suppress(EntryNotFoundError):  # without it the names come from the protocol data
        hf_hub_download(repo, "tokenizer_config.json", **options)
    return Path(vocabulary).parent
