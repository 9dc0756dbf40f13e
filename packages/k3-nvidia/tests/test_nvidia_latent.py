"""Latent rows that are not finite: the layer says so in its request's last row, although the attention hides them.

The attention is replaced by what FlashAttention 3 makes of such rows where it splits a sequence: finite values.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
pytest.importorskip("triton", reason="the layer launches a kernel")

from nvidia_support import Group, build, fill, groups, settle

from k3_core.checkpoint import CheckpointReader
from k3_core.vllm.serving.mla_cpu import LatentAttentionOnCpu
from k3_nvidia.kernels import glue
from k3_nvidia.mla import KimiLatentAttention

#: A prompt of four rows, two rows that decode, and two rows of padding.
BOUNDS, ROWS = [0, 4, 5, 6, 6], 8
#: Block table and lengths of the four: the second request has eighteen tokens in pages 2 and 5, one of them new.
TABLES = (
    torch.tensor([[0, 0], [2, 5], [3, 0], [0, 0]], dtype=torch.int32), torch.tensor([4, 18, 1, 0], dtype=torch.int32)
)  # fmt: skip


def layer_of(folder: Path) -> tuple[KimiLatentAttention, Any]:
    """The first latent attention of a loaded float32 model, with this wheel's kernels; and vLLM's configuration."""
    with groups(Group(), Group()):
        config = settle(folder, dtype="float32")
        model = build(config, CheckpointReader(folder).config)
        fill(model)
    layer = next(m for m in model.modules() if isinstance(m, KimiLatentAttention))
    layer._kernels = True
    return layer, config


@pytest.fixture(scope="module", params=["k3", "linear"])
def layer(request: pytest.FixtureRequest, nvidia_tiny: Path, nvidia_linear: Path) -> tuple[KimiLatentAttention, Any]:
    """With an output gate and low-rank queries (Kimi K3), and with neither (Kimi-Linear)."""
    found = layer_of(nvidia_tiny if request.param == "k3" else nvidia_linear)
    assert found[0].text.mla_use_output_gate is (request.param == "k3")
    return found


def run(
    made: tuple[KimiLatentAttention, Any], monkeypatch: pytest.MonkeyPatch, row: int, part: str, bounds: Any
) -> tuple[Tensor, Tensor]:
    """(result, rows the attention was given [T, R + shared]) of a step in which one projected value is infinite."""
    from vllm.forward_context import set_forward_context

    layer, config = made
    given: list[Tensor] = []

    def attention(self: Any, q: Tensor, latent: Tensor, shared: Tensor, **named: Any) -> Tensor:
        given.append(torch.cat([latent, shared.flatten(1)], 1))
        return torch.ones(q.shape[0], q.shape[1] * self.text.v_head_dim, dtype=q.dtype)

    honest = layer.in_proj.forward

    def project(x: Tensor) -> Any:
        projected = honest(x)
        if part:
            columns = layer.rows.columns(projected, "q_a_proj" if part == "q" else "kv_a_proj_with_mqa")
            columns[row, layer.text.kv_lora_rank + 1 if part == "shared" else 1] = float("inf")
        return projected

    monkeypatch.setattr(LatentAttentionOnCpu, "forward", attention)
    monkeypatch.setattr(layer.in_proj, "forward", project)
    step = SimpleNamespace(query_start_loc=None if bounds is None else torch.tensor(bounds, dtype=torch.int32))
    step.k3_pages = TABLES
    x = torch.randn(ROWS, layer.text.hidden_size, generator=torch.Generator().manual_seed(2))
    context = set_forward_context({layer.attention_name: step}, config, slot_mapping={})
    with groups(Group(), Group()), torch.no_grad(), context:
        result = layer(x)
    return result, given[0]


def lost(result: Tensor) -> list[int]:
    """Rows of which every value is NaN; no row may have some."""
    assert torch.equal(result.isnan().any(1), result.isnan().all(1))
    return [int(row) for row in result.isnan().any(1).nonzero()]


@pytest.mark.parametrize("part", ["latent", "shared"])
@pytest.mark.parametrize(("row", "target"), [(0, 3), (3, 3), (4, 4), (5, 5), (7, 7)])
def test_a_row_that_is_not_finite_loses_its_request_and_no_other(
    layer: Any, part: str, row: int, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, _ = run(layer, monkeypatch, 0, "", BOUNDS)
    assert lost(clean) == []
    struck, given = run(layer, monkeypatch, row, part, BOUNDS)
    assert [int(r) for r in (~given.isfinite()).any(1).nonzero()] == [row]
    assert lost(struck) == [target]
    others = [r for r in range(ROWS) if r not in (row, target)]
    assert torch.equal(struck[others], clean[others])


def test_low_ranks_of_queries_that_are_not_finite_are_seen_too(
    nvidia_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, given = run(layer_of(nvidia_tiny), monkeypatch, 1, "q", BOUNDS)
    assert given.isfinite().all()
    assert lost(result) == [3]


def test_without_offsets_a_row_loses_itself(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(run(layer, monkeypatch, 1, "latent", None)[0]) == [1]


@pytest.mark.parametrize("checks", [True, False])
def test_a_damaged_page_loses_its_request_where_that_is_asked_for(
    layer: Any, checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 0 of page 5 is the second request's token 16; row 1 is its new one, not written yet; page 1 is nobody's."""
    made, _ = layer
    pages = torch.full((6, 16, made.text.kv_lora_rank + made.text.qk_rope_head_dim), float("nan"))
    pages[2], pages[5, 0] = 1.0, 1.0
    monkeypatch.setattr(made, "_checks", checks)
    monkeypatch.setattr(made.attn, "kv_cache", pages)
    monkeypatch.setattr(made.attn, "kv_cache_dtype", "auto", raising=False)
    clean, _ = run(layer, monkeypatch, 0, "", BOUNDS)
    assert lost(clean) == []
    pages[5, 0, -1] = float("-inf")
    struck, _ = run(layer, monkeypatch, 0, "", BOUNDS)
    assert lost(struck) == [4] * checks
    others = [row for row in range(ROWS) if row != 4]
    assert torch.equal(struck[others], clean[others])


def test_a_layer_that_does_not_look_is_noticed(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the norms as they were, and an attention that hides what it is given."""
    honest = glue.low_rank_norms
    monkeypatch.setattr(glue, "low_rank_norms", lambda *args, shared, marks, bounds: honest(*args))
    assert lost(run(layer, monkeypatch, 0, "latent", BOUNDS)[0]) == []
