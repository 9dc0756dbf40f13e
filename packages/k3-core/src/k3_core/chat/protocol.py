"""Protocol data of Kimi K3's chat format: every literal string and number of it, and nothing else.

Source: the released encoding (``encoding_k3.py``) and tokenizer (``tokenization_kimi.py``) of moonshotai/Kimi-K3. These
strings are what the model was trained on; they are data of the wire format, so they are kept here verbatim and used
nowhere else as literals. The split pattern is that of the Kimi K2 tokenizer, which K3 keeps.

The format ("XTML") in one paragraph. An element opens as ``<|open|>`` tag {` key="value"`} ``<|sep|>`` and closes as
``<|close|>`` tag ``<|sep|>``; a conversation is a row of ``message`` elements, each followed by ``<|end_of_msg|>``. An
assistant message holds the channels ``think`` (thinking mode), ``response`` and, when it calls tools, ``tools``; that
one holds ``call`` elements, which hold ``argument`` elements (or one ``json`` element for text that is no JSON).
"""

from typing import Final

# --- structural tokens (single ids) ---------------------------------------------------------------------------------
OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
END_OF_MSG: Final = "<|end_of_msg|>"
BOS: Final = "[BOS]"
EOS: Final = "[EOS]"
EOT: Final = "[EOT]"
PAD: Final = "[PAD]"
UNK: Final = "[UNK]"
MEDIA_BEGIN: Final = "<|media_begin|>"
MEDIA_CONTENT: Final = "<|media_content|>"
MEDIA_END: Final = "<|media_end|>"
MEDIA_PAD: Final = "<|media_pad|>"

#: Not a token: the text that stands for an image when the caller supplies no image prompts.
IMAGE_PLACEHOLDER: Final = "<|kimi_image_placeholder|>"

#: Offsets of the named special tokens from the first id after the BPE ranks. All other slots are reserved.
SPECIAL_OFFSETS: Final[dict[str, int]] = {
    BOS: 0,
    EOS: 1,
    END_OF_MSG: 2,
    OPEN: 3,
    CLOSE: 4,
    SEP: 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    EOT: 9,
    MEDIA_BEGIN: 18,
    MEDIA_CONTENT: 19,
    MEDIA_END: 20,
    MEDIA_PAD: 21,
    "<osagent_mode>": 65,
    UNK: 254,
    PAD: 255,
}
NUM_SPECIAL_SLOTS: Final = 256
RESERVED_NAME: Final = "<|reserved_token_{id}|>"

#: Tokens at which a reply is over, whatever follows.
TERMINATORS: Final = (END_OF_MSG, EOS, EOT)

# --- tokenizer ------------------------------------------------------------------------------------------------------
SPLIT_PATTERN: Final = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
#: Longest text given to one call of the BPE encoder, and longest run of (non-)blank characters in it. Cuts change ids,
#: so they are part of the format.
MAX_ENCODE_CHARS: Final = 400_000
MAX_RUN_CHARS: Final = 25_000

# --- tags and attributes --------------------------------------------------------------------------------------------
TAG_MESSAGE: Final = "message"
TAG_THINK: Final = "think"
TAG_RESPONSE: Final = "response"
TAG_TOOLS: Final = "tools"
TAG_CALL: Final = "call"
TAG_ARGUMENT: Final = "argument"
TAG_JSON: Final = "json"
TAGS: Final = frozenset({TAG_MESSAGE, TAG_THINK, TAG_RESPONSE, TAG_TOOLS, TAG_CALL, TAG_ARGUMENT, TAG_JSON})

ATTR_ROLE: Final = "role"
ATTR_TYPE: Final = "type"
ATTR_NAME: Final = "name"
ATTR_TOOL: Final = "tool"
ATTR_INDEX: Final = "index"
ATTR_KEY: Final = "key"

TYPE_TOOL_DECLARE: Final = "tool-declare"
TYPE_THINKING_EFFORT: Final = "thinking-effort"
TYPE_TOOL_CHOICE: Final = "tool-choice"
TYPE_RESPONSE_FORMAT: Final = "response-format"

ARGUMENT_TYPES: Final = ("string", "number", "boolean", "null", "object", "array")
THINKING_EFFORTS: Final = ("low", "high", "max")
#: What the released tokenizer assumes when the caller names no effort (the bare encoder assumes none).
DEFAULT_EFFORT: Final = "max"

# --- bodies of the messages that the system writes ------------------------------------------------------------------
TOOL_DECLARE: Final = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{tools}\n```"
DYNAMIC_TOOL_DECLARE: Final = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
    "```json\n{tools}\n```"
)
EFFORT_MESSAGE: Final = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
TOOL_CHOICE_REQUIRED: Final = (
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
)
TOOL_CHOICE_NONE: Final = (
    "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."
)
JSON_OBJECT: Final = (
    "The system is invoked with `response_format=json_object`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
JSON_SCHEMA: Final = (
    "The system is invoked with `response_format=json_schema`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.\n"
    "The JSON data must match the following schema:\n"
    "```json\n{schema}\n```"
)
#: Text between the media tokens of one image: its original size in pixels.
IMAGE_CAPTION: Final = "image {width}x{height}"
