"""Several ranks and stages of the AMD model: the suite that every vendor runs, padded heads, and mutants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from amd_support import VENDOR

from k3_core.checkpoint import CheckpointReader, expert_width
from k3_core.contracts import moe
from k3_core.errors import CheckpointError
from k3_core.vllm.serving import mla_layer, moe_layer
from k3_core.vllm.testing.ranks import Group, Whole, build, fill, forward, groups, run, settled
from k3_core.vllm.testing.suite_ranks import CLOSE, RankSuite


class TestRanks(RankSuite):
    vendor = VENDOR

    @pytest.mark.parametrize("preset", ["tiny", "linear"])
    @pytest.mark.parametrize("padded", [6, 12, 16])
    def test_heads_padded_for_the_attention_change_nothing(
        self, padded: int, preset: str, prompt: torch.Tensor, request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """4 heads handed over as 6, 12 or 16, with a low rank of the queries (K3) and without (Kimi-Linear)."""
        from k3_amd import mla

        folder = request.getfixturevalue(preset)
        monkeypatch.setattr(mla, "attention_heads", lambda heads: padded)
        given: list[int] = []
        honest = mla_layer.LatentAttention._attend

        def counted(layer: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
            given.append(q.shape[1])
            return honest(layer, q, *rest)

        monkeypatch.setattr(mla_layer.LatentAttention, "_attend", counted)
        whole = Whole(folder)
        hidden = forward_one(folder, whole.embed(prompt))
        assert set(given) == {padded}
        torch.testing.assert_close(whole.head(hidden), whole.logits(prompt), **CLOSE)

    def test_a_mutant_that_cuts_the_wrong_heads_off_is_noticed(
        self, tiny: Path, whole: Whole, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from k3_amd import mla

        monkeypatch.setattr(mla, "attention_heads", lambda heads: 16)
        honest = mla_layer.LatentAttention._attend

        def shifted(layer: Any, *args: Any) -> torch.Tensor:
            return honest(layer, *args).roll(layer.text.v_head_dim, -1)

        monkeypatch.setattr(mla_layer.LatentAttention, "_attend", shifted)
        hidden = forward_one(tiny, whole.embed(prompt))
        assert not torch.allclose(whole.head(hidden), whole.logits(prompt), atol=1e-2)

    def test_a_width_padded_before_the_layout_pads_is_noticed(
        self, tiny: Path, whole: Whole, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The trap of expert parallelism: whole experts must not be padded as if they were slices, nor twice."""
        config = CheckpointReader(tiny).config
        width = config.text.moe_intermediate_size
        assert expert_width(config, 2, 2)[0] == width, "expert parallelism leaves experts whole"
        monkeypatch.setattr(moe_layer, "expert_width", lambda *args: (2 * width, 2 * width))
        with pytest.raises((CheckpointError, RuntimeError)):
            run(self.vendor, tiny, 2, whole.embed(prompt), expert_parallel=True)

    def test_a_rank_computing_its_neighbours_experts_is_noticed(
        self, tiny: Path, whole: Whole, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        honest = moe_layer.MoeLayer._add_expert_map

        def shifted(layer: Any, ids: range) -> None:
            honest(layer, ids)
            layer.expert_map = layer.expert_map.roll(1)

        monkeypatch.setattr(moe_layer.MoeLayer, "_add_expert_map", shifted)
        results, _ = run(self.vendor, tiny, 2, whole.embed(prompt), expert_parallel=True)
        assert not torch.allclose(whole.head(results[0]), whole.logits(prompt), atol=1e-2)

    def test_a_correction_bias_in_bfloat16_is_noticed(
        self, tiny: Path, whole: Whole, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The routing of some token changes: the weights of the chosen experts differ from the contract's."""
        model = self.one_rank(tiny)
        gates = [layer.feed_forward.gate for layer in model.model.layers if layer.is_moe]
        x = torch.randn(4096, whole.config.text.hidden_size, generator=torch.Generator().manual_seed(1))
        changed = 0
        for gate in gates:
            _, ids = gate(x)
            exact = moe.router_logits(x, gate.weight)
            gate.e_score_correction_bias.data = gate.e_score_correction_bias.data.bfloat16().float()
            assert torch.equal(exact, moe.router_logits(x, gate.weight))
            _, rounded = gate(x)
            changed += int((ids.sort(-1).values != rounded.sort(-1).values).any(-1).sum())
        assert changed > 0

    def test_a_tap_of_the_stream_that_was_not_asked_for_is_noticed(self, thirteen: Path, prompt: torch.Tensor) -> None:
        """Both have the same shape: only values tell them apart, at every layer behind the first block."""
        whole = Whole(thirteen)
        model = self.one_rank(thirteen)
        taps = tuple(range(1, 13))
        with groups(Group(), Group()):
            model.set_aux_hidden_state_layers(taps)
            readings = []
            for stream in ("prefix", "attn_res"):
                model.model.aux_stream = stream
                readings.append(forward(model, whole.embed(prompt))[1])
        for k, prefix, mixed in zip(taps, *readings, strict=True):
            assert prefix.shape == mixed.shape
            assert not torch.allclose(prefix, mixed, atol=1e-2), k

    def test_a_first_token_that_decodes_reads_what_its_slot_held(
        self, tiny: Path, whole: Whole, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The mutant of the sequences of one token: sent to the decode operator, they read a stale (here NaN) state."""
        from k3_core.vllm.serving.kda_metadata import Decode, KdaMetadata
        from k3_core.vllm.testing import ranks

        honest = ranks.one_prompt

        def decoding(model: Any, length: int, block: int = 64) -> dict[str, Any]:
            slot = torch.tensor([1], dtype=torch.int32)
            return {
                name: KdaMetadata(1, 0, decode=Decode(slot)) if isinstance(m, KdaMetadata) else m
                for name, m in honest(model, length, block).items()
            }

        monkeypatch.setattr(ranks, "one_prompt", decoding)
        model = self.one_rank(tiny)
        with groups(Group(), Group()):
            hidden = ranks.forward(model, whole.embed(prompt[:1]))
        assert hidden.isnan().any()


def forward_one(folder: Path, embedded: torch.Tensor) -> torch.Tensor:
    """Hidden states of one prompt on one rank."""
    with groups(Group(), Group()):
        model = build(VENDOR, settled(folder), CheckpointReader(folder).config)
        fill(model)
        result: torch.Tensor = forward(model, embedded)
        return result
