"""The tensor table against the released table and against the headers of two checkpoints made by the released code."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from k3_core.checkpoint import TensorSpec, canonical_name, tensor_table
from k3_core.checkpoint.names import layer_of
from k3_core.checkpoint.table import a_log_length
from k3_core.checkpoint.tiny import shard_name, shard_of
from k3_core.config import load_config

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def k3():
    return load_config(DATA / "config" / "k3.json")


@pytest.fixture(scope="module")
def k3_table(k3):
    return tensor_table(k3)


NUMBERED = {"layers": "{L}", "blocks": "{B}", "experts": "{E}"}


def pattern(name):
    parts = name.split(".")
    return ".".join(NUMBERED.get(before, part) for before, part in zip(["", *parts], parts, strict=False))


def test_the_released_table(k3_table):
    counts, specs = Counter(), {}
    for name, spec in k3_table.items():
        key = pattern(name)
        counts[key] += 1
        assert specs.setdefault(key, spec) == spec, name
    with (DATA / "checkpoint" / "tensor_table.tsv").open() as file:
        rows = {row["name_pattern"]: row for row in csv.DictReader(file, delimiter="\t")}
    total = rows.pop("TOTAL")
    assert counts.keys() == rows.keys()
    for key, row in rows.items():
        assert list(specs[key].shape) == json.loads(row["shape"]), key
        assert specs[key].dtype_name == row["dtype"], key
        assert counts[key] == int(row["count"]), key
        assert specs[key].nbytes * counts[key] == int(row["total_bytes"]), key
    assert len(k3_table) == int(total["count"]) == 497_220
    assert sum(spec.nbytes for spec in k3_table.values()) == int(total["total_bytes"]) == 1_560_860_324_864


def test_f32_tensors_are_exactly_these(k3_table):
    f32 = {pattern(name).rsplit("{L}.", 1)[-1] for name, spec in k3_table.items() if spec.dtype == torch.float32}
    assert f32 == {
        "self_attn.A_log",
        "self_attn.dt_bias",
        "self_attn.q_conv1d.weight",
        "self_attn.k_conv1d.weight",
        "self_attn.v_conv1d.weight",
        "self_attn.o_norm.weight",
        "block_sparse_moe.gate.e_score_correction_bias",
    }


def stored(headers):
    """Expand the trimmed header file: name -> (shape, dtype name, shard number or None)."""
    for row in headers["tensors"]:
        for layer in row.get("layers", [None]):
            for expert in range(row.get("experts", 1)):
                name = row["name"].replace("{L}", str(layer)).replace("{E}", str(expert))
                shard = row.get("shard")
                if shard is not None and "language_model.model.layers" in name:
                    shard += layer
                yield name, tuple(row["shape"]), row["dtype"], shard


@pytest.mark.parametrize("model", ["k3_tiny", "kimi_linear_tiny"])
def test_headers_written_by_the_released_code(model):
    config = load_config(DATA / "config" / f"{model}.json")
    table = tensor_table(config)
    headers = json.loads((DATA / "checkpoint" / f"{model}_headers.json").read_text())
    names, total = set(), 0
    for name, shape, dtype, shard in stored(headers):
        spec = table[name]
        if not (model == "k3_tiny" and name.endswith(".A_log")):  # there stored with a tail of its own
            assert (spec.shape, spec.dtype_name) == (shape, dtype), name
        total += TensorSpec(shape, spec.dtype).nbytes
        names.add(name)
        if shard is not None:
            assert shard_of(name, config) + 1 == shard, name
    assert names == set(table)
    assert total == headers["total_size"]


def test_released_shard_names(k3):
    assert shard_name(0, k3) == "model-00001-of-000096.safetensors"
    assert shard_name(95, k3) == "model-00096-of-000096.safetensors"
    places = {
        "language_model.model.layers.92.mlp_res_norm.weight": 93,
        "language_model.model.embed_tokens.weight": 94,
        "language_model.lm_head.weight": 94,
        "language_model.model.output_attn_res_proj.weight": 94,
        "mm_projector.post_norm.weight": 95,
        "vision_tower.patch_embed.proj.weight": 96,
    }
    assert {name: shard_of(name, k3) + 1 for name in places} == places


def test_size_of_kimi_linear_48b():
    """The name says 48 billion parameters."""
    raw = json.loads((DATA / "config" / "kimi_linear_tiny.json").read_text())
    mla = [4, 8, 12, 16, 20, 24, 27]
    sizes = {
        "vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 9216, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
    }  # fmt: skip
    linear = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": mla}
    linear["kda_layers"] = [i for i in range(1, 28) if i not in mla]
    table = tensor_table(load_config(raw | sizes | {"linear_attn_config": linear}))
    assert len(table) == 20_493
    assert 48e9 < sum(spec.nbytes / spec.dtype.itemsize for spec in table.values()) < 49.5e9
    assert table["model.layers.0.self_attn.A_log"].shape == (1, 1, 32, 1)
    assert table["model.layers.3.self_attn.q_proj.weight"].shape == (6144, 2304)


def test_variants_of_the_configuration():
    raw = json.loads((DATA / "config" / "k3_tiny.json").read_text())
    text = raw["text_config"]
    plain = {**raw, "text_config": {k: v for k, v in text.items() if k != "quantization_config"}}
    table = tensor_table(load_config(plain))
    weight = table["language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight"]
    assert weight == TensorSpec((128, 64), torch.bfloat16)
    assert not any("weight_packed" in name for name in table)

    changed = text | {"latent_moe_use_norm": False, "mla_use_output_gate": False, "q_lora_rank": None}
    changed["linear_attn_config"] = text["linear_attn_config"] | {"use_full_rank_gate": False}
    table = tensor_table(load_config(changed | {"tie_word_embeddings": True}))
    assert "lm_head.weight" not in table
    assert table["model.layers.3.self_attn.q_proj.weight"].shape == (4 * 48, 256)
    assert "model.layers.3.self_attn.g_proj.weight" not in table
    assert table["model.layers.0.self_attn.g_b_proj.weight"].shape == (128, 32)
    assert not any("routed_expert_norm" in name or name.startswith("vision") for name in table)


def test_a_log_length():
    assert [a_log_length(n) for n in (1, 4, 6, 96, 128)] == [1, 4, 8, 128, 128]


OLDER = {
    "language_model.layers.3.self_attn.q_b_proj.weight": "language_model.model.layers.3.self_attn.q_b_proj.weight",
    "language_model.embed_tokens.weight": "language_model.model.embed_tokens.weight",
    "language_model.norm.weight": "language_model.model.norm.weight",
    "language_model.output_attn_res_proj.weight": "language_model.model.output_attn_res_proj.weight",
    "mm_projector.linear_1.weight": "mm_projector.proj.0.weight",
    "mm_projector.linear_2.weight": "mm_projector.proj.2.weight",
    "model.layers.0.mlp.gate_proj.weight": "language_model.model.layers.0.mlp.gate_proj.weight",
    "lm_head.weight": "language_model.lm_head.weight",
    "language_model.model.layers.1.mlp.gate.weight": "language_model.model.layers.1.block_sparse_moe.gate.weight",
    "language_model.model.layers.1.mlp.experts.7.w1.weight": (
        "language_model.model.layers.1.block_sparse_moe.experts.7.w1.weight_packed"
    ),
    "language_model.layers.1.block_sparse_moe.experts.7.w2.weight": (
        "language_model.model.layers.1.block_sparse_moe.experts.7.w2.weight_packed"
    ),
    "language_model.model.layers.1.mlp.shared_experts.up_proj.weight": (
        "language_model.model.layers.1.block_sparse_moe.shared_experts.up_proj.weight"
    ),
    "language_model.model.layers.1.mlp.routed_expert_up_proj.weight": (
        "language_model.model.layers.1.block_sparse_moe.routed_expert_up_proj.weight"
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_names(name, k3, k3_table):
    assert canonical_name(name, k3) == OLDER[name]
    assert OLDER[name] in k3_table
    assert canonical_name(OLDER[name], k3) == OLDER[name]


@pytest.mark.parametrize("model", ["k3_tiny", "kimi_linear_tiny"])
def test_released_names_are_their_own(model):
    config = load_config(DATA / "config" / f"{model}.json")
    for name in tensor_table(config):
        assert canonical_name(name, config) == name


def test_a_text_only_configuration_drops_the_prefix():
    raw = json.loads((DATA / "config" / "k3_tiny.json").read_text())
    inner, outer = load_config(raw["text_config"]), load_config(raw)
    outer_name = "language_model.model.layers.1.self_attn.A_log"
    assert canonical_name(outer_name, inner) == "model.layers.1.self_attn.A_log"
    assert canonical_name("nonsense.weight", inner) == "nonsense.weight"
    assert set(tensor_table(inner)) == {
        name.removeprefix("language_model.")
        for name in tensor_table(outer)
        if not name.startswith(("vision_tower.", "mm_projector."))
    }


def test_layer_of():
    assert layer_of("language_model.model.layers.17.mlp_res_norm.weight") == 17
    assert layer_of("model.layers.3.self_attn.A_log") == 3
    assert layer_of("vision_tower.encoder.blocks.3.wo.weight") is None
    assert layer_of("language_model.model.norm.weight") is None
