"""Several ranks and stages, emulated on a CPU by threads: what each loads, and that together they equal the whole.

The decoder runs with real layers, metadata and caches; only kernels are contracts. Collectives exchange between the
threads. Caches start full of NaN, so a slot that is read before it is written shows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from nvidia_support import (
    Group,
    bind_caches,
    build,
    fill,
    groups,
    one_prompt,
    our_model,
    random_prompts,
    run_ranks,
    settle,
)
from torch.nn import functional

from k3_core.checkpoint import CheckpointReader, Topology, tensor_table, write_tiny
from k3_core.checkpoint.slicing import shard_plan
from k3_core.contracts.norm import rms_norm
from k3_core.reference import load_model

LENGTH = 50
LOCK = threading.Lock()  # vLLM's current configuration is global


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with our_model():
        yield


@pytest.fixture(scope="module")
def thirteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 layers in blocks of 3: pipeline stages can end inside a block."""
    return write_tiny(tmp_path_factory.mktemp("k3-13"), "k3-13", seed=11)


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.tensor(random_prompts((LENGTH,), seed=2)[0])


class Whole:
    """The reference of a checkpoint, and its embedding, final norm and head."""

    def __init__(self, folder: Path) -> None:
        self.reader = CheckpointReader(folder)
        self.config = self.reader.config
        self.prefix = "" if self.config.is_kimi_linear else "language_model."
        self.logits = load_model(folder, torch.float32).logits

    def read(self, name: str) -> torch.Tensor:
        return self.reader.read(self.prefix + name).float()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.read("model.embed_tokens.weight")[ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(hidden, self.read("model.norm.weight"), self.config.text.rms_norm_eps)
        return functional.linear(normed, self.read("lm_head.weight"))


@pytest.fixture(scope="module")
def whole(nvidia_tiny: Path) -> Whole:
    return Whole(nvidia_tiny)


def forward(model: Any, hidden: torch.Tensor, received: Any = None) -> Any:
    from vllm.forward_context import set_forward_context

    bind_caches(model)
    metadata = one_prompt(model, hidden.shape[0])
    with torch.no_grad(), set_forward_context(metadata, model.vllm_config, slot_mapping={}):
        return model.model(hidden, received)


def settled(folder: Path, size: int = 1, **options: Any) -> Any:
    """A configuration for ``size`` ranks; the engine itself would need as many processes."""
    config = settle(folder, **options)
    config.parallel_config.tensor_parallel_size = size
    return config


def run(folder: Path, size: int, hidden: torch.Tensor, **extra: Any) -> tuple[list[torch.Tensor], Group]:
    """Hidden states of every rank of a tensor parallel run."""
    group = Group(size)
    with groups(group, Group()):
        configs = [settled(folder, size) for _ in range(size)]
        for config in configs:
            config.parallel_config.enable_expert_parallel = extra.get("expert_parallel", False)
            config.additional_config = {"k3_moe_reduction": extra["form"]} if "form" in extra else {}

        def work(rank: int) -> torch.Tensor:
            with LOCK:
                model = build(configs[rank], CheckpointReader(folder).config)
                fill(model)
            return model

        models = run_ranks(group, work)
        group.reduced.clear()
        from vllm.forward_context import set_forward_context

        for model in models:
            bind_caches(model)
        metadata = one_prompt(models[0], hidden.shape[0])
        with set_forward_context(metadata, configs[0], slot_mapping={}):

            def compute(rank: int) -> torch.Tensor:
                with torch.no_grad():
                    return models[rank].model(hidden.clone(), None)

            return run_ranks(group, compute), group


@pytest.mark.parametrize("form", ["merged", "sharded", "separate"])
def test_two_ranks_equal_one_in_every_reduction_form(
    form: str, nvidia_tiny: Path, whole: Whole, prompt: torch.Tensor
) -> None:
    results, group = run(nvidia_tiny, 2, whole.embed(prompt), form=form)
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(whole.head(results[0]), whole.logits(prompt), atol=2e-4, rtol=2e-4)
    text = whole.config.text
    hidden, latent = text.hidden_size, text.routed_expert_hidden_size
    moe = {"merged": [latent + hidden], "separate": [latent, hidden], "sharded": [latent, hidden]}[form]
    expected = [hidden, hidden] + ([hidden, *moe] * 4)  # a dense layer, then four with experts
    assert group.reduced == expected


def test_expert_parallel_ranks_equal_one(nvidia_tiny: Path, whole: Whole, prompt: torch.Tensor) -> None:
    results, _ = run(nvidia_tiny, 2, whole.embed(prompt), expert_parallel=True)
    torch.testing.assert_close(whole.head(results[0]), whole.logits(prompt), atol=2e-4, rtol=2e-4)


def test_two_ranks_of_kimi_linear_equal_one(nvidia_linear: Path, prompt: torch.Tensor) -> None:
    whole = Whole(nvidia_linear)
    results, _ = run(nvidia_linear, 2, whole.embed(prompt))
    torch.testing.assert_close(whole.head(results[0]), whole.logits(prompt), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("stages", [2, 3])
def test_pipeline_stages_that_end_inside_a_block_equal_the_whole(
    stages: int, thirteen: Path, prompt: torch.Tensor
) -> None:
    whole = Whole(thirteen)
    hidden, received, inside = whole.embed(prompt), None, False
    for rank in range(stages):
        with groups(Group(), Group(stages, rank)):
            model = build(settled(thirteen), whole.config)
            fill(model)
            if received is not None:
                empty = model.make_empty_intermediate_tensors(LENGTH, torch.float32, torch.device("cpu"))
                for name in ("hidden_states", "residual"):
                    assert empty[name].shape == received[name].shape
                    assert not empty[name].any()
                hidden = received["hidden_states"]
            received = forward(model, hidden, received)
            if rank < stages - 1:
                end = model.model.end_layer
                inside |= end % 3 > 0
                assert received["residual"].shape == (LENGTH, -(-end // 3), whole.config.text.hidden_size)
    assert inside, "a stage should end inside a block"
    torch.testing.assert_close(whole.head(received), whole.logits(prompt), atol=2e-4, rtol=2e-4)


def test_auxiliary_hidden_states_in_both_readings(thirteen: Path, prompt: torch.Tensor) -> None:
    from k3_core.contracts import attn_res

    whole = Whole(thirteen)
    with groups(Group(), Group()):
        model = build(settled(thirteen), whole.config)
        fill(model)
        model.set_aux_hidden_state_layers((0, 1, 3, 5, 13))
        embedded = whole.embed(prompt)
        readings = {}
        for stream in ("prefix", "attn_res"):
            model.model.aux_stream = stream
            out, readings[stream] = forward(model, embedded.clone())
            assert len(readings[stream]) == 5
            assert torch.equal(readings[stream][-1], out), "id num_layers is the output mix in both readings"
        assert torch.equal(readings["prefix"][0], embedded)
        assert torch.equal(readings["attn_res"][0], embedded), "without blocks the mix is the prefix itself"
        # layer 1 sees the embedding as block 0 and the first layer's two outputs as prefix
        layer = model.model.layers[1].self_attention_res
        bank = embedded.unsqueeze(1)
        mixed = attn_res.mix(bank, readings["prefix"][1], layer.norm_weight, layer.proj_weight, layer.eps)
        torch.testing.assert_close(readings["attn_res"][1], mixed, atol=1e-5, rtol=1e-5)
        # id 3: the prefix is the whole of block 1, not yet written
        assert not torch.allclose(readings["prefix"][2], readings["attn_res"][2])


@pytest.mark.parametrize("preset", ["nvidia_tiny", "nvidia_linear"])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1), (4, 2)])
def test_every_tensor_has_a_place_of_its_ranks_shape(
    preset: str, size: int, rank: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(preset)
    config = CheckpointReader(folder).config
    prefix = "" if config.is_kimi_linear else "language_model."
    if config.quantization is not None and size == 4:
        pytest.skip("four shards of width 64 would split an MXFP4 group")
    plan = shard_plan(config, Topology(tp_size=size, tp_rank=rank))
    with groups(Group(size, rank), Group()):
        places = build(settled(folder, size), config).destinations(prefix)
    names = {name for name in tensor_table(config) if name.startswith((f"{prefix}model.", f"{prefix}lm_head."))}
    experts = {name for name in names if ".experts." in name}
    assert names - experts == set(places.tensors)
    assert all(places.wants(name) for name in experts)
    shapes = {name: spec.shape for name, spec in tensor_table(config).items()}
    for name, place in places.tensors.items():
        full = shapes[name] if not name.endswith("A_log") else (config.text.linear_attn.num_heads,)
        assert tuple(place.shape) == plan[name].shape(full), name


def test_a_tensor_without_a_shard_is_named(nvidia_tiny: Path) -> None:
    from k3_core.errors import CheckpointError

    with groups(Group(), Group()):
        model = build(settled(nvidia_tiny), CheckpointReader(nvidia_tiny).config)
        places = model.destinations("language_model.")
    missing = places.missing()
    assert "language_model.model.layers.2.self_attn.A_log" in missing
    assert "language_model.model.layers.1.block_sparse_moe.experts.3" in missing
    with pytest.raises(CheckpointError, match=r"A_log.*shape"):
        places.put("language_model.model.layers.2.self_attn.A_log", torch.zeros(7))


def test_warm_up_runs_every_kind_of_step_and_leaves_the_caches_alone(nvidia_tiny: Path) -> None:
    from k3_nvidia import warmup
    from k3_nvidia.kda import KimiDeltaAttention

    limits = warmup.Limits(max_num_batched_tokens=80, max_num_seqs=4, num_spec=0)
    with groups(Group(), Group()):
        model = build(settled(nvidia_tiny), CheckpointReader(nvidia_tiny).config)
        fill(model)
    bind_caches(model)
    layer = next(m for m in model.modules() if isinstance(m, KimiDeltaAttention))
    before = [pool.clone() for pool in layer.kv_cache]
    warmup.WARM_UP.run_kda(layer, limits, torch.float32, torch.device("cpu"))
    for old, new in zip(before, layer.kv_cache, strict=True):
        assert old.isnan().equal(new.isnan())
        assert old.isnan().all()


def test_warm_up_covers_both_sides_of_every_edge(nvidia_tiny: Path) -> None:
    pytest.importorskip("triton")
    from k3_nvidia import dispatch, warmup

    config = CheckpointReader(nvidia_tiny).config
    limits = warmup.Limits(max_num_batched_tokens=8192, max_num_seqs=128, num_spec=0)
    counts = warmup.WARM_UP.token_counts(config, limits)
    assert counts[0] == 1
    assert counts[-1] == 8192
    for profiles in dispatch.warmup_profiles(config, limits).values():
        for profile in profiles:
            edge = profile.get("tokens", 1)
            assert edge in counts
            assert edge + 1 in counts or edge == 8192
    assert any(count % 16 for count in counts if count > 256)


@pytest.mark.parametrize(("ranks", "images"), [(8, 1), (2, 3), (4, 2)])
def test_images_encoded_by_several_ranks_equal_one(ranks: int, images: int, nvidia_tiny: Path) -> None:
    """Ranks without an image take part, and every rank gets all embeddings."""
    from k3_core.vllm.serving import loading, vision

    reader = CheckpointReader(nvidia_tiny)
    config = reader.config.vision
    assert config is not None
    sizes = [(4, 6), (2, 2), (8, 4)][:images]
    generator = torch.Generator().manual_seed(4)
    pixels = torch.randn(sum(h * w for h, w in sizes), 3, 14, 14, generator=generator)
    grids = torch.tensor([(1, h, w) for h, w in sizes])
    tower, projector = vision.VisionTower(config), vision.Projector(config)
    places = loading.Destinations()
    places.add("vision_tower.", tower.parts())
    places.add("mm_projector.", projector.parts())
    for name, tensor in reader.tensors(wanted=places.wants):
        places.put(name, tensor)
    assert not places.missing()
    with groups(Group(), Group()):
        whole = vision.encode(tower, projector, pixels, grids)
    assert [len(part) for part in whole] == [h * w // 4 for h, w in sizes]
    group = Group(ranks)
    with groups(group, Group()):
        results = run_ranks(group, lambda rank: vision.encode(tower, projector, pixels, grids))
    for parts in results:
        for got, want in zip(parts, whole, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
