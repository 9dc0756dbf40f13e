"""TP/EP parts: sizes of the real model, the parts of all ranks partition every tensor, widths and padding."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_core.checkpoint import (
    Topology,
    check_topology,
    expert_range,
    expert_width,
    normalize_a_log,
    pad_expert,
    quantise_mxfp4,
    shard_plan,
    tensor_shard,
    tensor_table,
    tiny_config,
    tp_sizes,
    unpack_mxfp4,
    vocab_range,
)
from k3_core.checkpoint.slicing import NOTHING, WHOLE, Shard
from k3_core.config import load_config
from k3_core.errors import CheckpointError, ConfigError

DATA = Path(__file__).parent / "data" / "config"
K3 = load_config(DATA / "k3.json")
DIVISORS_OF_96 = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]


def released_shapes():
    """Released widths with one layer of each kind and few experts, so that every rank's plan is quick to make."""
    raw = json.loads((DATA / "k3.json").read_text())
    raw["text_config"] |= {"num_hidden_layers": 4, "num_experts": 14, "num_experts_per_token": 2}
    raw["text_config"]["linear_attn_config"] |= {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    return load_config(raw)


SHORT = released_shapes()
LINEAR = tiny_config("linear")


def test_tp_sizes_of_k3_are_the_divisors_of_96():
    assert tp_sizes(K3) == DIVISORS_OF_96
    for tp in range(1, 97):
        if tp in DIVISORS_OF_96:
            check_topology(K3, Topology(tp_size=tp, tp_rank=tp - 1))
        else:
            with pytest.raises(ConfigError, match=rf"size {tp} does not divide num_attention_heads = 96.*1, 2, 3, 4"):
                check_topology(K3, Topology(tp_size=tp))


@pytest.mark.parametrize(
    ("tp", "ep", "dp", "expected"),
    [
        (1, 1, 1, (3072, 3072)),
        (2, 1, 1, (1536, 1536)),
        (8, 1, 1, (384, 384)),
        (12, 1, 1, (256, 256)),
        (16, 1, 1, (192, 256)),
        (32, 1, 1, (96, 256)),
        (96, 1, 1, (32, 256)),
        (8, 1, 2, (192, 256)),
        (1, 1, 16, (192, 256)),
        (1, 8, 8, (3072, 3072)),
        (16, 16, 1, (3072, 3072)),
        (8, 64, 8, (3072, 3072)),
    ],
)
def test_expert_width_of_k3(tp, ep, dp, expected):
    assert expert_width(K3, tp, ep, dp) == expected


def test_expert_width_floor_and_refusals():
    assert expert_width(K3, 16, floor=128) == (192, 192)
    assert expert_width(K3, 32, floor=128) == (96, 128)
    assert expert_width(LINEAR, 4) == (16, 256)  # not packed: no group to split
    with pytest.raises(ConfigError, match=r"5 expert shards .* do not divide moe_intermediate_size = 3072"):
        expert_width(K3, 5)
    with pytest.raises(ConfigError, match="splits an MXFP4 group of 32"):
        expert_width(K3, 96, dp=2)
    with pytest.raises(ConfigError, match="tp = 0"):
        expert_width(K3, 0)


def test_parts_of_the_real_model_at_tp8():
    """Sizes per rank that public deployments list for TP8."""
    plan = shard_plan(SHORT, Topology(tp_size=8, tp_rank=3))
    table = tensor_table(SHORT)
    layer, mla = "language_model.model.layers.1.", "language_model.model.layers.3."
    expected = {
        layer + "self_attn.q_proj.weight": (1536, 7168),
        layer + "self_attn.g_proj.weight": (1536, 7168),
        layer + "self_attn.k_conv1d.weight": (1536, 1, 4),
        layer + "self_attn.f_a_proj.weight": (128, 7168),
        layer + "self_attn.f_b_proj.weight": (1536, 128),
        layer + "self_attn.b_proj.weight": (12, 7168),
        layer + "self_attn.dt_bias": (1536,),
        layer + "self_attn.A_log": (12,),
        layer + "self_attn.o_norm.weight": (128,),
        layer + "self_attn.o_proj.weight": (7168, 1536),
        mla + "self_attn.q_a_proj.weight": (1536, 7168),
        mla + "self_attn.q_b_proj.weight": (2304, 1536),
        mla + "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        mla + "self_attn.kv_b_proj.weight": (3072, 512),
        mla + "self_attn.g_proj.weight": (1536, 7168),
        "language_model.model.layers.0.mlp.up_proj.weight": (4224, 7168),
        "language_model.model.layers.0.mlp.down_proj.weight": (7168, 4224),
        layer + "block_sparse_moe.gate.weight": (14, 7168),
        layer + "block_sparse_moe.routed_expert_up_proj.weight": (7168, 3584),
        layer + "block_sparse_moe.shared_experts.gate_proj.weight": (768, 7168),
        layer + "block_sparse_moe.shared_experts.down_proj.weight": (7168, 768),
        layer + "block_sparse_moe.experts.5.w1.weight_packed": (384, 1792),
        layer + "block_sparse_moe.experts.5.w3.weight_scale": (384, 112),
        layer + "block_sparse_moe.experts.5.w2.weight_packed": (3584, 192),
        layer + "block_sparse_moe.experts.5.w2.weight_scale": (3584, 12),
        "language_model.model.embed_tokens.weight": (20480, 7168),
        "language_model.lm_head.weight": (20480, 7168),
        "vision_tower.encoder.blocks.0.wqkv.weight": (4608, 1024),  # 12 heads do not divide by 8
        "mm_projector.proj.0.weight": (4096, 4096),
        layer + "mlp_res_proj.weight": (1, 7168),
    }
    assert {name: plan[name].shape(table[name].shape) for name in expected} == expected
    assert plan[layer + "self_attn.A_log"].ranges == ((36, 48),)
    assert plan[layer + "block_sparse_moe.experts.5.w2.weight_packed"].ranges == ((576, 768),)


def test_vision_is_cut_by_head_where_the_heads_divide():
    name = "vision_tower.encoder.blocks.0.wqkv.weight"
    assert tensor_shard(name, (4608, 1024), K3, Topology(4, 1)).ranges == ((384, 768), (1920, 2304), (3456, 3840))
    assert tensor_shard(name, (4608, 1024), K3, Topology(4, 1, vision_data_parallel=True)) is WHOLE
    assert tensor_shard(name, (4608, 1024), K3, Topology(16, 1)) is WHOLE


@pytest.mark.parametrize("config", [SHORT, LINEAR], ids=["k3", "linear"])
def test_older_names_get_the_same_part(config):
    topology = Topology(2, 1)
    older = "language_model.layers.1.mlp.experts.3.w1.weight"
    plan = shard_plan(config, topology)
    name = next(n for n in plan if ".layers.1." in n and "experts.3.w1.weight" in n and not n.endswith("_scale"))
    assert tensor_shard(older, tensor_table(config)[name].shape, config, topology) == plan[name]


def assert_partition(name, shape, parts):
    """The parts are either whole on every rank, or disjoint and together everything."""
    if all(part.is_whole for part in parts):
        return
    assert not any(part.is_whole for part in parts), name
    (dim,) = {part.dim for part in parts}
    covered = sorted(span for part in parts for span in part.ranges)
    position = 0
    for start, stop in covered:
        assert start == position < stop, name
        position = stop
    assert position == shape[dim], name


@pytest.mark.parametrize(
    "parts",
    [
        [Shard(0, ((0, 3),)), Shard(0, ((3, 5),))],  # rows lost
        [Shard(0, ((0, 4),)), Shard(0, ((3, 6),))],  # rows twice
        [Shard(0, ((0, 2),)), Shard(0, ((3, 6),))],  # a gap
        [Shard(0, ((0, 3),)), Shard(1, ((2, 4),))],  # another dimension
        [WHOLE, Shard(0, ((3, 6),))],
    ],
)
def test_the_partition_check_catches_mutants(parts):
    assert_partition("good", (6, 4), [Shard(0, ((0, 3),)), Shard(0, ((3, 6),))])
    with pytest.raises((AssertionError, ValueError)):
        assert_partition("bad", (6, 4), parts)


@pytest.mark.parametrize("tp", DIVISORS_OF_96)
def test_tp_parts_partition_every_tensor(tp):
    table = tensor_table(SHORT)
    plans = [shard_plan(SHORT, Topology(tp, rank)) for rank in range(tp)]
    for name, spec in table.items():
        shape = (96,) if name.endswith(".A_log") else spec.shape  # normalised
        if tp == 1 and name.endswith(".A_log"):
            assert plans[0][name].ranges == ((0, 96),)
            continue
        assert_partition(name, shape, [plan[name] for plan in plans])
        if name.endswith(("w2.weight_packed", "w2.weight_scale")) and tp > 1:
            group = 16 if name.endswith("packed") else 1
            assert all(start % group == 0 for plan in plans for start, _ in plan[name].ranges), "cut inside a group"


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (1, 4), (4, 8)])
def test_experts_are_cut_over_tp_times_dp(tp, dp):
    plans = [
        shard_plan(SHORT, Topology(tp, t, dp_size=dp, dp_rank=d)) for d in range(dp) for t in range(tp)
    ]  # fmt: skip
    width = expert_width(SHORT, tp, dp=dp)[0]
    for name, spec in tensor_table(SHORT).items():
        if ".experts." in name:
            assert_partition(name, spec.shape, [plan[name] for plan in plans])
            if name.endswith("w1.weight_packed"):
                assert [plan[name].ranges for plan in plans] == [
                    ((r * width, (r + 1) * width),) for r in range(tp * dp)
                ]


@pytest.mark.parametrize("ep", range(1, 15))
def test_ep_gives_every_expert_to_one_rank(ep):
    ranges = [expert_range(SHORT, ep, rank) for rank in range(ep)]
    assert [e for r in ranges for e in r] == list(range(14))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    if ep == 1:
        return
    plans = [shard_plan(SHORT, Topology(ep_size=ep, ep_rank=rank)) for rank in range(ep)]
    for name in tensor_table(SHORT):
        parts = [plan[name] for plan in plans]
        if ".experts." in name:
            assert sorted(part.is_whole for part in parts) == [False] * (ep - 1) + [True]
            assert all(part.is_whole or part.is_empty for part in parts)
        else:
            assert all(part.is_whole or name.endswith(".A_log") for part in parts)


def test_k3_experts_over_ep():
    assert expert_range(K3, 8, 7) == range(784, 896)
    assert expert_range(K3, 896, 895) == range(895, 896)
    with pytest.raises(ConfigError, match="exceeds num_experts = 896"):
        check_topology(K3, Topology(ep_size=897))


@settings(max_examples=200, deadline=None)
@given(vocab=st.integers(1, 200_000), tp=st.integers(1, 96))
def test_vocabulary_parts(vocab, tp):
    ranges = [vocab_range(vocab, tp, rank) for rank in range(tp)]
    assert ranges[0].start == 0
    assert ranges[-1].stop == vocab
    assert all(a.stop == b.start for a, b in pairwise(ranges))
    assert len(ranges[0]) == max(map(len, ranges))


@pytest.mark.parametrize(
    "bad", [{"tp_rank": 1}, {"tp_size": 0}, {"ep_size": 2, "ep_rank": 2}, {"dp_size": 2, "dp_rank": -1}]
)
def test_a_rank_outside_its_group(bad):
    with pytest.raises(ConfigError, match=r"expected 0 <= rank < size"):
        Topology(**bad)


def test_heads_of_a_tiny_model_bound_tp():
    assert tp_sizes(tiny_config("k3")) == [1, 2, 4]
    with pytest.raises(ConfigError, match="sizes that do: 1, 2, 4"):
        check_topology(tiny_config("k3"), Topology(8))


def test_taking_parts():
    tensor = torch.arange(24).reshape(6, 4)
    assert torch.equal(WHOLE.take(tensor), tensor)
    assert NOTHING.take(tensor).shape == (0, 4)
    assert torch.equal(Shard(1, ((2, 4),)).take(tensor), tensor[:, 2:])
    two = Shard(0, ((0, 1), (4, 6)))
    assert torch.equal(two.take(tensor), tensor[[0, 4, 5]])
    assert two.shape((6, 4)) == (3, 4)
    assert NOTHING.is_empty
    assert not NOTHING.is_whole


def test_a_log_part_of_the_padded_tensor():
    stored = torch.cat((torch.arange(1.0, 97.0), torch.zeros(32)))
    heads = normalize_a_log(stored, 96)
    part = tensor_shard("language_model.model.layers.0.self_attn.A_log", (128,), K3, Topology(32, 31))
    assert part.take(heads).tolist() == [94.0, 95.0, 96.0]


@pytest.mark.parametrize("part", ["w1", "w3", "w2"])
def test_padding_of_packed_experts_contributes_nothing(part):
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(5))
    packed, scale = quantise_mxfp4(weight)
    padded = pad_expert(part, {"weight_packed": packed, "weight_scale": scale}, 256)
    values = unpack_mxfp4(padded["weight_packed"], padded["weight_scale"])
    expected = torch.zeros(64, 256) if part == "w2" else torch.zeros(256, 96)
    expected[:64, :96] = unpack_mxfp4(packed, scale)
    assert torch.equal(values, expected)
    assert int(padded["weight_scale"].max()) < 255
    again = pad_expert(part, padded, 256)
    assert all(torch.equal(again[key], padded[key]) for key in padded)


def test_padding_of_plain_experts_and_refusals():
    weight = torch.ones(3, 5)
    assert torch.equal(pad_expert("w1", {"weight": weight}, 4)["weight"], torch.tensor([[1.0] * 5] * 3 + [[0.0] * 5]))
    assert pad_expert("w2", {"weight": weight}, 7)["weight"].sum(0).tolist() == [3.0] * 5 + [0.0] * 2
    with pytest.raises(CheckpointError, match="exceeds the padded width 4"):
        pad_expert("w2", {"weight": weight}, 4)
    with pytest.raises(CheckpointError, match="cannot pad"):
        pad_expert("w4", {"weight": weight}, 8)
    with pytest.raises(CheckpointError, match="multiple of the MXFP4 group"):
        pad_expert("w1", dict.fromkeys(("weight_packed", "weight_scale"), torch.zeros(1, 1, dtype=torch.uint8)), 40)
