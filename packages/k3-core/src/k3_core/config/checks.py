"""Relations between values that types alone cannot state. Each check raises ConfigError naming key and value."""

from collections import Counter

from k3_core.config import keys
from k3_core.config.model import K3Config, TextConfig, VisionConfig
from k3_core.errors import ConfigError


def check_relations(config: K3Config, path: str) -> None:
    """Check everything; `path` is "text_config." for the outer configuration and "" for a text-only one."""
    text = config.text
    _check_layer_lists(text, path)
    _check_family(text, path)
    _check_attention(text, path)
    _check_experts(text, path)
    if config.quantization is not None:
        _check_groups(text, config.quantization.group_size, path)
    if config.vision is not None:
        _check_vision(config.vision, text)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"):
        value = getattr(config, key)
        if value is not None and value >= text.vocab_size:
            raise ConfigError(f"{key} = {value}: outside the vocabulary ({path}vocab_size = {text.vocab_size})")


def _check_layer_lists(text: TextConfig, path: str) -> None:
    linear, n = text.linear_attn, text.num_hidden_layers
    path += "linear_attn_config."
    for key in ("kda_layers", "full_attn_layers"):
        layers = getattr(linear, key)
        beyond = [i for i in layers if i > n]
        if beyond:
            raise ConfigError(
                f"{path}{key} names layer(s) {_few(beyond)}, but num_hidden_layers = {n} (layer numbers are 1-based)"
            )
        twice = sorted(i for i, times in Counter(layers).items() if times > 1)
        if twice:
            raise ConfigError(f"{path}{key} names layer(s) {_few(twice)} more than once")
    both = sorted(set(linear.kda_layers) & set(linear.full_attn_layers))
    if both:
        raise ConfigError(f"{path}kda_layers and {path}full_attn_layers both name layer(s) {_few(both)}")
    neither = sorted(set(range(1, n + 1)) - set(linear.kda_layers) - set(linear.full_attn_layers))
    if neither:
        raise ConfigError(
            f"{path}kda_layers and {path}full_attn_layers leave out layer(s) {_few(neither)} of "
            f"1..{n} (num_hidden_layers = {n})"
        )


def _check_family(text: TextConfig, path: str) -> None:
    if text.first_k_dense_replace > text.num_hidden_layers:
        raise ConfigError(
            f"{path}first_k_dense_replace = {text.first_k_dense_replace}: more than num_hidden_layers = "
            f"{text.num_hidden_layers}"
        )


def _check_attention(text: TextConfig, path: str) -> None:
    if text.num_key_value_heads != text.num_attention_heads:
        raise ConfigError(
            f"{path}num_key_value_heads = {text.num_key_value_heads}: MLA expands its latent to as many heads as "
            f"queries, so it must equal num_attention_heads = {text.num_attention_heads}"
        )


def _check_experts(text: TextConfig, path: str) -> None:
    experts, groups, top = text.num_experts, text.num_expert_group, text.num_experts_per_token
    if top > experts:
        raise ConfigError(f"{path}num_experts_per_token = {top}: more than num_experts = {experts}")
    if experts % groups:
        raise ConfigError(f"{path}num_expert_group = {groups}: does not divide num_experts = {experts}")
    if text.topk_group > groups:
        raise ConfigError(f"{path}topk_group = {text.topk_group}: more than num_expert_group = {groups}")
    if groups == 1:
        return
    if not text.use_grouped_topk:
        raise ConfigError(f"{path}use_grouped_topk = False contradicts num_expert_group = {groups}")
    size = experts // groups
    if size < 2:
        raise ConfigError(
            f"{path}num_expert_group = {groups}: leaves {size} expert a group, but a group is scored by its best two"
        )
    if top > text.topk_group * size:
        raise ConfigError(
            f"{path}num_experts_per_token = {top}: more than the {text.topk_group * size} experts of topk_group = "
            f"{text.topk_group} groups of {size}"
        )


def _check_groups(text: TextConfig, group: int, path: str) -> None:
    widths = {"moe_intermediate_size": text.moe_intermediate_size}
    if text.routed_expert_hidden_size is not None:
        widths["routed_expert_hidden_size"] = text.routed_expert_hidden_size
    else:
        widths["hidden_size"] = text.hidden_size
    for key, value in widths.items():
        if value % group:
            raise ConfigError(f"{path}{key} = {value}: MXFP4 needs a multiple of its group size {group}")


def _check_vision(vision: VisionConfig, text: TextConfig) -> None:
    for key, expected in keys.VISION_SIZES.items():
        if getattr(vision, key) != expected:
            raise ConfigError(f"vision_config.{key} = {getattr(vision, key)}: only {expected} is supported")
    if vision.text_hidden_size != text.hidden_size:
        raise ConfigError(
            f"vision_config.text_hidden_size = {vision.text_hidden_size}: must equal text_config.hidden_size = "
            f"{text.hidden_size}"
        )
    if vision.mm_hidden_size != vision.vt_hidden_size:
        raise ConfigError(
            f"vision_config.mm_hidden_size = {vision.mm_hidden_size}: must equal vt_hidden_size = "
            f"{vision.vt_hidden_size} (the tower has no output projection)"
        )
    heads = vision.vt_num_attention_heads
    if vision.qkv_hidden_size % heads:
        raise ConfigError(
            f"vision_config.qkv_hidden_size = {vision.qkv_hidden_size}: not a multiple of vt_num_attention_heads = "
            f"{heads}"
        )
    if vision.head_dim % 4:
        raise ConfigError(
            f"vision_config.qkv_hidden_size = {vision.qkv_hidden_size}: head width {vision.head_dim} must be a "
            f"multiple of 4, because the 2-D rotary embedding turns pairs for two axes"
        )
    if vision.vt_hidden_size % 2:
        raise ConfigError(
            f"vision_config.vt_hidden_size = {vision.vt_hidden_size}: must be even (sine and cosine halves of the "
            f"time table)"
        )


def _few(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:6]))
    return shown if len(layers) <= 6 else f"{shown}, ... ({len(layers)} in all)"
