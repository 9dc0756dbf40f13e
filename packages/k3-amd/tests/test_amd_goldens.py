"""Logits of the AMD model, kernels replaced by contracts, against the goldens of the released code: both families."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from amd_support import VENDOR

from k3_core.vllm.testing.ranks import Group, Whole, build, fill, forward, groups, settled

sys.path.insert(0, str(Path(__file__).parents[2] / "k3-core" / "tests"))
import golden_data

#: fp32 against fp32 goldens, as their README asks: summation order over 13 layers (another forward differs by 8e-5).
ATOL = 2e-3


@pytest.fixture(scope="module", autouse=True)
def acting() -> Iterator[None]:
    with VENDOR.acting():
        yield


@pytest.mark.parametrize("name", ["k3-tiny", "k3-linear-tiny"])
def test_logits_at_every_position_of_every_prompt(name: str) -> None:
    folder = golden_data.checkpoint(name)
    prompts = golden_data.load_json(f"{name}-goldens/text_fp32.json")["prompts"]
    arrays = golden_data.arrays(f"{name}-goldens/text_fp32.npz")
    whole, checked = Whole(folder), 0
    with groups(Group(), Group()):
        model = build(VENDOR, settled(folder, skip_tokenizer_init=True), whole.config)
        fill(model)
        for prompt, ids in prompts.items():
            if f"{prompt}.logits" not in arrays:
                continue
            logits = whole.head(forward(model, whole.embed(torch.tensor(ids))))
            torch.testing.assert_close(logits, torch.from_numpy(arrays[f"{prompt}.logits"]), atol=ATOL, rtol=0)
            checked += len(ids)
    assert checked > 100
