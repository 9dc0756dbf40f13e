"""Every tensor of a released checkpoint, generated from the configuration.

The table is checked against the released index: for Kimi K3 it has 497,220 tensors and 1,560,860,324,864 bytes, and
exactly A_log, dt_bias, the three convolution weights, o_norm and e_score_correction_bias are F32 (K3-SPEC 2.1). All
weights are stored [out, in]; there is no bias anywhere in the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from k3_core.config import K3Config, TextConfig, VisionConfig
from k3_core.contracts.mxfp4 import GROUP_SIZE

#: safetensors' names of the dtypes that occur.
DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int64: "I64",
}
IN_CHANNELS = 3

_MODEL_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype as a safetensors header spells it: BF16, F32, U8."""
        return DTYPE_NAMES[self.dtype]


def tensor_table(config: K3Config) -> dict[str, TensorSpec]:
    """Name -> shape and dtype of every tensor of the checkpoint that `config` describes, in the released order of use.

    Names carry the prefix `language_model.` for `KimiK3ForConditionalGeneration` and none for
    `KimiLinearForCausalLM`. A_log has the released padded length (see `a_log_length`).
    """
    return dict(_all(config))


def text_prefix(config: K3Config) -> str:
    """What the names of text tensors start with: "language_model." or nothing."""
    return "language_model." if config.architecture == "KimiK3ForConditionalGeneration" else ""


def a_log_length(num_heads: int) -> int:
    """Stored length of A_log for `num_heads` heads: the next power of two (96 heads are stored as 128 values).

    The release has only the one case; readers accept any length whose tail is zero (`normalize_a_log`).
    """
    return 1 << (num_heads - 1).bit_length()


def _all(config: K3Config) -> Iterator[tuple[str, TensorSpec]]:
    text, prefix, dtype = config.text, text_prefix(config), _MODEL_DTYPES[config.dtype]
    H = text.hidden_size
    yield f"{prefix}model.embed_tokens.weight", TensorSpec((text.vocab_size, H), dtype)
    kinds: dict[tuple[str, bool], list[tuple[str, TensorSpec]]] = {}  # at most four different layers; built once
    for i in range(text.num_hidden_layers):
        kind = (text.layer_kind(i), text.is_moe_layer(i))
        if kind not in kinds:
            kinds[kind] = list(_layer(config, i, dtype))
        layer = f"{prefix}model.layers.{i}."
        for name, spec in kinds[kind]:
            yield layer + name, spec
    yield f"{prefix}model.norm.weight", TensorSpec((H,), dtype)
    if text.attn_res_block_size is not None:
        yield f"{prefix}model.output_attn_res_norm.weight", TensorSpec((H,), dtype)
        yield f"{prefix}model.output_attn_res_proj.weight", TensorSpec((1, H), dtype)
    if not text.tie_word_embeddings:
        yield f"{prefix}lm_head.weight", TensorSpec((text.vocab_size, H), dtype)
    if config.vision is not None:
        yield from _vision(config.vision, dtype)


def _layer(config: K3Config, i: int, dtype: torch.dtype) -> Iterator[tuple[str, TensorSpec]]:
    text = config.text
    H = text.hidden_size
    yield "input_layernorm.weight", TensorSpec((H,), dtype)
    yield "post_attention_layernorm.weight", TensorSpec((H,), dtype)
    if text.attn_res_block_size is not None:
        for part in ("self_attention", "mlp"):
            yield f"{part}_res_norm.weight", TensorSpec((H,), dtype)
            yield f"{part}_res_proj.weight", TensorSpec((1, H), dtype)
    attention = _kda(config, dtype) if text.layer_kind(i) == "kda" else _mla(text, dtype)
    for name, shape, kind in attention:
        yield f"self_attn.{name}", TensorSpec(shape, kind)
    if text.is_moe_layer(i):
        for name, shape, kind in _moe(config, dtype):
            yield f"block_sparse_moe.{name}", TensorSpec(shape, kind)
    else:
        for name, shape in _mlp(H, text.intermediate_size):
            yield f"mlp.{name}", TensorSpec(shape, dtype)


_Entry = tuple[str, tuple[int, ...], torch.dtype]


def _kda(config: K3Config, dtype: torch.dtype) -> Iterator[_Entry]:
    text, linear = config.text, config.text.linear_attn
    H, N, D, P = text.hidden_size, linear.num_heads, linear.head_dim, linear.projection_size
    # Kimi-Linear stores the convolutions and o_norm in the model's dtype, and A_log four-dimensional (K3-SPEC 1.6).
    small = dtype if config.is_kimi_linear else torch.float32
    for part in ("q", "k", "v"):
        yield f"{part}_proj.weight", (P, H), dtype
    for part in ("q", "k", "v"):
        yield f"{part}_conv1d.weight", (P, 1, linear.short_conv_kernel_size), small
    yield "f_a_proj.weight", (D, H), dtype
    yield "f_b_proj.weight", (P, D), dtype
    yield "b_proj.weight", (N, H), dtype
    yield "A_log", (1, 1, N, 1) if config.is_kimi_linear else (a_log_length(N),), torch.float32
    yield "dt_bias", (P,), torch.float32
    yield "o_norm.weight", (D,), small
    if linear.use_full_rank_gate:
        yield "g_proj.weight", (P, H), dtype
    else:
        yield "g_a_proj.weight", (D, H), dtype
        yield "g_b_proj.weight", (P, D), dtype
    yield "o_proj.weight", (H, P), dtype


def _mla(text: TextConfig, dtype: torch.dtype) -> Iterator[_Entry]:
    H, N, latent = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    queries, values = N * text.qk_head_dim, N * text.v_head_dim
    if text.q_lora_rank is None:
        yield "q_proj.weight", (queries, H), dtype
    else:
        yield "q_a_proj.weight", (text.q_lora_rank, H), dtype
        yield "q_a_layernorm.weight", (text.q_lora_rank,), dtype
        yield "q_b_proj.weight", (queries, text.q_lora_rank), dtype
    yield "kv_a_proj_with_mqa.weight", (latent + text.qk_rope_head_dim, H), dtype
    yield "kv_a_layernorm.weight", (latent,), dtype
    yield "kv_b_proj.weight", (N * (text.qk_nope_head_dim + text.v_head_dim), latent), dtype
    if text.mla_use_output_gate:
        yield "g_proj.weight", (values, H), dtype
    yield "o_proj.weight", (H, values), dtype


def _moe(config: K3Config, dtype: torch.dtype) -> Iterator[_Entry]:
    text = config.text
    H, L, W = text.hidden_size, text.expert_hidden_size, text.moe_intermediate_size
    yield "gate.weight", (text.num_experts, H), dtype
    yield "gate.e_score_correction_bias", (text.num_experts,), torch.float32
    if text.routed_expert_hidden_size is not None:
        yield "routed_expert_down_proj.weight", (L, H), dtype
        if text.latent_moe_use_norm:
            yield "routed_expert_norm.weight", (L,), dtype
        yield "routed_expert_up_proj.weight", (H, L), dtype
    if text.num_shared_experts:
        for name, shape in _mlp(H, text.shared_intermediate_size):
            yield f"shared_experts.{name}", shape, dtype
    for expert in range(text.num_experts):
        for part, out, width in (("w1", W, L), ("w3", W, L), ("w2", L, W)):
            if config.quantization is None:
                yield f"experts.{expert}.{part}.weight", (out, width), dtype
            else:
                yield f"experts.{expert}.{part}.weight_packed", (out, width // 2), torch.uint8
                yield f"experts.{expert}.{part}.weight_scale", (out, width // GROUP_SIZE), torch.uint8


def _mlp(hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "gate_proj.weight", (width, hidden)
    yield "up_proj.weight", (width, hidden)
    yield "down_proj.weight", (hidden, width)


def _vision(vision: VisionConfig, dtype: torch.dtype) -> Iterator[tuple[str, TensorSpec]]:
    C, Q, F = vision.vt_hidden_size, vision.qkv_hidden_size, vision.vt_intermediate_size
    p, M = vision.patch_size, vision.merged_size
    tower = "vision_tower."
    yield tower + "patch_embed.proj.weight", TensorSpec((C, IN_CHANNELS, p, p), dtype)
    table = (vision.init_pos_emb_height, vision.init_pos_emb_width, C)
    yield tower + "patch_embed.pos_emb.weight", TensorSpec(table, dtype)
    for i in range(vision.vt_num_hidden_layers):
        block = f"{tower}encoder.blocks.{i}."
        yield block + "norm0.weight", TensorSpec((C,), dtype)
        yield block + "wqkv.weight", TensorSpec((3 * Q, C), dtype)
        yield block + "wo.weight", TensorSpec((C, Q), dtype)
        yield block + "norm1.weight", TensorSpec((C,), dtype)
        yield block + "mlp.fc0.weight", TensorSpec((F, C), dtype)
        yield block + "mlp.fc1.weight", TensorSpec((C, F), dtype)
    yield tower + "encoder.final_layernorm.weight", TensorSpec((C,), dtype)
    yield "mm_projector.proj.0.weight", TensorSpec((M, M), dtype)
    yield "mm_projector.proj.2.weight", TensorSpec((vision.text_hidden_size, M), dtype)
    yield "mm_projector.post_norm.weight", TensorSpec((vision.text_hidden_size,), dtype)
