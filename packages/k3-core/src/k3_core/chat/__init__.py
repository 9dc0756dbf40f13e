"""Chat format of Kimi K3: tokenizer, encoder and the one decoder. Knows neither vLLM nor transformers."""

from k3_core.chat.encoder import Encoded, ImageSpan, Segment, encode, image_prompt, order_tool_results
from k3_core.chat.options import Thinking, resolve_thinking
from k3_core.chat.tokenizer import IncrementalDecoder, K3Tokenizer, load_tokenizer, split_long_text

__all__ = [
    "Encoded",
    "ImageSpan",
    "IncrementalDecoder",
    "K3Tokenizer",
    "Segment",
    "Thinking",
    "encode",
    "image_prompt",
    "load_tokenizer",
    "order_tool_results",
    "resolve_thinking",
    "split_long_text",
]
