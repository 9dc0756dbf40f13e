"""Weights go straight to their final place: experts one by one into the kernels' layout, routing values untouched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from nvidia_support import VENDOR, our_model

from k3_core.checkpoint import CheckpointReader, Topology
from k3_core.checkpoint.slicing import shard_plan
from k3_core.operators import CallSpec
from k3_core.vllm.serving.experts import RoutedExperts
from k3_core.vllm.testing.suite_load import MOE, LoadSuite, load
from k3_nvidia import dispatch


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


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.parametrize(("size", "rank", "whole"), [(1, 0, True), (2, 1, False), (2, 1, True)])
def test_packed_experts_keep_every_byte(size: int, rank: int, whole: bool, nvidia_tiny: Path) -> None:
    """Into the kernels' layout and back; cut along their width, or whole experts by expert parallelism."""
    from k3_nvidia.kernels.moe_layout import unpack_expert

    model = load(VENDOR, nvidia_tiny, size, rank, expert_parallel=whole and size > 1)
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


class TestLoad(LoadSuite):
    vendor = VENDOR
