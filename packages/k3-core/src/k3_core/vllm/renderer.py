"""Chats to token ids: segment by segment, through ``k3_core.chat.encode``.

Kimi K3 has no chat template. Structure is encoded with special tokens and everything a user, a tool or an earlier reply
wrote without them, each segment for itself, so text cannot become structure. Images keep their own mode (alpha
included); ``--media-io-kwargs`` and the request's ``media_io_kwargs`` take precedence over that.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import requests
from PIL import Image
from vllm.renderers.base import BaseRenderer
from vllm.renderers.inputs.preprocess import parse_dec_only_prompt
from vllm.utils.async_utils import make_async

from k3_core import chat
from k3_core.chat.options import ENCODE_OPTIONS, THINKING_OPTIONS
from k3_core.chat.tools import drop_null_fields
from k3_core.errors import ChatError, ConfigError, ImageError
from k3_core.multimodal import MEDIA_PAD, image_prompt
from k3_core.multimodal.loading import FORMATS
from k3_core.vllm import compat
from k3_core.vllm.processor import plain_image

#: chat_template_kwargs of requests that are ours to interpret; others are refused by name.
_ENCODE = ("tools", *(name for name in ENCODE_OPTIONS if name not in (*THINKING_OPTIONS, "image_prompts")))
#: What vLLM's entry points add for templates that are files; it has no meaning here.
_IGNORED = ("chat_template", "return_dict", "tokenize", "return_assistant_tokens_mask", "cohere_format")


class KimiK3Renderer(BaseRenderer):
    """vLLM's renderer for ``--tokenizer-mode kimi_k3``."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._render_async = make_async(self._render, executor=self._executor)
        self._server_options: frozenset[str] = frozenset()
        if tokenizer is not None:
            check_vocabulary(self.model_config, tokenizer.k3)

    def warmup(self, chat_params: Any) -> None:
        """Learn which chat options the server itself adds to every request, then warm up.

        vLLM adds options of other models' templates (0.32: ``cohere_format``); what a client misspells is refused.
        """
        self._server_options = frozenset(chat_params.chat_template_kwargs)
        super().warmup(chat_params)

    def render_messages(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        """The parsed conversation and its prompt: token ids, with the images for the multimodal processor.

        Raises ChatError (400 for the client) for a conversation or an option that cannot be encoded.
        """
        _require_messages(messages)
        sent = chat.remember_fields(messages)
        with _clients_errors():
            conversation, mm_data, mm_uuids = compat.chat_utils().parse_chat_messages(
                messages, self.model_config, **self._parse_options(params)
            )
        conversation = _with_lost_fields(chat.restore_fields(conversation, sent), messages)
        return self._finish(conversation, self._render(conversation, mm_data, params), mm_data, mm_uuids)

    async def render_messages_async(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        """See :meth:`render_messages`; encoding runs in the renderer's pool."""
        _require_messages(messages)
        sent = chat.remember_fields(messages)
        with _clients_errors():
            conversation, mm_data, mm_uuids = await compat.chat_utils().parse_chat_messages_async(
                messages, self.model_config, **self._parse_options(params)
            )
        conversation = _with_lost_fields(chat.restore_fields(conversation, sent), messages)
        ids = await self._render_async(conversation, mm_data, params)
        return self._finish(conversation, ids, mm_data, mm_uuids)

    def _parse_options(self, params: Any) -> dict[str, Any]:
        from vllm.multimodal.media.connector import merge_media_io_kwargs

        return {
            # Parts stay apart, so that images bind to image parts and never to text that looks like a placeholder.
            "content_format": "openai",
            "media_io_kwargs": merge_media_io_kwargs({"image": {"image_mode": None}}, params.media_io_kwargs),
            "mm_processor_kwargs": params.mm_processor_kwargs,
        }

    def _render(self, conversation: list[Any], mm_data: Mapping[str, Any] | None, params: Any) -> list[int]:
        options = encode_options(params, self._server_options)
        images = [plain_image(image) for image in (mm_data or {}).get("image") or []]
        tokenizer = self.get_tokenizer()
        encoded = chat.encode(
            conversation,
            drop_null_fields(options.pop("tools", None)),
            tokenizer=tokenizer.k3,
            image_prompts=[image_prompt(*image.size) for image in images] or None,
            **options,
        )
        return encoded.ids

    def _finish(self, conversation: list[Any], ids: list[int], mm_data: Any, mm_uuids: Any) -> tuple[list[Any], Any]:
        prompt = parse_dec_only_prompt(ids)
        if mm_data is not None:
            prompt["multi_modal_data"] = mm_data
        if mm_uuids is not None:
            prompt["multi_modal_uuids"] = mm_uuids
        return conversation, prompt


def check_vocabulary(model_config: Any, tokenizer: chat.K3Tokenizer) -> None:
    """Refuse a config.json and a tiktoken.model of different checkpoints; another media id would turn text into images.

    Raises ConfigError naming both values.
    """
    other = f"{tokenizer.source} belongs to another checkpoint"
    media = getattr(model_config.hf_config, "media_placeholder_token_id", None)
    if media is not None and media != tokenizer.media_pad_id:
        raise ConfigError(
            f"media_placeholder_token_id = {media}, but {MEDIA_PAD} is token {tokenizer.media_pad_id}; {other}"
        )
    size = model_config.get_vocab_size()
    if tokenizer.vocab_size > size:
        raise ConfigError(f"vocab_size = {size}, but the tokenizer has {tokenizer.vocab_size} tokens; {other}")


@contextmanager
def _clients_errors() -> Iterator[None]:
    """What vLLM up to 0.32 answers with 500 or 501 although the request is at fault: ImageError or ChatError (400).

    Pictures that cannot be fetched, are no base64, lie on the server's own disk, are no pictures or are decompression
    bombs, and tool call arguments nested deeper than Python's JSON reader goes.
    """
    try:
        yield
    except (aiohttp.ClientError, requests.RequestException, OSError, TimeoutError) as error:
        raise ImageError(f"the image cannot be fetched: {error or type(error).__name__}") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"the image is too large to decode, send a smaller one: {error}") from error
    except NotImplementedError as error:
        raise ImageError(f"the image's URL cannot be used: {error}") from error
    except binascii.Error as error:
        raise ImageError(f"the image's data URL is not valid base64: {error}") from error
    except ValueError as error:
        if "only ASCII characters" in str(error):
            raise ImageError(f"the image's data URL is not valid base64: {error}") from error
        if "cannot identify image file" not in str(error):
            raise
        raise ImageError(
            f"the image is of an unknown format or damaged; formats: {', '.join(FORMATS)} (a drawing such as SVG must "
            "be rendered first)"
        ) from error
    except RecursionError as error:
        raise ChatError("the arguments of a tool call in the messages are nested too deeply") from error
    except RuntimeError as error:
        if "local files" not in str(error):
            raise
        raise ImageError(f"the image cannot be read: {error}") from error


def _require_messages(messages: Sequence[Any]) -> None:
    """Raises ChatError (400) for a conversation without a message, which vLLM lets through."""
    if not messages:
        raise ChatError("messages is empty: a conversation needs at least one message")


def _with_lost_fields(conversation: Sequence[Any], messages: Sequence[Any]) -> list[Any]:
    """``conversation`` with what vLLM's own parsing leaves out and the encoder either renders or refuses by name.

    That is the ``tools`` of a system message (vLLM keeps a developer's only), ``function_call``, and the ``tool_calls``
    of a message that is no assistant's. Messages are matched by position.
    """
    if len(conversation) != len(messages):
        return list(conversation)
    rows = []
    for row, message in zip(conversation, messages, strict=True):
        given = message if isinstance(message, Mapping) else {}
        lost = {
            key: given[key] for key in ("tools", "function_call", "tool_calls") if given.get(key) and not row.get(key)
        }
        if isinstance(lost.get("tools"), list):
            lost["tools"] = drop_null_fields(lost["tools"])
        rows.append({**row, **lost})
    return rows


def encode_options(params: Any, server_options: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The options of ``chat.encode`` that a request's ``ChatParams`` ask for.

    ``server_options``: names that the server adds by itself; they are ignored where Kimi K3 has no such option.

    Raises ChatError for a ``chat_template``, an unknown ``chat_template_kwargs`` entry, and contradictory options.
    """
    given = dict(params.get_apply_chat_template_kwargs())
    if given.get("chat_template"):
        raise ChatError("Kimi K3 has no chat template; leave out --chat-template and chat_template")
    if given.pop("continue_final_message", False):
        raise ChatError("continue_final_message is not supported: a Kimi K3 message cannot be left open by the client")
    if given.pop("documents", None):
        raise ChatError("documents are not supported: Kimi K3's chat format has no place for them; send them as text")
    unknown = sorted(set(given) - {*THINKING_OPTIONS, *_ENCODE, *_IGNORED, *server_options})
    if unknown:
        raise ChatError(f"chat_template_kwargs {unknown} are unknown; Kimi K3 knows {sorted(THINKING_OPTIONS)}")
    thinking = chat.resolve_thinking({name: given[name] for name in THINKING_OPTIONS if name in given})
    options = {name: given[name] for name in _ENCODE if given.get(name) is not None}
    for name in ("tool_choice", "response_format"):
        value = getattr(params, name, None)  # fields of the request from 0.27 on
        if value is not None:
            options[name] = plain_value(value)
    return {**options, "thinking": thinking.thinking, "thinking_effort": thinking.effort}


def plain_value(value: Any) -> Any:
    """A request field as plain data: pydantic models are dumped by their aliases."""
    dump = getattr(value, "model_dump", None)
    return dump(mode="json", by_alias=True, exclude_none=True) if callable(dump) else value
