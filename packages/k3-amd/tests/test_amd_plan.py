"""`k3 plan` counts the bytes that this wheel's layout of the experts has."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the layout lies beside the kernels")

from k3_amd.kernels.experts_layout import empty_packed
from k3_core.cli.plan.command import RELEASED_CONFIG
from k3_core.cli.plan.devices import DEVICES
from k3_core.cli.plan.experts import expert_form
from k3_core.config import load_config

CONFIG = load_config(RELEASED_CONFIG)


@pytest.mark.parametrize("gpu", ["mi300x", "mi355x"])
@pytest.mark.parametrize("ranks", [1, 8, 16, 32])
def test_the_bytes_of_an_expert_are_planned(gpu: str, ranks: int) -> None:
    planned = expert_form(CONFIG, DEVICES[gpu], ranks, upstream=False, floor=None)
    form = "unpacked" if DEVICES[gpu].arch == "gfx942" else "scaled"
    packed = empty_packed(1, planned.width, CONFIG.text.expert_hidden_size, "cpu", form)
    held = packed.w13.nbytes + packed.s13.nbytes + packed.w2.nbytes + packed.s2.nbytes
    assert packed.padded_width == planned.padded
    assert planned.nbytes == pytest.approx(held, rel=0.001)
