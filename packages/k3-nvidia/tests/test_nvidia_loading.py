"""Weights go straight to their final place: experts one by one into the kernels' layout, routing values untouched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from nvidia_support import Group, build, fill, groups, our_model, settle

from k3_core.checkpoint import CheckpointReader, Topology
from k3_core.checkpoint.slicing import shard_plan
from k3_core.operators import CallSpec
from k3_core.vllm.serving.experts import RoutedExperts
from k3_core.vllm.serving.outer import load as load_weights
from k3_nvidia import dispatch

MOE = "language_model.model.layers.{}.block_sparse_moe"


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with our_model():
        yield


@pytest.fixture
def for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers choose what they would choose on an H200; nothing is launched while weights load on a CPU."""
    pytest.importorskip("triton")

    def on_hopper(name: str, dtype: Any, sizes: Any, options: Any = None, want: str | None = None) -> Any:
        spec = CallSpec(name, "cuda", dtype, "sm_90", dict(sizes), dict(options or {}))
        return dispatch.registry().choose(spec, want).implementation

    monkeypatch.setattr(dispatch, "choose", on_hopper)


def load(folder: Path, size: int = 1, rank: int = 0, dtype: str = "bfloat16", expert_parallel: bool = False) -> Any:
    with groups(Group(size, rank), Group()):
        config = settle(folder, dtype=dtype)
        config.parallel_config.tensor_parallel_size = size
        config.parallel_config.enable_expert_parallel = expert_parallel
        model = build(config, CheckpointReader(folder).config)
        fill(model)
    return model


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.parametrize(("size", "rank", "whole"), [(1, 0, True), (2, 1, False), (2, 1, True)])
def test_packed_experts_keep_every_byte(size: int, rank: int, whole: bool, nvidia_tiny: Path) -> None:
    """Into the kernels' layout and back; cut along their width, or whole experts by expert parallelism."""
    from k3_nvidia.kernels.moe_layout import unpack_expert

    model = load(nvidia_tiny, size, rank, expert_parallel=whole and size > 1)
    reader = CheckpointReader(nvidia_tiny)
    topology = Topology(tp_size=size, tp_rank=rank)
    plan = shard_plan(reader.config, topology)
    experts: RoutedExperts = model.model.layers[2].feed_forward.experts
    assert experts.ids == (range(4, 8) if whole and size > 1 else range(8))
    for expert in experts.ids:
        got = unpack_expert(experts.weights(), expert - experts.ids.start)
        for matrix, part in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            for kind, tensor in zip(("weight_packed", "weight_scale"), got[part], strict=True):
                name = f"{MOE.format(2)}.experts.{expert}.{matrix}.{kind}"
                want = reader.read(name) if whole else plan[name].take(reader.read(name))
                assert torch.equal(tensor, want), name


def test_no_more_than_one_expert_waits_for_its_other_tensors(
    nvidia_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []
    honest = RoutedExperts.put

    def counted(self: RoutedExperts, *args: Any) -> None:
        honest(self, *args)
        waiting.append(len(self._pending))

    monkeypatch.setattr(RoutedExperts, "put", counted)
    load(nvidia_tiny)
    assert max(waiting) == 1
    assert waiting[-1] == 0


def test_values_that_routing_and_states_depend_on_stay_fp32(nvidia_tiny: Path) -> None:
    """A bias of 1 + 2^-12 does not survive bfloat16; neither would gates and convolutions."""
    model, reader = load(nvidia_tiny), CheckpointReader(nvidia_tiny)
    router = model.model.layers[1].feed_forward.gate
    bias = reader.read(f"{MOE.format(1)}.gate.e_score_correction_bias")
    assert router.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(router.e_score_correction_bias, bias)
    kda = model.model.layers[0].self_attn
    for name, parameter in kda.named_parameters():
        if name in ("A_log", "dt_bias", "conv_weight", "o_norm_weight"):
            assert parameter.dtype == torch.float32, name
    stored = reader.read("language_model.model.layers.0.self_attn.k_conv1d.weight")
    assert torch.equal(kda.conv_weight[kda.width : 2 * kda.width], stored.squeeze(1))


def test_no_parameter_is_left_as_it_was_allocated(nvidia_tiny: Path) -> None:
    with groups(Group(), Group()):
        config = settle(nvidia_tiny, dtype="float32")
        model = build(config, CheckpointReader(nvidia_tiny).config)
        for _, parameter in model.named_parameters():
            parameter.data.fill_(float("nan"))
        for layer in model.model.layers:  # rows of padding, which no tensor fills
            layer.self_attn.in_proj.weight.data[layer.self_attn.rows.total :] = 0
        load_weights(model, model, iter(()), {})
    assert not [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
