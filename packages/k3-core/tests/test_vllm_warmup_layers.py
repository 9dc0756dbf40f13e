"""A warm-up runs one layer of each kind; no kind of the release's 93 layers is left out, on any stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from k3_core.contracts.attn_res import Schedule
from k3_core.vllm.serving.stack import TextStack


class Kda:
    pass


class Mla:
    pass


def stack(start: int, end: int, aux: tuple[int, ...] = (), layers: int = 93) -> Any:
    def layer(index: int) -> SimpleNamespace:
        return SimpleNamespace(self_attn=Mla() if index % 4 == 3 else Kda(), is_moe=index > 0)

    return SimpleNamespace(
        start_layer=start,
        end_layer=end,
        schedule=Schedule(layers, 12),
        aux_layers=aux,
        warming=None,
        own_layers=lambda: [(index, layer(index)) for index in range(start, end)],
    )


def launches(model: Any, index: int, first: bool) -> tuple[Any, ...]:
    """What a layer's launches depend on."""
    schedule, layer = model.schedule, dict(model.own_layers())[index]
    write = schedule.write_index(index) is not None
    return type(layer.self_attn), layer.is_moe, schedule.attn_blocks(index), schedule.mlp_blocks(index), write, first


@pytest.mark.parametrize(("start", "end"), [(0, 93), (0, 47), (47, 93), (48, 93), (92, 93)])
def test_every_kind_is_met(start: int, end: int) -> None:
    model = stack(start, end)
    chosen = TextStack.different_layers(model)
    assert chosen[0] == start
    met = {launches(model, index, index == start) for index in chosen}
    assert met == {launches(model, index, index == start) for index in range(start, end)}
    assert len(chosen) <= 32


def test_auxiliary_states_are_kept() -> None:
    """A hand-over counts them."""
    chosen = TextStack.different_layers(stack(0, 93, aux=(2, 46, 90)))
    assert {2, 46, 90} <= set(chosen)


def test_otherwise_every_layer_runs() -> None:
    model = stack(12, 24)
    assert list(TextStack.running(model)) == list(range(12, 24))
    model.warming = [12, 15]
    assert list(TextStack.running(model)) == [12, 15]
