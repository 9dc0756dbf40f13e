"""`k3 plan` counts the bytes that this wheel's forms of the experts have."""

from __future__ import annotations

import pytest
import torch

from k3_ascend import experts
from k3_ascend.generation import Generation
from k3_core.cli.plan.command import RELEASED_CONFIG
from k3_core.cli.plan.devices import DEVICES
from k3_core.cli.plan.experts import INT4_GROUP, REQUANTISES, expert_form
from k3_core.config import load_config

CONFIG = load_config(RELEASED_CONFIG)
LATENT = CONFIG.text.expert_hidden_size


@pytest.mark.parametrize("gpu", ["ascend-a2", "ascend-a3"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_the_form_and_its_bytes_are_planned(gpu: str, ranks: int) -> None:
    generation = next(g for g in Generation if g.arch == DEVICES[gpu].arch)
    planned = expert_form(CONFIG, DEVICES[gpu], ranks, upstream=False, floor=None)
    name = experts.choose(None, True, generation, (LATENT, planned.width))
    assert planned.name == name
    with torch.device("meta"):
        store = experts.FORMS[name](2, planned.width, LATENT)
    held = sum(value.nbytes for value in vars(store).values() if isinstance(value, torch.Tensor))
    assert planned.nbytes == pytest.approx(held / 2, rel=0.001)


def test_generations_and_the_group_are_the_plans() -> None:
    lossy = {g.arch for g in Generation if experts.choose(None, True, g, (LATENT, 3072)) != "mxfp"}
    assert lossy == set(REQUANTISES)
    assert experts.INT4_GROUP == INT4_GROUP
