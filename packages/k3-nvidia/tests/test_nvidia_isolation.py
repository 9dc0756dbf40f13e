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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_infinite_logits_become_nan_and_all_other_bits_stay(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, :5] = torch.tensor(
        [0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny, 1e-39]
    )  # the last: subnormal
    before = logits.clone()
    logits[1, 7], logits[2, 9], logits[3, 0] = float("inf"), float("-inf"), float("nan")
    marked = isolation.mark(logits)
    assert marked is logits
    assert marked.isnan().sum(1).tolist() == [0, 1, 1, 1]
    kept = ~marked.isnan()
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(marked.view(integers)[kept], before.view(integers)[kept])


def test_counts_name_only_requests_with_nans() -> None:
    assert isolation.poisoned(None) == []
    assert isolation.poisoned({"a": 0, "b": 7, "c": 1}) == ["b", "c"]


def test_what_keeps_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "counts_without_waiting", lambda: True)
    monkeypatch.setattr(isolation, "counting", lambda: True)
    monkeypatch.setenv(isolation.COUNT, "0")
    assert not isolation.install(config())
    monkeypatch.delenv(isolation.COUNT)
    assert not isolation.install(config(speculative=object()))  # vLLM's first model runner
    newer = config(speculative=object())
    newer.use_v2_model_runner = True
    monkeypatch.setattr(isolation, "count_by_request", lambda: False)
    assert not isolation.install(newer)
    monkeypatch.setattr(isolation, "count_by_request", lambda: True)
    assert isolation.install(newer)
    monkeypatch.delenv(isolation.COUNT)
    assert not isolation.install(config(scheduler="mine.Scheduler"))
    monkeypatch.setattr(isolation, "counts_without_waiting", lambda: False)
    old = config()
    assert not isolation.install(old)
    assert old.scheduler_config.scheduler_cls is None
    monkeypatch.setenv(isolation.COUNT, "1")
    assert isolation.install(old)
    assert isolation.install(old)
    assert old.scheduler_config.scheduler_cls == f"{isolation.__name__}.scheduler"
    # vLLM has kept what it read of its environment before: it will count nothing whatever we set now.
    monkeypatch.setattr(isolation, "counting", lambda: False)
    late = config()
    assert not isolation.install(late)
    assert late.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_with_nan_are_counted_and_cleared_and_others_keep_their_bits(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 3] = float("-inf")  # a token that a grammar forbids
    before = logits.clone()
    logits[1], logits[3, 299] = float("nan"), float("nan")
    assert isolation.count_and_clear(logits).tolist() == [0, 300, 0, 1, 0]
    assert torch.equal(logits[[0, 2, 4]], before[[0, 2, 4]])
    assert not logits[[1, 3]].any()


def test_the_second_runner_counts_by_what_also_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [pytest.importorskip(f"vllm.v1.worker.gpu.{name}") for name in isolation.COUNTERS]
    for module in modules:
        monkeypatch.setattr(module, "get_num_nans", None)
    assert isolation.guard()
    assert all(module.get_num_nans is isolation.count_and_clear for module in modules)
    monkeypatch.delattr(modules[1], "get_num_nans")
    assert not isolation.guard()


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [512, 163_840])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_drawn_from_cleared_rows_exist(vocabulary: int, temperature: float) -> None:
    """vLLM's own kernel draws token 1023 of 512 from a row of NaN, and the next step would look it up."""
    sample = pytest.importorskip("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample
    logits = torch.randn(4, vocabulary, device="cuda")
    logits[1], logits[2, 5] = float("nan"), float("nan")
    where = torch.arange(4, device="cuda", dtype=torch.int32)
    heat = torch.full((4,), temperature, device="cuda")
    counts = isolation.count_and_clear(logits)
    seeds, places = torch.arange(4, device="cuda"), torch.full((4,), 7, device="cuda")
    tokens = sample(logits, where, heat, seeds, places, apply_temperature=False, is_drafting=False)
    assert counts.tolist() == [0, vocabulary, 1, 0]
    assert ((tokens >= 0) & (tokens < vocabulary)).all()


def test_counts_of_drafts_are_summed_for_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own call counts a row a draft and would name requests by the first of them."""
    module = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.rejection_sampler")
    batch = SimpleNamespace(cu_num_logits=torch.tensor([0, 4, 5, 5, 9], dtype=torch.int32))
    rows = torch.tensor([0, 0, 2, 0, 0, 0, 0, 0, 7], dtype=torch.int32)

    def call(self: Any, logits: Any, input_batch: Any) -> Any:
        return SimpleNamespace(num_nans=rows if logits else None)

    monkeypatch.setattr(module.RejectionSampler, "__call__", call)
    assert isolation.count_by_request()
    assert isolation.count_by_request()  # once is enough
    sampler = module.RejectionSampler.__new__(module.RejectionSampler)
    counts = sampler(True, batch).num_nans
    assert counts.tolist() == [2, 0, 0, 7]
    assert counts.dtype == torch.int32
    assert sampler(False, batch).num_nans is None
