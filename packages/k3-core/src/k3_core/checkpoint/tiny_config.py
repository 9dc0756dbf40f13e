"""Configurations of tiny models with the released structure: every rule of the real ones, none of their size."""

from typing import Any

from k3_core.config import K3Config, load_config
from k3_core.config.quantization import released_quantization

#: Ranks of the made-up vocabulary and special slots after it, in the released order.
NUM_RANKS = 512
NUM_SPECIALS = 256

#: Offsets of the named special tokens among the special slots (K3-SPEC 8.1).
BOS, EOS, END_OF_MESSAGE, MEDIA_PAD, PAD = 0, 1, 2, 21, 255

PRESETS = ("k3", "k3-13", "linear")

_TEXT_COMMON: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 32,
    "mla_use_nope": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 32,
}

_VISION: dict[str, Any] = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_height": 16,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 16,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_hidden_size": 64,
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": 14,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "qkv_hidden_size": 128,
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 2,
}


def tiny_config(preset: str = "k3", *, num_ranks: int = NUM_RANKS, **text: Any) -> K3Config:
    """A tiny configuration.

    Args:
        preset: "k3" (5 layers, bank blocks of 3, small vision tower), "k3-13" (the same with 13 layers) or "linear"
            (Kimi-Linear, 7 layers, text only).
        num_ranks: BPE ranks; the 256 special slots follow, in the released order.
        text: keys of the text configuration to change, for instance `num_hidden_layers`; a change of that key lays
            out KDA and MLA layers anew (every fourth and the last are MLA, as released).

    Returns:
        The checked configuration. Raises ConfigError for an unknown preset or values that contradict each other.
    """
    if preset not in PRESETS:
        from k3_core.errors import ConfigError

        raise ConfigError(f"preset {preset!r} is unknown: expected one of {', '.join(PRESETS)}")
    inner = _linear_text() if preset == "linear" else _k3_text(13 if preset == "k3-13" else 5)
    ids = {
        "bos_token_id": num_ranks + BOS,
        "eos_token_id": num_ranks + END_OF_MESSAGE,
        "pad_token_id": num_ranks + PAD,
    }
    inner |= ids | {"vocab_size": num_ranks + NUM_SPECIALS} | text
    if "linear_attn_config" not in text:
        inner["linear_attn_config"] |= layer_lists(inner["num_hidden_layers"])
    if preset == "linear":
        return load_config(inner)
    return load_config(
        {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "dtype": inner["dtype"],
            "ignore_index": -100,
            "image_placeholder": "<|kimi_image_placeholder|>",
            "media_placeholder_token_id": num_ranks + MEDIA_PAD,
            "model_type": "kimi_k3",
            "text_config": inner,
            "tie_word_embeddings": inner["tie_word_embeddings"],
            "vision_config": _VISION | {"text_hidden_size": inner["hidden_size"]},
            **ids,
        }
    )


def layer_lists(num_layers: int) -> dict[str, list[int]]:
    """The released pattern for `num_layers` layers, 1-based: every fourth and the last are MLA, the others KDA."""
    mla = sorted({*range(4, num_layers + 1, 4), num_layers})
    return {"full_attn_layers": mla, "kda_layers": [i for i in range(1, num_layers + 1) if i not in mla]}


def _k3_text(num_layers: int) -> dict[str, Any]:
    return _TEXT_COMMON | {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "hidden_act": "situ",
        "hidden_size": 256,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "gate_lower_bound": -5.0,
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 8192,
        "mla_use_output_gate": True,
        "num_hidden_layers": num_layers,
        "num_shared_experts": 2,
        "q_lora_rank": 64,
        "quantization_config": released_quantization(),
        "routed_expert_hidden_size": 128,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
    }


def _linear_text() -> dict[str, Any]:
    return _TEXT_COMMON | {
        "hidden_act": "silu",
        "hidden_size": 128,
        "linear_attn_config": {"head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4},
        "max_position_embeddings": 8192,
        "num_hidden_layers": 7,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "routed_scaling_factor": 2.446,
    }
