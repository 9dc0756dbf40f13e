"""Chat format of Kimi K3: tokenizer, encoder and the one decoder. Knows neither vLLM nor transformers."""

from k3_core.chat.decoder import StreamParser, parse
from k3_core.chat.encoder import Encoded, ImageSpan, Segment, encode, image_prompt, order_tool_results
from k3_core.chat.options import Thinking, resolve_thinking
from k3_core.chat.reply import Event, Reply, ToolCall
from k3_core.chat.tokenizer import IncrementalDecoder, K3Tokenizer, load_tokenizer, split_long_text
from k3_core.chat.tools import drop_null_fields, remember_fields, restore_fields

__all__ = [
    "Encoded",
    "Event",
    "ImageSpan",
    "IncrementalDecoder",
    "K3Tokenizer",
    "Reply",
    "Segment",
    "StreamParser",
    "Thinking",
    "ToolCall",
    "drop_null_fields",
    "encode",
    "image_prompt",
    "load_tokenizer",
    "order_tool_results",
    "parse",
    "remember_fields",
    "resolve_thinking",
    "restore_fields",
    "split_long_text",
]
