"""Which keys exist, as data: required, family-specific, constant, aliased."""

from typing import Any

OUTER_ARCHITECTURE = "KimiK3ForConditionalGeneration"
TEXT_ARCHITECTURE = "KimiLinearForCausalLM"

#: Keys of the outer Kimi K3 configuration without which text and images cannot be joined.
OUTER_REQUIRED = ("text_config", "vision_config", "media_placeholder_token_id", "pad_token_id")

TEXT_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "moe_router_activation_func",
    "moe_renormalize",
    "routed_scaling_factor",
    "use_grouped_topk",
    "num_expert_group",
    "topk_group",
    "first_k_dense_replace",
    "moe_layer_freq",
    "tie_word_embeddings",
    "max_position_embeddings",
)

#: Must be stated, but null is a statement (Kimi-Linear has no low-rank query).
TEXT_NULLABLE = ("q_lora_rank",)

#: Keys that only Kimi K3 has, with what their absence means for Kimi-Linear.
TEXT_K3_ONLY: dict[str, Any] = {
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "attn_res_block_size": None,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
}

#: Keys with one supported value. Those in TEXT_CONSTANTS_REQUIRED must be stated.
TEXT_CONSTANTS: dict[str, Any] = {
    "mla_use_nope": True,  # no rotary embedding anywhere in the text model
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,  # MTP layers were not released and are not supported
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
TEXT_CONSTANTS_REQUIRED = ("mla_use_nope",)

LINEAR_REQUIRED = ("num_heads", "head_dim", "short_conv_kernel_size", "kda_layers", "full_attn_layers")
LINEAR_K3_ONLY: dict[str, Any] = {"gate_lower_bound": None, "use_full_rank_gate": False}

VISION_REQUIRED = (
    "patch_size",
    "vt_num_hidden_layers",
    "vt_hidden_size",
    "vt_num_attention_heads",
    "qkv_hidden_size",
    "vt_intermediate_size",
    "init_pos_emb_height",
    "init_pos_emb_width",
    "init_pos_emb_time",
    "merge_kernel_size",
    "mm_hidden_size",
    "text_hidden_size",
    "projector_ln_eps",
)
#: Sizes that the patches [P, 3, 14, 14] and the projector's four patches a token are built on.
VISION_SIZES: dict[str, Any] = {"patch_size": 14, "merge_kernel_size": (2, 2)}
VISION_CONSTANTS: dict[str, Any] = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}

#: Spellings of other model families (and of older transformers), accepted where they agree with the released key.
ALIASES: dict[str, str] = {
    "num_experts_per_tok": "num_experts_per_token",
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "scoring_func": "moe_router_activation_func",
    "torch_dtype": "dtype",
}
