"""Scripted proposals on a device are those of the list form."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("vllm", reason="the engine that uses them is vLLM")

from k3_core.vllm.testing.draft_engine import following
from k3_core.vllm.testing.proposals import following_rows


@pytest.mark.parametrize("count", [1, 3, 7])
def test_rows_are_proposed_as_lists_are(count: int) -> None:
    """Known texts of any length, texts that are over, and texts that nobody knows."""
    draw = random.Random(count)
    texts = [[draw.randrange(500) for _ in range(draw.randrange(20, 60))] for _ in range(6)]
    longest = max(map(len, texts))
    table = torch.tensor([text + [-1] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    rows = torch.randint(0, 500, (60, 100), dtype=torch.int32, generator=torch.Generator().manual_seed(count))
    known, expected = [], []
    for row, seen in enumerate(rows):
        text = texts[row % len(texts)]
        length = draw.randrange(1, len(text) + 3)
        begins = min(length, len(text))
        seen[:begins] = torch.tensor(text[:begins])
        if row % 11 == 0:
            seen[0] = 499 - seen[0]
        proposed = following(texts, seen[:length].tolist(), count)
        expected.append(proposed + [0] * (count - len(proposed)))
        known.append(length)
    assert following_rows(table, lengths, rows, torch.tensor(known), count).tolist() == expected
    assert any(any(row) for row in expected)
