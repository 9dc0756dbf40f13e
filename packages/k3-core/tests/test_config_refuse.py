"""load_config refuses, with one ConfigError naming key and value, whatever would shape the arithmetic wrongly."""

import contextlib
import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_core.config import load_config
from k3_core.config.quantization import released_quantization
from k3_core.errors import ConfigError

DATA = Path(__file__).parent / "data" / "config"
K3 = json.loads((DATA / "k3.json").read_text())
LINEAR = json.loads((DATA / "kimi_linear_tiny.json").read_text())

#: Keys of the released files that describe generation, training or the file itself, not the arithmetic.
BOILER_PLATE = {
    "_attn_implementation", "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "head_dim", "ignore_index", "image_placeholder", "initializer_range", "model_type", "num_nextn_predict_layers",
    "pad_token_id", "quantization_config", "rope_scaling", "rope_theta", "tie_word_embeddings", "topk_method",
    "use_cache",
}  # fmt: skip
SHAPING_TEXT = {
    "activation_situ_beta", "activation_situ_linear_beta", "attn_res_block_size", "first_k_dense_replace", "hidden_act",
    "hidden_size", "intermediate_size", "kv_lora_rank", "latent_moe_use_norm", "linear_attn_config",
    "max_position_embeddings", "mla_use_nope", "mla_use_output_gate", "moe_intermediate_size", "moe_layer_freq",
    "moe_renormalize", "moe_router_activation_func", "num_attention_heads", "num_expert_group", "num_experts",
    "num_experts_per_token", "num_hidden_layers", "num_key_value_heads", "num_shared_experts", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "rms_norm_eps", "routed_expert_hidden_size", "routed_scaling_factor",
    "tie_word_embeddings", "topk_group", "use_grouped_topk", "v_head_dim", "vocab_size",
}  # fmt: skip


def at(source, path):
    for key in path.split(".")[:-1]:
        source = source[key]
    return source, path.split(".")[-1]


def without(source, path):
    changed = copy.deepcopy(source)
    parent, key = at(changed, path)
    del parent[key]
    return changed


def with_value(source, path, value):
    changed = copy.deepcopy(source)
    parent, key = at(changed, path)
    parent[key] = value
    return changed


REQUIRED_K3 = [
    *(f"text_config.{key}" for key in sorted(SHAPING_TEXT)),
    *(f"text_config.linear_attn_config.{key}" for key in K3["text_config"]["linear_attn_config"]),
    *(f"vision_config.{key}" for key in K3["vision_config"] if key not in BOILER_PLATE),
    "text_config",
    "vision_config",
    "media_placeholder_token_id",
    "pad_token_id",
    "model_type",
]


@pytest.mark.parametrize("path", REQUIRED_K3)
def test_a_missing_key_of_k3_is_named(path):
    source = without(K3, path)
    if path == "pad_token_id":
        source = without(source, "text_config.pad_token_id")
    with pytest.raises(ConfigError) as error:
        load_config(source)
    assert path in str(error.value)
    assert "missing" in str(error.value)


@pytest.mark.parametrize("key", sorted(SHAPING_TEXT))
def test_a_missing_key_of_the_inner_configuration_is_named(key):
    """Also when K3's text configuration stands alone: it must not pass for Kimi-Linear, which lacks these keys."""
    with pytest.raises(ConfigError, match=rf"^{key} is missing"):
        load_config(without(K3["text_config"], key))


@pytest.mark.parametrize(
    "key",
    sorted(
        key
        for key in LINEAR
        if key not in BOILER_PLATE - {"tie_word_embeddings", "model_type"} and key != "model_max_length"
    ),
)
def test_a_missing_key_of_kimi_linear_is_named(key):
    with pytest.raises(ConfigError, match=rf"^{key} is missing"):
        load_config(without(LINEAR, key))


@pytest.mark.parametrize("key", sorted(SHAPING_TEXT - {"q_lora_rank"}))
def test_null_is_not_a_value(key):
    with pytest.raises(ConfigError, match=rf"text_config\.{key} is (null|missing)"):
        load_config(with_value(K3, f"text_config.{key}", None))


def test_missing_context_length_of_kimi_linear():
    with pytest.raises(ConfigError, match="max_position_embeddings is missing"):
        load_config(without(LINEAR, "model_max_length"))


def test_missing_dtype():
    source = without(without(K3, "dtype"), "text_config.dtype")
    with pytest.raises(ConfigError, match=r"dtype is missing"):
        load_config(source)


T, L, V = "text_config.", "text_config.linear_attn_config.", "vision_config."
KDA, MLA = (K3["text_config"]["linear_attn_config"][k] for k in ("kda_layers", "full_attn_layers"))
CONTRADICTIONS = {
    "layers-uncovered": (L + "kda_layers", KDA[:-1], "leave out layer(s) 91 of 1..93"),
    "layers-overlap": (L + "kda_layers", [*KDA, 93], "both name layer(s) 93"),
    "layers-beyond": (L + "full_attn_layers", [*MLA, 94], "names layer(s) 94, but num_hidden_layers = 93"),
    "layers-twice": (L + "full_attn_layers", [*MLA, 93], "names layer(s) 93 more than once"),
    "layers-0-based": (L + "kda_layers", [i - 1 for i in KDA], "kda_layers.0 = 0"),
    "layers-number": (L + "kda_layers", 69, "expected a list of 1-based layer numbers"),
    "layers-text": (L + "kda_layers", ["1"], "kda_layers.0 = '1'"),
    "huge-layers": (T + "num_hidden_layers", 10**9, "num_hidden_layers = 1000000000: Input should be less than"),
    "huge-experts": (T + "num_experts", 10**12, "num_experts = 1000000000000: Input should be less than"),
    "huge-tower": (V + "vt_num_hidden_layers", 10**9, "vt_num_hidden_layers = 1000000000: Input should be less than"),
    "huge-width": (T + "moe_intermediate_size", 2**31, "moe_intermediate_size = 2147483648: Input should be less"),
    "fewer-layers": (T + "num_hidden_layers", 92, "full_attn_layers names layer(s) 93"),
    "more-layers": (T + "num_hidden_layers", 94, "leave out layer(s) 94"),
    "kv-heads": (T + "num_key_value_heads", 8, "num_key_value_heads = 8"),
    "heads": (T + "num_attention_heads", 64, "num_attention_heads = 64"),
    "activation": (T + "hidden_act", "gelu", "hidden_act = 'gelu': unknown activation"),
    "activation-silu": (T + "hidden_act", "silu", "hidden_act = 'silu' contradicts"),
    "top-k": (T + "num_experts_per_token", 897, "num_experts_per_token = 897: more than num_experts = 896"),
    "top-k-zero": (T + "num_experts_per_token", 0, "num_experts_per_token = 0"),
    "groups": (T + "num_expert_group", 5, "num_expert_group = 5: does not divide num_experts = 896"),
    "topk-group": (T + "topk_group", 2, "topk_group = 2: more than num_expert_group = 1"),
    "router": (T + "moe_router_activation_func", "softmax", "moe_router_activation_func = 'softmax'"),
    "topk-method": (T + "topk_method", "greedy", "topk_method = 'greedy'"),
    "rope": (T + "mla_use_nope", False, "mla_use_nope = False: only True"),
    "mtp": (T + "num_nextn_predict_layers", 1, "num_nextn_predict_layers = 1: only 0"),
    "latent-group": (T + "routed_expert_hidden_size", 3600, "routed_expert_hidden_size = 3600: MXFP4 needs a multiple"),
    "width-group": (T + "moe_intermediate_size", 3080, "moe_intermediate_size = 3080: MXFP4 needs a multiple"),
    "dense-layers": (T + "first_k_dense_replace", 94, "first_k_dense_replace = 94"),
    "negative-size": (T + "hidden_size", -7168, "hidden_size = -7168"),
    "text-size": (T + "hidden_size", "7168", "hidden_size = '7168'"),
    "float-size": (T + "hidden_size", 7168.0, "hidden_size = 7168.0"),
    "bool-size": (T + "num_shared_experts", True, "num_shared_experts = True"),
    "eps-zero": (T + "rms_norm_eps", 0.0, "rms_norm_eps = 0.0"),
    "eps-nan": (T + "rms_norm_eps", float("nan"), "rms_norm_eps = nan"),
    "bound-positive": (L + "gate_lower_bound", 5.0, "gate_lower_bound = 5.0"),
    "kernel-one": (L + "short_conv_kernel_size", 1, "short_conv_kernel_size = 1"),
    "linear-type": (T + "linear_attn_config", [1], "linear_attn_config = [1]"),
    "vision-hidden": (V + "text_hidden_size", 2304, "text_hidden_size = 2304: must equal text_config.hidden_size"),
    "vision-mm": (V + "mm_hidden_size", 512, "mm_hidden_size = 512: must equal vt_hidden_size"),
    "vision-heads": (V + "vt_num_attention_heads", 7, "qkv_hidden_size = 1536: not a multiple"),
    "vision-head-odd": (V + "qkv_hidden_size", 12 * 126, "head width 126 must be a multiple of 4"),
    "vision-merge": (V + "merge_kernel_size", [2], "merge_kernel_size"),
    "vision-merge-size": (V + "merge_kernel_size", [4, 4], "vision_config.merge_kernel_size = (4, 4): only (2, 2)"),
    "vision-patch": (V + "patch_size", 16, "vision_config.patch_size = 16: only 14 is supported"),
    "text-model-type": (T + "model_type", "llama", "text_config.model_type = 'llama': expected 'kimi_linear'"),
    "vision-act": (V + "activation_func", "gelu", "vision_config.activation_func = 'gelu'"),
    "vision-bias": (V + "attn_bias", True, "vision_config.attn_bias = True"),
    "vision-projector": (V + "mm_projector_type", "mlp", "mm_projector_type = 'mlp'"),
    "media-id": ("media_placeholder_token_id", 163840, "media_placeholder_token_id = 163840: outside the vocabulary"),
    "pad-differs": ("pad_token_id", 1, "pad_token_id = 1 contradicts text_config.pad_token_id = 163839"),
    "tie-differs": ("tie_word_embeddings", True, "tie_word_embeddings = True contradicts"),
    "dtype-differs": ("dtype", "float16", "dtype = 'float16' contradicts text_config.dtype"),
    "architecture": ("architectures", ["LlamaForCausalLM"], "architectures = ['LlamaForCausalLM']"),
    "model-type": ("model_type", "llama", "model_type = 'llama': expected 'kimi_k3'"),
    "text-type": ("text_config", 3, "text_config = 3: expected an object"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_names_key_and_value(case):
    path, value, expected = CONTRADICTIONS[case]
    with pytest.raises(ConfigError) as error:
        load_config(with_value(K3, path, value))
    message = str(error.value)
    assert expected in message
    assert "\n" not in message


def test_grouped_routing():
    good = with_value(with_value(LINEAR, "num_expert_group", 4), "topk_group", 2)
    assert load_config(good).text.num_expert_group == 4
    for key, value, expected in (
        ("num_experts_per_token", 5, "num_experts_per_token = 5: more than the 4 experts of topk_group = 2"),
        ("num_expert_group", 8, "leaves 1 expert a group"),
        ("use_grouped_topk", False, "use_grouped_topk = False contradicts num_expert_group = 4"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(with_value(good, key, value))
        assert expected in str(error.value)


QUANTISATION = {
    "method": ("quant_method", "fp8"),
    "no-method": ("quant_method", None),
    "format": ("format", "nvfp4-pack-quantized"),
    "kv-cache": ("kv_cache_scheme", {"num_bits": 8}),
    "no-groups": ("config_groups", {}),
    "group-size": ("config_groups.group_0.weights.group_size", 16),
    "bits": ("config_groups.group_0.weights.num_bits", 8),
    "type": ("config_groups.group_0.weights.type", "int"),
    "asymmetric": ("config_groups.group_0.weights.symmetric", False),
    "activations": ("config_groups.group_0.input_activations", {"num_bits": 8}),
    "targets": ("config_groups.group_0.targets", ["Conv2d"]),
    "group-format": ("config_groups.group_0.format", "pack-quantized"),
    "zero-point": ("config_groups.group_0.weights.zp_dtype", "torch.uint8"),
    "no-weights": ("config_groups.group_0.weights", None),
}


@pytest.mark.parametrize("case", QUANTISATION)
def test_another_quantisation_is_refused(case):
    key, value = QUANTISATION[case]
    source = with_value(K3, "text_config.quantization_config", released_quantization())
    source = with_value(source, f"text_config.quantization_config.{key}", value)
    with pytest.raises(ConfigError) as error:
        load_config(source)
    assert "text_config.quantization_config." + key.removesuffix(".weights") in str(error.value)


def test_two_quantisation_groups_are_refused():
    value = released_quantization()
    value["config_groups"]["group_1"] = value["config_groups"]["group_0"]
    with pytest.raises(ConfigError, match="2 groups"):
        load_config(with_value(K3, "text_config.quantization_config", value))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path)
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    unreadable = [(text, "cannot be read as JSON") for text in ("{", deep)]
    for text, expected in (*unreadable, ("[]", "expected a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=expected):
            load_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read \(.*check the path"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="expected an object"):
        load_config(7)
    with pytest.raises(ConfigError, match="null byte"):
        load_config("\0")


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
PATHS = [*REQUIRED_K3, *(f"text_config.quantization_config.{key}" for key in released_quantization())]


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), value=JUNK)
def test_any_value_anywhere_is_accepted_or_refused_by_configerror(path, value):
    """Never another exception, whatever stands in a file."""
    with contextlib.suppress(ConfigError):
        load_config(with_value(K3, path, value))
