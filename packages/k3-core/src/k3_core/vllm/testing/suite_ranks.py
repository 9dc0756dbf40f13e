"""Several ranks and stages of a vendor's model: what each loads, and that together they equal the whole.

The decoder runs with real layers, metadata and caches; only kernels are contracts. Ranks are threads that exchange what
collectives would; caches start full of NaN, so a slot that is read before it is written shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from k3_core.checkpoint import CheckpointReader, Topology, tensor_table, write_tiny
from k3_core.checkpoint.slicing import shard_plan
from k3_core.contracts import attn_res
from k3_core.errors import CheckpointError
from k3_core.vllm.testing.ranks import (
    Group,
    Whole,
    bind_caches,
    build,
    fill,
    forward,
    groups,
    run,
    run_ranks,
    settled,
)
from k3_core.vllm.testing.vendor import Vendor, random_prompts

LENGTH = 50
CLOSE: dict[str, Any] = {
    "atol": 2e-4,
    "rtol": 2e-4,
}  # fp32 against fp32, twice the drift between two orders of summation


class VendorSuite:
    """Fixtures of all suites."""

    vendor: ClassVar[Vendor]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def acting(cls) -> Iterator[None]:
        """The vendor's model is the one that vLLM loads."""
        with cls.vendor.acting():
            yield

    @pytest.fixture(scope="class")
    @classmethod
    def tiny(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A random 5-layer Kimi K3 whose KDA states last for hundreds of tokens: a lost state shows."""
        return write_tiny(tmp_path_factory.mktemp("k3"), "k3", seed=3, long_memory=True)

    @pytest.fixture(scope="class")
    @classmethod
    def linear(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A random 7-layer Kimi-Linear with long memory."""
        return write_tiny(tmp_path_factory.mktemp("linear"), "linear", seed=5, long_memory=True)


class RankSuite(VendorSuite):
    """Tensor, expert and pipeline parallelism; auxiliary states; places of tensors; warm-up; images over ranks."""

    @pytest.fixture(scope="class")
    @classmethod
    def thirteen(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """13 layers in blocks of 3: pipeline stages can end inside a block."""
        return write_tiny(tmp_path_factory.mktemp("k3-13"), "k3-13", seed=11)

    @pytest.fixture(scope="class")
    @classmethod
    def prompt(cls) -> torch.Tensor:
        """Ids of one prompt."""
        return torch.tensor(random_prompts((LENGTH,), seed=2)[0])

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, tiny: Path) -> Whole:
        """The reference of the tiny Kimi K3."""
        return Whole(tiny)

    def one_rank(self, folder: Path, **options: Any) -> Any:
        """A loaded model on one rank."""
        with groups(Group(), Group()):
            model = build(self.vendor, settled(folder, **options), CheckpointReader(folder).config)
            fill(model)
        return model

    @pytest.mark.parametrize("form", ["merged", "sharded", "separate"])
    def test_two_ranks_equal_one_in_every_reduction_form(
        self, form: str, tiny: Path, whole: Whole, prompt: torch.Tensor
    ) -> None:
        results, group = run(self.vendor, tiny, 2, whole.embed(prompt), form=form)
        assert torch.equal(results[0], results[1])
        torch.testing.assert_close(whole.head(results[0]), whole.logits(prompt), **CLOSE)
        text = whole.config.text
        hidden, latent = text.hidden_size, text.routed_expert_hidden_size
        assert latent is not None
        moe = {"merged": [latent + hidden], "separate": [latent, hidden], "sharded": [latent, hidden]}[form]
        expected = [hidden, hidden] + ([hidden, *moe] * 4)  # a dense layer, then four with experts
        assert group.reduced == expected

    def test_expert_parallel_ranks_equal_one(self, tiny: Path, whole: Whole, prompt: torch.Tensor) -> None:
        results, _ = run(self.vendor, tiny, 2, whole.embed(prompt), expert_parallel=True)
        torch.testing.assert_close(whole.head(results[0]), whole.logits(prompt), **CLOSE)

    def test_two_ranks_of_kimi_linear_equal_one(self, linear: Path, prompt: torch.Tensor) -> None:
        whole = Whole(linear)
        results, _ = run(self.vendor, linear, 2, whole.embed(prompt))
        torch.testing.assert_close(whole.head(results[0]), whole.logits(prompt), **CLOSE)

    @pytest.mark.parametrize("stages", [2, 3])
    def test_pipeline_stages_that_end_inside_a_block_equal_the_whole(
        self, stages: int, thirteen: Path, prompt: torch.Tensor
    ) -> None:
        whole = Whole(thirteen)
        hidden, inside = whole.embed(prompt), False
        received: Any = None
        for rank in range(stages):
            with groups(Group(), Group(stages, rank)):
                model = build(self.vendor, settled(thirteen), whole.config)
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
        torch.testing.assert_close(whole.head(received), whole.logits(prompt), **CLOSE)

    def test_auxiliary_hidden_states_in_both_readings(self, thirteen: Path, prompt: torch.Tensor) -> None:
        """A tap of the wrong stream has the right shape and the wrong values: each is compared with its definition."""
        whole = Whole(thirteen)
        model = self.one_rank(thirteen)
        with groups(Group(), Group()):
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

    @pytest.mark.parametrize("stream", ["prefix", "attn_res"])
    def test_auxiliary_hidden_states_cross_the_edge_between_stages(
        self, stream: str, thirteen: Path, prompt: torch.Tensor
    ) -> None:
        """Ids on both sides of the edge and on it; the last stage hands out all of them, as one stage alone does."""
        whole, edge = Whole(thirteen), 7
        ids = (2, edge - 1, edge, 12, 13)
        model = self.one_rank(thirteen)
        with groups(Group(), Group()):
            model.set_aux_hidden_state_layers(ids)
            model.model.aux_stream = stream
            _, alone = forward(model, whole.embed(prompt))
        hidden = whole.embed(prompt)
        received: Any = None
        for rank in range(2):
            with groups(Group(), Group(2, rank)):
                config = settled(thirteen)
                # vLLM refuses the draft itself today; its configuration is all that the stages go by.
                draft = SimpleNamespace(eagle_aux_hidden_state_layer_ids=list(ids), aux_hidden_stream=stream)
                config.speculative_config = SimpleNamespace(
                    method="eagle3",
                    draft_model_config=SimpleNamespace(hf_config=draft),
                    num_speculative_tokens=0,
                    use_eagle=lambda: True,
                )
                stage = build(self.vendor, config, whole.config)
                config.speculative_config = None
                fill(stage)
                if stage.model.last:
                    stage.set_aux_hidden_state_layers(ids)  # as vLLM does, on this stage only
                assert edge in (stage.model.start_layer, stage.model.end_layer)
                if received is not None:
                    empty = stage.make_empty_intermediate_tensors(LENGTH, torch.float32, torch.device("cpu"))
                    assert {n: t.shape for n, t in empty.items()} == {n: t.shape for n, t in received.items()}
                    hidden = received["hidden_states"]
                received = forward(stage, hidden, received)
        _, over_stages = received
        assert len(over_stages) == len(ids)
        for got, want in zip(over_stages, alone, strict=True):
            torch.testing.assert_close(got, want, **CLOSE)

    @pytest.mark.parametrize("preset", ["tiny", "linear"])
    @pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1), (4, 2)])
    def test_every_tensor_has_a_place_of_its_ranks_shape(
        self, preset: str, size: int, rank: int, request: pytest.FixtureRequest
    ) -> None:
        folder = request.getfixturevalue(preset)
        config = CheckpointReader(folder).config
        prefix = "" if config.is_kimi_linear else "language_model."
        if config.quantization is not None and size == 4:
            pytest.skip("four shards of width 64 would split an MXFP4 group")
        plan = shard_plan(config, Topology(tp_size=size, tp_rank=rank))
        with groups(Group(size, rank), Group()):
            places = build(self.vendor, settled(folder, size), config).destinations(prefix)
        names = {name for name in tensor_table(config) if name.startswith((f"{prefix}model.", f"{prefix}lm_head."))}
        experts = {name for name in names if ".experts." in name}
        assert names - experts == set(places.tensors)
        assert all(places.wants(name) for name in experts)
        shapes = {name: spec.shape for name, spec in tensor_table(config).items()}
        for name, place in places.tensors.items():
            full = shapes[name] if not name.endswith("A_log") else (config.text.linear_attn.num_heads,)
            assert tuple(place.shape) == plan[name].shape(full), name

    def test_a_tensor_without_a_shard_is_named(self, tiny: Path) -> None:
        with groups(Group(), Group()):
            model = build(self.vendor, settled(tiny), CheckpointReader(tiny).config)
            places = model.destinations("language_model.")
        missing = places.missing()
        assert "language_model.model.layers.2.self_attn.A_log" in missing
        assert "language_model.model.layers.1.block_sparse_moe.experts.3" in missing
        with pytest.raises(CheckpointError, match=r"A_log.*shape"):
            places.put("language_model.model.layers.2.self_attn.A_log", torch.zeros(7))

    def test_warm_up_runs_every_kind_of_step_and_leaves_the_caches_alone(self, tiny: Path) -> None:
        from k3_core.vllm.serving.kda_layer import KdaLayer
        from k3_core.vllm.serving.warmup import Limits

        limits = Limits(max_num_batched_tokens=80, max_num_seqs=4, num_spec=0)
        model = self.one_rank(tiny)
        bind_caches(model)
        layer = next(m for m in model.modules() if isinstance(m, KdaLayer))
        before = [pool.clone() for pool in layer.kv_cache]
        self.vendor.module("warmup").WARM_UP.run_kda(layer, limits, torch.float32, torch.device("cpu"))
        for old, new in zip(before, layer.kv_cache, strict=True):
            assert old.isnan().equal(new.isnan())
            assert old.isnan().all()

    def test_warm_up_covers_every_class_of_token_counts(self, tiny: Path) -> None:
        pytest.importorskip("triton")
        from k3_core.vllm.serving.warmup import Limits, classes

        warm_up = self.vendor.module("warmup").WARM_UP
        config = CheckpointReader(tiny).config
        for longest in (1, 3, 80, 8192):
            limits = Limits(max_num_batched_tokens=longest, max_num_seqs=128, num_spec=0)
            counts, tables = warm_up.token_counts(config, limits), warm_up.tables(config, limits)
            assert counts[0] == 1
            assert counts[-1] <= longest

            def met(of: Iterable[int], tables: Any = tables) -> set[Any]:
                return set().union(*(classes(count, tables, warm_up.by_number) for count in of))

            assert met(counts) == met(range(1, longest + 1))
            assert len(tables) > 1
            assert longest < 80 or any(met(set(counts) - {count}) < met(counts) for count in counts)

    def test_a_kind_of_one_rank_alone_is_warmed_up_by_all(self, thirteen: Path) -> None:
        """Wide scales are found in a rank's own part of the weights: ranks that ran other layers would wait for ever.

        Mutant: every rank runs the layers that it has chosen itself.
        """
        config = CheckpointReader(thirteen).config
        group = Group(2)

        def work(rank: int) -> tuple[list[int], list[int]]:
            stack = build(self.vendor, settled(thirteen, 2), config).model
            with stack.one_of_each_kind() as layers:
                equal = list(layers)
            mine = next(index for index, _ in stack.own_layers() if index not in equal)
            if rank == 1:
                stack.layers[mine].variant_key = lambda: "of this rank"
            with stack.one_of_each_kind() as layers:
                return [mine, *equal], list(layers)

        with groups(group, Group()):
            results = run_ranks(group, work)
        assert results[0] == results[1]
        (mine, *equal), layers = results[0]
        assert layers == sorted([mine, *equal])

    @pytest.mark.parametrize("ahead", [[True, True], [True, False], [False, False]])
    @pytest.mark.parametrize("wanted", [["1", "1"], ["1", "0"]])
    def test_ranks_warm_up_alike_although_they_are_set_apart(
        self, wanted: list[str], ahead: list[bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Mutant: each rank goes by its own settings; ranks of several machines may differ in them."""
        from k3_core.operators import compiling
        from k3_core.vllm.serving import warmup

        group = Group(2)
        met: list[list[str]] = [[], []]

        @contextmanager
        def naming() -> Iterator[bool]:
            yield True

        class Noting(warmup.WarmUp):
            def meet(self, text_model: Any, spent: Any, word: str) -> None:
                met[group.rank_in_group].append(word)

        def work(rank: int) -> None:
            monkeypatch.setenv("K3_WARMUP", wanted[rank])
            Noting(lambda config, limits: {}, ahead=lambda text_model: ahead[rank]).run(None)

        monkeypatch.setattr(compiling, "possible", lambda: True)
        monkeypatch.setattr(compiling, "ahead", naming)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch, "device", lambda *place: "cpu")
        with groups(group, Group()):
            run_ranks(group, work)
        expected = ["named"] * all(ahead) + ["launched"] if wanted == ["1", "1"] else []
        assert met == [expected, expected]

    def test_without_metadata_layers_give_zeros(self, tiny: Path) -> None:
        """Profiling and warm-up call a layer before any request exists."""
        from vllm.forward_context import set_forward_context

        from k3_core.testing.no_metadata import assert_zeros_without_metadata

        model = self.one_rank(tiny)
        bind_caches(model)
        x = torch.randn(7, model.config.text.hidden_size)
        for layer in {type(one.self_attn): one.self_attn for one in model.model.layers}.values():

            def attend(metadata: Any, layer: Any = layer) -> torch.Tensor:
                with torch.no_grad(), set_forward_context(metadata, model.vllm_config, slot_mapping={}):
                    result: torch.Tensor = layer(x)
                    return result

            with groups(Group(), Group()):
                assert_zeros_without_metadata(attend)

    def test_sequences_of_one_token_are_finite_and_equal_the_whole(
        self, tiny: Path, whole: Whole, prompt: torch.Tensor
    ) -> None:
        """A first chunk of one token goes to the prefill operators and starts from zeros, whatever its slot holds."""
        model = self.one_rank(tiny)
        with groups(Group(), Group()):
            hidden = forward(model, whole.embed(prompt[:1]))
        torch.testing.assert_close(whole.head(hidden), whole.logits(prompt[:1]), **CLOSE)

    @pytest.mark.parametrize(("ranks", "images"), [(8, 1), (2, 3), (4, 2)])
    def test_images_encoded_by_several_ranks_equal_one(self, ranks: int, images: int, tiny: Path) -> None:
        """Ranks without an image take part, and every rank gets all embeddings."""
        from k3_core.vllm.serving import loading, vision

        reader = CheckpointReader(tiny)
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
            alone = vision.encode(tower, projector, pixels, grids)
        assert [len(part) for part in alone] == [h * w // 4 for h, w in sizes]
        group = Group(ranks)
        with groups(group, Group()):
            results = run_ranks(group, lambda rank: vision.encode(tower, projector, pixels, grids))
        for parts in results:
            for got, want in zip(parts, alone, strict=True):
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
