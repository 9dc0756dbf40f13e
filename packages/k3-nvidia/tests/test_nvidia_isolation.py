"""A request with values that are not finite ends alone: what is counted, whom it names, what keeps it off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from k3_core.vllm.serving import isolation


def config(speculative: Any = None, scheduler: Any = None) -> Any:
    """As much of a vLLM configuration as the hook reads."""
    return SimpleNamespace(
        speculative_config=speculative, scheduler_config=SimpleNamespace(scheduler_cls=scheduler, async_scheduling=True)
    )


def test_infinite_logits_become_nan_and_no_other_bit_changes() -> None:
    logits = torch.randn(3, 257)
    logits[0, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])
    logits[1, 0], logits[1, 1] = torch.finfo(torch.float32).max, 1e-44
    bad = ~logits.isfinite()
    marked = isolation.mark(logits.clone())
    assert torch.equal(marked.isnan(), bad)
    assert torch.equal(marked.view(torch.int32)[~bad], logits.view(torch.int32)[~bad])


def test_counts_name_only_requests_with_nans() -> None:
    assert isolation.poisoned(None) == []
    assert isolation.poisoned({"a": 0, "b": 7}) == ["b"]


def test_what_keeps_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "counts_without_waiting", lambda: True)
    monkeypatch.setenv(isolation.COUNT, "0")
    assert not isolation.install(config())
    monkeypatch.delenv(isolation.COUNT)
    assert not isolation.install(config(speculative=object()))
    assert not isolation.install(config(scheduler="mine.Scheduler"))
    monkeypatch.setattr(isolation, "counts_without_waiting", lambda: False)
    old = config()
    assert not isolation.install(old)
    assert old.scheduler_config.scheduler_cls is None
    monkeypatch.setenv(isolation.COUNT, "1")
    assert isolation.install(old)
    assert isolation.install(old)
    assert old.scheduler_config.scheduler_cls == f"{isolation.__name__}.scheduler"
