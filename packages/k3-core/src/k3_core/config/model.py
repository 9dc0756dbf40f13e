"""The configuration objects. Attribute names equal the released keys where such keys exist.

All of them are immutable, hashable and comparable by value. They are made by `k3_core.config.load_config`, which also
checks the relations between the values; constructing one by hand checks types and ranges only.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from k3_core.config.quantization import QuantizationConfig

#: Sizes of tensors and lengths: what an index of 32 bits reaches.
Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
#: Most layers or experts: they are written out one by one, so a damaged number must not fill the memory. The release
#: has 93 layers, 896 experts and 27 layers in the vision tower.
MAX_PIECES = 2**14
Pieces = Annotated[int, Field(gt=0, le=MAX_PIECES)]
NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Activation = Literal["situ", "silu"]
LayerKind = Literal["kda", "mla"]
Dtype = Literal["bfloat16", "float16", "float32"]

#: eps of q_a_layernorm and kv_a_layernorm: the released modules do not pass rms_norm_eps on (K3-SPEC 11.2).
LOW_RANK_NORM_EPS = 1e-6
#: eps of the vision tower's norms: torch's default for fp32 accumulation (K3-SPEC 7.3).
VISION_NORM_EPS = 2.0**-23


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class LinearAttnConfig(_Frozen):
    """Kimi Delta Attention (`linear_attn_config`). Layer numbers are 1-based, as released."""

    num_heads: Count
    head_dim: Count
    short_conv_kernel_size: Annotated[int, Field(ge=2)]
    gate_lower_bound: Annotated[float, Field(lt=0, allow_inf_nan=False)] | None
    use_full_rank_gate: bool
    kda_layers: tuple[Count, ...]
    full_attn_layers: tuple[Count, ...]

    @property
    def projection_size(self) -> int:
        """Width of each of the q, k, v and gate projections: num_heads * head_dim."""
        return self.num_heads * self.head_dim


class TextConfig(_Frozen):
    """The text model: `text_config` of Kimi K3, or the whole configuration of Kimi-Linear."""

    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Pieces
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    hidden_act: Activation
    activation_situ_beta: Positive | None
    activation_situ_linear_beta: Positive | None
    rms_norm_eps: Positive
    attn_res_block_size: Count | None
    q_lora_rank: Count | None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    mla_use_output_gate: bool
    num_experts: Pieces
    num_experts_per_token: Count
    num_shared_experts: NonNegative
    moe_intermediate_size: Count
    routed_expert_hidden_size: Count | None
    latent_moe_use_norm: bool
    moe_router_activation_func: Literal["sigmoid"]
    moe_renormalize: bool
    routed_scaling_factor: Positive
    use_grouped_topk: bool
    num_expert_group: Count
    topk_group: Count
    first_k_dense_replace: NonNegative
    moe_layer_freq: Count
    tie_word_embeddings: bool
    max_position_embeddings: Count
    linear_attn: LinearAttnConfig

    @property
    def low_rank_norm_eps(self) -> float:
        """eps of q_a_layernorm and kv_a_layernorm (1e-6, a constant of the released code)."""
        return LOW_RANK_NORM_EPS

    @property
    def qk_head_dim(self) -> int:
        """Width of one MLA query or key head: qk_nope_head_dim + qk_rope_head_dim."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expert_hidden_size(self) -> int:
        """Input and output width of a routed expert: the latent width, or hidden_size without latent experts."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared experts, which are one fused MLP; 0 without shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    def layer_kind(self, i: int) -> LayerKind:
        """ "kda" or "mla" for the 0-based layer `i`; IndexError outside 0..num_hidden_layers-1."""
        self._check_layer(i)
        return "kda" if i + 1 in self.linear_attn.kda_layers else "mla"

    def is_moe_layer(self, i: int) -> bool:
        """Whether the 0-based layer `i` has experts (otherwise a dense MLP); IndexError outside the model."""
        self._check_layer(i)
        return i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0

    def _check_layer(self, i: int) -> None:
        if not 0 <= i < self.num_hidden_layers:
            raise IndexError(f"layer {i} outside 0..{self.num_hidden_layers - 1}")


class VisionConfig(_Frozen):
    """MoonViT-V2 and the projector (`vision_config`)."""

    patch_size: Count
    vt_num_hidden_layers: Pieces
    vt_hidden_size: Count
    vt_num_attention_heads: Count
    qkv_hidden_size: Count
    vt_intermediate_size: Count
    init_pos_emb_height: Count
    init_pos_emb_width: Count
    init_pos_emb_time: Count
    merge_kernel_size: tuple[Count, Count]
    mm_hidden_size: Count
    text_hidden_size: Count
    projector_ln_eps: Positive

    @property
    def norm_eps(self) -> float:
        """eps of the tower's norms (2**-23, a constant; there is no key)."""
        return VISION_NORM_EPS

    @property
    def head_dim(self) -> int:
        """Width of one attention head: qkv_hidden_size / vt_num_attention_heads (not vt_hidden_size / heads)."""
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @property
    def merged_size(self) -> int:
        """Input width of the projector: mm_hidden_size times the patches merged into one token."""
        return self.mm_hidden_size * self.merge_kernel_size[0] * self.merge_kernel_size[1]


class K3Config(_Frozen):
    """A whole model. `vision` is None for a text-only configuration, `quantization` for plain weights."""

    architecture: Literal["KimiK3ForConditionalGeneration", "KimiLinearForCausalLM"]
    text: TextConfig
    vision: VisionConfig | None
    quantization: QuantizationConfig | None
    media_placeholder_token_id: NonNegative | None
    image_placeholder: str | None
    bos_token_id: NonNegative | None
    eos_token_id: NonNegative | None
    pad_token_id: NonNegative | None
    dtype: Dtype

    @property
    def is_kimi_linear(self) -> bool:
        """Whether this is the Kimi-Linear family (ordinary residuals, tensor names without `language_model.`)."""
        return self.text.attn_res_block_size is None

    def is_packed(self, name: str) -> bool:
        """Whether tensor or module `name` is stored as packed MXFP4 in this checkpoint."""
        return self.quantization is not None and self.quantization.is_packed(name)

    def to_dict(self) -> dict[str, Any]:
        """The configuration in the released layout (nested for K3, flat for text-only), ready for `config.json`."""
        from k3_core.config.released import to_released

        return to_released(self)
