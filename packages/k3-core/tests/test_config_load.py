"""load_config: the released files, their parts, aliases, other spellings, and the way back."""

import copy
import json
from pathlib import Path

import pytest

from k3_core.config import K3Config, load_config
from k3_core.config.quantization import is_routed_expert, released_quantization
from k3_core.errors import ConfigError

DATA = Path(__file__).parent / "data" / "config"


def raw(name):
    return json.loads((DATA / f"{name}.json").read_text())


def kimi_linear_48b():
    """Kimi-Linear-48B-A3B as its public description gives it."""
    mla = [4, 8, 12, 16, 20, 24, 27]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "head_dim": 72,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 9216,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
        "model_max_length": 1048576,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "kda_layers": [i for i in range(1, 28) if i not in mla],
            "full_attn_layers": mla,
        },
    }


def test_released_k3():
    config = load_config(DATA / "k3.json")
    text, vision = config.text, config.vision
    assert config.architecture == "KimiK3ForConditionalGeneration"
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)
    assert config.media_placeholder_token_id == 163605
    assert config.dtype == "bfloat16"
    assert not config.is_kimi_linear
    mla = [i for i in range(93) if text.layer_kind(i) == "mla"]
    assert mla == [*range(3, 92, 4), 92]  # 91 and 92 both: no modulus gives this
    assert [i for i in range(93) if not text.is_moe_layer(i)] == [0]
    assert (text.hidden_act, text.activation_situ_beta, text.activation_situ_linear_beta) == ("situ", 4.0, 25.0)
    assert (text.routed_expert_hidden_size, text.expert_hidden_size, text.shared_intermediate_size) == (
        3584,
        3584,
        6144,
    )
    assert text.linear_attn.gate_lower_bound == -5.0
    assert text.linear_attn.projection_size == 12288
    assert text.low_rank_norm_eps == 1e-6
    assert text.qk_head_dim == 192
    assert vision is not None
    assert (vision.head_dim, vision.merged_size, vision.norm_eps) == (128, 4096, 2.0**-23)
    assert vision.merge_kernel_size == (2, 2)


def test_kimi_linear_48b():
    config = load_config(kimi_linear_48b())
    text = config.text
    assert config.is_kimi_linear
    assert config.vision is None
    assert config.quantization is None
    assert config.media_placeholder_token_id is None
    assert [i for i in range(27) if text.layer_kind(i) == "mla"] == [3, 7, 11, 15, 19, 23, 26]
    assert (text.attn_res_block_size, text.q_lora_rank, text.routed_expert_hidden_size) == (None, None, None)
    assert text.expert_hidden_size == 2304
    assert text.linear_attn.gate_lower_bound is None
    assert not text.linear_attn.use_full_rank_gate
    assert not text.mla_use_output_gate
    assert text.max_position_embeddings == 1048576
    assert not config.is_packed("model.layers.1.block_sparse_moe.experts.0.w1.weight")


@pytest.mark.parametrize("name", ["k3", "k3_tiny"])
def test_outer_and_inner_give_the_same_text_model(name):
    outer, inner = load_config(raw(name)), load_config(raw(name)["text_config"])
    assert inner.text == outer.text
    assert inner.quantization == outer.quantization
    assert (inner.vision, inner.architecture) == (None, "KimiLinearForCausalLM")
    assert (inner.eos_token_id, inner.dtype) == (outer.eos_token_id, outer.dtype)


@pytest.mark.parametrize("name", ["k3", "k3_tiny", "kimi_linear_tiny"])
def test_round_trip_in_the_released_layout(name):
    config, source = load_config(DATA / f"{name}.json"), raw(name)
    written = config.to_dict()
    json.dumps(written)
    assert load_config(written) == config

    def is_part_of(part, whole):
        for key, value in part.items():
            if isinstance(value, dict):
                is_part_of(value, whole[key])
            elif key != "max_position_embeddings" or key in whole:
                assert whole[key] == value, key

    is_part_of(written, source)


def test_folder_file_mapping_and_object_are_accepted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw("k3_tiny")))

    class Pretrained:
        def __init__(self, values):
            self.values = values

        def to_dict(self):
            return self.values

    nested = raw("k3_tiny") | {"text_config": Pretrained(raw("k3_tiny")["text_config"])}
    config = load_config(tmp_path)
    for source in (str(tmp_path), tmp_path / "config.json", raw("k3_tiny"), Pretrained(nested), config):
        assert load_config(source) == config
    assert isinstance(config, K3Config)
    assert hash(config) == hash(load_config(tmp_path))


def test_what_transformers_classes_add_is_accepted():
    """Serving engines' classes spell every default out, drop `architectures` and turn lists into tuples."""
    linear = raw("kimi_linear_tiny")
    added = {
        "attn_res_block_size": None,
        "activation_situ_beta": None,
        "activation_situ_linear_beta": None,
        "routed_expert_hidden_size": None,
        "latent_moe_use_norm": False,
        "mla_use_output_gate": False,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "topk_method": "noaux_tc",
        "architectures": None,
        "transformers_version": "5.19.0",
        "_name_or_path": "somewhere",
    }
    assert load_config(linear | added) == load_config(linear)
    k3 = raw("k3_tiny")
    k3["vision_config"] |= {"merge_kernel_size": (2, 2), "video_attn_type": "spatial_temporal", "hidden_size": 64}
    k3["text_config"] |= {"head_dim": 64, "rope_parameters": {"rope_theta": 10000.0}, "architectures": None}
    k3["quantization_config"] = copy.deepcopy(k3["text_config"]["quantization_config"])
    assert load_config(k3).text == load_config(raw("k3_tiny")).text


@pytest.mark.parametrize(
    ("alias", "key"),
    [
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_routed_experts", "num_experts"),
        ("num_local_experts", "num_experts"),
        ("n_shared_experts", "num_shared_experts"),
        ("n_group", "num_expert_group"),
        ("norm_topk_prob", "moe_renormalize"),
        ("scoring_func", "moe_router_activation_func"),
        ("torch_dtype", "dtype"),
    ],
)
def test_aliases(alias, key):
    expected = load_config(raw("kimi_linear_tiny"))
    only = raw("kimi_linear_tiny")
    only[alias] = only.pop(key)
    assert load_config(only) == expected
    both = raw("kimi_linear_tiny")
    both[alias] = both[key]
    assert load_config(both) == expected
    both[alias] = "float32" if key == "dtype" else 7
    with pytest.raises(ConfigError, match=rf"{key} = .* contradicts its alias {alias}"):
        load_config(both)


def test_layer_numbers_outside_the_model_are_refused():
    text = load_config(raw("k3_tiny")).text
    for i in (-1, 13):
        with pytest.raises(IndexError):
            text.layer_kind(i)
        with pytest.raises(IndexError):
            text.is_moe_layer(i)


def test_moe_layer_freq():
    source = raw("kimi_linear_tiny") | {"first_k_dense_replace": 2, "moe_layer_freq": 3}
    text = load_config(source).text
    assert [i for i in range(7) if text.is_moe_layer(i)] == [3, 6]


def test_immutable():
    config = load_config(raw("k3_tiny"))
    with pytest.raises(ValueError, match="frozen"):
        config.text.hidden_size = 1


# The quantisation trap: the ignore list does not match these, yet none of them is packed.
TRAP = (
    "language_model.model.layers.3.block_sparse_moe.gate.weight",
    "language_model.model.layers.3.block_sparse_moe.routed_expert_down_proj.weight",
    "language_model.model.layers.3.block_sparse_moe.routed_expert_up_proj.weight",
    "language_model.model.layers.3.self_attention_res_proj.weight",
    "language_model.model.layers.3.mlp_res_proj.weight",
    "language_model.model.output_attn_res_proj.weight",
)
PACKED = (
    "language_model.model.layers.3.block_sparse_moe.experts.0.w1.weight_packed",
    "language_model.model.layers.3.block_sparse_moe.experts.895.w2.weight_scale",
    "model.layers.3.block_sparse_moe.experts.17.w3",
    "model.layers.3.block_sparse_moe.experts",
    "model.layers.3.mlp.experts.0.w2",
    "model.layers.3.block_sparse_moe.experts.w13",
)
PLAIN = (
    "language_model.model.layers.3.block_sparse_moe.shared_experts.gate_proj.weight",
    "language_model.model.layers.3.block_sparse_moe.shared_experts",
    "language_model.model.layers.0.mlp.gate_proj.weight",
    "language_model.model.layers.3.self_attn.q_proj.weight",
    "language_model.lm_head.weight",
    "language_model.model.layers.3.block_sparse_moe.experts.0.w4.weight_packed",
    "language_model.model.layers.3.block_sparse_moe.experts_norm",
    "vision_tower.encoder.blocks.0.wqkv.weight",
    "mm_projector.proj.0.weight",
)


def test_only_routed_experts_are_packed():
    config = load_config(raw("k3"))
    for name in PACKED:
        assert config.is_packed(name), name
        assert config.quantization.is_packed(name)
    for name in (*TRAP, *PLAIN):
        assert not config.is_packed(name), name
        assert not is_routed_expert(name)


def quantised(value, where):
    source = raw("k3_tiny")
    del source["text_config"]["quantization_config"]
    (source if where == "top" else source["text_config"])["quantization_config"] = value
    return source


@pytest.mark.parametrize("where", ["top", "text"])
@pytest.mark.parametrize(
    "value",
    [
        released_quantization(),
        released_quantization() | {"quant_method": "mxfp4"},
        {"quant_method": "mxfp4"},
        {"quant_method": "mxfp4", "format": "mxfp4-pack-quantized"},
    ],
    ids=["released", "rewritten", "bare", "bare-with-format"],
)
def test_quantisation_is_found_at_both_levels_and_in_both_spellings(value, where):
    config = load_config(quantised(value, where))
    assert config == load_config(raw("k3_tiny"))
    assert config.quantization.group_size == 32


def test_both_levels_may_differ_by_the_rewrite_only():
    source = quantised(released_quantization(), "text")
    source["quantization_config"] = {"quant_method": "mxfp4"}
    assert load_config(source).quantization is not None
    source["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match=r"^quantization_config.quant_method = 'fp8'"):
        load_config(source)


def test_unquantised_k3_is_accepted():
    source = raw("k3_tiny")
    del source["text_config"]["quantization_config"]
    config = load_config(source)
    assert config.quantization is None
    assert not config.is_packed(PACKED[0])
