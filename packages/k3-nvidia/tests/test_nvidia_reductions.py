"""The table of MoE reductions, the distribution of images over ranks, and the registry of operators."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from nvidia_support import Group, build, groups, our_model, run_ranks

from k3_core.checkpoint import CheckpointReader
from k3_core.errors import ConfigError, UnsupportedError
from k3_core.operators import CallSpec
from k3_core.vllm.serving import reductions, vision
from k3_core.vllm.serving.dispatch import CONTRACT
from k3_core.vllm.serving.vision import assign
from k3_core.vllm.testing.ranks import settled
from k3_nvidia import dispatch

USUAL = reductions.Facts(ranks=8, latent=True, shared=True, hidden=7168)


def test_every_form_says_why_it_was_not_taken() -> None:
    assert {name: why for name, _, why in reductions.table(USUAL) if why} == {"none": "8 ranks hold partial sums"}
    one = reductions.table(dataclasses.replace(USUAL, ranks=1))
    assert [name for name, _, why in one if why is None] == ["none"]


@pytest.mark.parametrize(
    ("changes", "form", "refused"),
    [
        ({}, "merged", []),
        ({"ranks": 1}, "none", ["merged", "sharded", "adaptive", "separate"]),
        ({"shared": False}, "separate", ["merged", "sharded", "adaptive"]),
        ({"latent": False}, "merged", ["sharded", "adaptive"]),
        ({"sequence_parallel": True}, "separate", ["merged", "sharded", "adaptive"]),
        ({"micro_batches": True}, "merged", ["sharded", "adaptive"]),
        ({"ranks": 6, "hidden": 256}, "merged", ["sharded", "adaptive"]),
        ({"on_cpu": True}, "merged", ["adaptive"]),
    ],
)
def test_conditions_of_the_forms(changes: dict, form: str, refused: list[str]) -> None:
    facts = dataclasses.replace(USUAL, **changes)
    assert reductions.choose(facts) == form
    for name in refused:
        with pytest.raises(ConfigError, match=name):
            reductions.choose(facts, name)


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({"peer_sums": True}, "sharded"),
        ({}, "adaptive"),
        ({"ranks": 1, "peer_sums": True}, "none"),
        ({"ranks": 6, "hidden": 256, "peer_sums": True}, "merged"),
        ({"shared": False, "peer_sums": True}, "separate"),
        ({"latent": False}, "merged"),
    ],
)
def test_on_gpus_that_were_measured_a_rank_up_projects_its_share(changes: dict, form: str) -> None:
    assert reductions.choose(dataclasses.replace(USUAL, nvidia=True, **changes)) == form


def test_peers_are_asked_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sum over peers, made for the group and not switched off; no group, no peers."""
    for own, want in ((None, False), (SimpleNamespace(disabled=True), False), (SimpleNamespace(disabled=False), True)):
        group = SimpleNamespace(device_communicator=SimpleNamespace(ca_comm=own))
        monkeypatch.setattr(reductions, "get_tp_group", lambda group=group: group)
        assert reductions._peer_sums() == want
    monkeypatch.setattr(reductions, "get_tp_group", lambda: SimpleNamespace(device_communicator=None))
    assert not reductions._peer_sums()
    monkeypatch.undo()
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", None)
    assert not reductions._peer_sums()


def test_the_facts_of_a_worker_decide(monkeypatch: pytest.MonkeyPatch, nvidia_tiny: Path) -> None:
    """The platform and the group reach the choice."""
    text, vllm_config = CheckpointReader(nvidia_tiny).config.text, settled(nvidia_tiny, 2)
    for cuda, peers, form in ((True, True, "sharded"), (True, False, "adaptive"), (False, True, "merged")):
        platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda cuda=cuda: cuda)
        monkeypatch.setattr(reductions, "current_platform", platform)
        monkeypatch.setattr(reductions, "_peer_sums", lambda peers=peers: peers)
        assert reductions.choose(reductions.facts(text, vllm_config)) == form


def test_a_latent_that_ranks_cannot_share_evenly_is_not_gathered() -> None:
    for ranks, evenly in ((2, True), (7, True), (3, False), (12, False)):
        facts = dataclasses.replace(USUAL, ranks=ranks, width=3584)
        assert facts.gathers == evenly
        assert not dataclasses.replace(facts, latent=False).gathers


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize(
    ("form", "gathers"), [("merged", False), ("separate", False), ("sharded", True), ("adaptive", True)]
)
def test_which_layers_gather_their_latent(
    form: str, gathers: bool, on_cpu: bool, nvidia_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that cut the up projection, where rows of a weight can be viewed, from so many tokens on."""
    facts = reductions.facts
    monkeypatch.setattr(reductions, "facts", lambda *args: dataclasses.replace(facts(*args), on_cpu=on_cpu))
    if on_cpu and form == "adaptive":
        pytest.skip("refused on a CPU")
    group = Group(2)

    def layer(rank: int) -> Any:
        with our_model():
            vllm_config = settled(nvidia_tiny, 2)
            vllm_config.additional_config = {"k3_moe_reduction": form}
            model = build(vllm_config, CheckpointReader(nvidia_tiny).config)
        return next(m for _, m in model.model.own_layers() if m.is_moe).feed_forward

    with groups(group, Group()):
        layers = run_ranks(group, layer)
    for found in layers:
        assert found.latent_by_ranks(reductions.GATHER_TOKENS) == (gathers and not on_cpu)
        assert not found.latent_by_ranks(reductions.GATHER_TOKENS - 1)


def test_an_unknown_form_is_named() -> None:
    with pytest.raises(ConfigError, match="'ring' is unknown"):
        reductions.choose(USUAL, "ring")


def test_the_norm_is_not_applied_to_partial_sums() -> None:
    """A mutant that norms before it sums: the formula notices."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(4, 8, generator=generator) for _ in range(2)]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    assert not torch.allclose(norm(parts[0]) + norm(parts[1]), norm(parts[0] + parts[1]), atol=0.1)


@pytest.mark.parametrize("cut_from", [1, 10**6], ids=["cut", "whole"])
def test_the_adaptive_form_sums_as_the_merged_one(
    cut_from: int, nvidia_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer's sums over two ranks, in both halves of the form; what a rank computed is given."""
    facts = reductions.facts
    monkeypatch.setattr(reductions, "facts", lambda *args: dataclasses.replace(facts(*args), on_cpu=False))
    monkeypatch.setattr(reductions, "SHARD_TOKENS", cut_from)
    monkeypatch.setattr(reductions, "GATHER_TOKENS", cut_from)
    config = CheckpointReader(nvidia_tiny).config
    latent, hidden = config.text.routed_expert_hidden_size, config.text.hidden_size
    generator = torch.Generator().manual_seed(3)
    partial = [[torch.randn(5, n, generator=generator) for n in (latent, hidden)] for _ in range(2)]
    weight = torch.randn(hidden, latent, generator=generator)

    def layer(rank: int, form: str) -> Any:
        with our_model():
            vllm_config = settled(nvidia_tiny, 2)
            vllm_config.additional_config = {"k3_moe_reduction": form}
            model = build(vllm_config, config)
        found = next(m for _, m in model.model.own_layers() if m.is_moe).feed_forward
        assert found.form == form
        found._finish.up = reductions._Slice(weight)
        found._finish.norm = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        found.partial = lambda x: tuple(part.clone() for part in partial[rank])
        assert found.latent_by_ranks(5) == (form == "adaptive" and cut_from == 1)
        assert not found.latent_by_ranks(cut_from - 1)
        return found

    def summed(form: str) -> tuple[list[torch.Tensor], list[int]]:
        group = Group(2)
        with groups(group, Group()):
            layers = run_ranks(group, lambda rank: layer(rank, form))
            group.reduced.clear()
            return run_ranks(group, lambda rank: layers[rank](torch.zeros(5, hidden))), group.reduced

    (first, second), reduced = summed("adaptive")
    (want, _), merged = summed("merged")
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want, rtol=1e-5, atol=1e-4)
    assert merged == [latent + hidden]
    assert reduced == ([latent, hidden] if cut_from == 1 else merged)


def test_a_latent_computed_by_ranks_is_the_whole_one() -> None:
    """In the order of the ranks: a mutant that gathers in another order has other columns."""
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(4, 6, generator=generator), torch.randn(8, 6, generator=generator)
    group = Group(2)
    with groups(group, Group()):
        found = run_ranks(group, lambda rank: reductions.gathered(x, weight, rank, 2))
        swapped = run_ranks(group, lambda rank: reductions.gathered(x, weight, 1 - rank, 2))
    for latent in found:
        torch.testing.assert_close(latent, x @ weight.t())
    assert not torch.allclose(swapped[0], x @ weight.t(), atol=0.1)


@pytest.mark.parametrize(
    ("patches", "ranks"), [([4096], 8), ([10, 20, 30], 2), ([5] * 9, 4), ([], 3), ([100, 1, 1, 1], 2)]
)
def test_images_are_spread_over_ranks_each_exactly_once(patches: list[int], ranks: int) -> None:
    owners = assign(patches, ranks)
    assert len(owners) == ranks
    assert sorted(item for items in owners for item in items) == list(range(len(patches)))
    if patches:
        loads = [sum(patches[i] for i in items) for items in owners]
        assert max(loads) <= sum(patches) / ranks + max(patches)


def test_plain_vision_attention_off_a_cpu_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[object, ...]] = []
    monkeypatch.setattr(vision.logger, "warning", lambda *args: said.append(args))
    vision._say_plain.cache_clear()
    for device in ("cpu", "meta", "meta"):
        x = torch.zeros(5, 2, 4, device=device)
        assert vision.attend_by_item(x, x, x, [2, 3]).shape == x.shape
    assert [args[1:] for args in said] == [("meta",)]
    vision._say_plain.cache_clear()


def test_contracts_never_run_on_a_gpu() -> None:
    for name in ("attn_res", "kda_decode", "kda_prefill", "experts"):
        contract = next(i for i in dispatch.registry().implementations(name) if i.name == CONTRACT)
        ok, why = contract.supports(CallSpec(name, "cuda", torch.bfloat16, "sm_90"))
        assert not ok
        assert "cuda" in why


def test_what_no_kernel_supports_is_refused_with_all_reasons() -> None:
    spec = CallSpec("kda_decode", "cuda", torch.bfloat16, "sm_90", {"N": 6, "D": 48})
    with pytest.raises(UnsupportedError, match="kda_decode"):
        dispatch.registry().choose(spec)


def test_released_shapes_have_a_kernel_on_hopper() -> None:
    pytest.importorskip("triton")
    calls = {
        "attn_res": ({"H": 7168, "M": 8}, {}),
        "short_conv": ({"N": 6, "D": 128, "W": 4}, {}),
        "kda_prefill": ({"N": 6, "D": 128, "K": 128, "V": 128}, {"lower_bound": -5.0}),
        "gated_norm": ({"N": 6, "D": 128}, {}),
        "kda_decode": ({"N": 6, "D": 128}, {}),
        "kda_verify": ({"N": 6, "D": 128, "Q": 8}, {}),
        "route": ({"A": 896, "X": 16}, {}),
        "experts": ({"L": 3584, "I": 192, "X": 16, "A": 896}, {"quantised": True, "hidden_act": "situ"}),
        "situ": ({"I": 384}, {}),
    }
    for name, (sizes, options) in calls.items():
        choice = dispatch.registry().choose(CallSpec(name, "cuda", torch.bfloat16, "sm_90", sizes, options))
        assert choice.implementation.name == dispatch.KERNEL
