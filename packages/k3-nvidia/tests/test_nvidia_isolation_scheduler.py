"""Poisoned requests through vLLM's own scheduler and the outputs of both of its runners; no model, no device.

The engine and the model are left out: requests are scheduled by vLLM's scheduler (the asynchronous one, with a step in
flight), a step's output is the object that the runner hands over, with the counts as its copy to the host left them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from nvidia_support import VENDOR, settle

from k3_core.vllm.serving import isolation

NAN, CLEAN, OTHER = "the-poisoned-one", "clean", "other"
VOCABULARY, BLOCKS = 512, 64


class Event:
    """The event of a copy that is over."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def output_of_new_runner(names: list[str], counts: list[int]) -> Any:
    """What vLLM's second model runner hands over: ``AsyncOutput`` with one sampled token a request."""
    async_utils = pytest.importorskip("vllm.v1.worker.gpu.async_utils")
    from vllm.v1.outputs import ModelRunnerOutput

    pending = async_utils.AsyncOutput.__new__(async_utils.AsyncOutput)
    fields = {
        "model_runner_output": ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}
        ),
        "copy_event": Event(),
        "sampled_token_ids": np.full((len(names), 1), 7),
        "num_sampled_tokens_np": np.ones(len(names), dtype=np.int32),
        "num_nans": np.array(counts, dtype=np.int32),
        "logprobs_tensors": None,
        "prompt_logprobs_dict": {},
        "prompt_token_id_logprobs_dict": {},
        "sampling_mask_tensors": None,
        "pending_aux_output": None,
        "_has_fault": None,
    }
    for name, value in fields.items():
        setattr(pending, name, value)
    return pending.get_output()


def output_of_old_runner(names: list[str], counts: list[int]) -> Any:
    """What vLLM's first model runner hands over under asynchronous scheduling."""
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    pending = AsyncGPUModelRunnerOutput.__new__(AsyncGPUModelRunnerOutput)
    fields = {
        "_model_runner_output": ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}
        ),
        "_invalid_req_indices": [],
        "async_copy_ready_event": Event(),
        "_sampled_token_ids": None,
        "sampled_token_ids_cpu": torch.full((len(names), 1), 7),
        "vocab_size": VOCABULARY,
        "_logprobs_tensors": None,
        "_logprobs_tensors_cpu": None,
        "_num_nans": None,
        "_num_nans_cpu": torch.tensor(counts, dtype=torch.int32),
        "_has_fault": None,
    }
    for name, value in fields.items():
        setattr(pending, name, value)
    return pending.get_output()


RUNNERS = {"new": output_of_new_runner, "old": output_of_old_runner}


@pytest.fixture(scope="module")
def configuration(nvidia_tiny: Path) -> Iterator[Any]:
    """What the server settles for the tiny checkpoint, with asynchronous scheduling as on a GPU."""
    with VENDOR.acting():
        settled = settle(nvidia_tiny, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=True)
        settled.scheduler_config.async_scheduling, settled.cache_config.num_gpu_blocks = True, BLOCKS
        yield settled


@pytest.fixture
def scheduler(configuration: Any) -> Any:
    """The scheduler that this project names to vLLM, over one group of latent pages."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    size = configuration.cache_config.block_size
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    cls = configuration.scheduler_config.get_scheduler_cls()
    made = cls(
        vllm_config=configuration,
        kv_cache_config=caches,
        structured_output_manager=StructuredOutputManager(configuration),
        block_size=size,
    )
    hashing = get_hash_fn_by_name("sha256")
    init_none_hash(hashing)
    made.hasher = get_request_block_hasher(size, hashing)
    return made


def request(scheduler: Any, name: str, length: int) -> Any:
    """A greedy request of ``length`` tokens, waiting in the scheduler."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ids = [(7 * i + len(name)) % VOCABULARY for i in range(length)]
    made = Request(name, ids, sampling, None, block_hasher=scheduler.hasher)
    scheduler.add_request(made)
    return made


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_count_ends_its_request_by_name_while_the_next_step_is_in_flight(
    scheduler: Any, runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.engine import FinishReason

    size = scheduler.cache_config.block_size
    held = [request(scheduler, name, length) for name, length in ((CLEAN, 5), (NAN, size + 3), (OTHER, 9))]
    first = scheduler.schedule()
    names = list(first.num_scheduled_tokens)
    assert set(names) == {CLEAN, NAN, OTHER}
    second = scheduler.schedule()  # asynchronous: the next step is scheduled before the first one's output is here
    assert set(second.num_scheduled_tokens) == set(names)
    blocks = {block for group in scheduler.kv_cache_manager.get_block_ids(NAN) for block in group}
    counts = [3 if name == NAN else 0 for name in names]
    with caplog.at_level("ERROR", logger="vllm.plugins.k3"):
        outputs = scheduler.update_from_output(first, RUNNERS[runner](names, counts))
    mine = {one.request_id: one for one in outputs[0].outputs}
    assert mine[NAN].finish_reason == FinishReason.ERROR
    assert list(mine[NAN].new_token_ids) == []
    if hasattr(mine[NAN], "error"):
        assert NAN in mine[NAN].error.message
    assert [list(mine[name].new_token_ids) for name in (CLEAN, OTHER)] == [[7], [7]]
    assert len([record for record in caplog.records if NAN in record.getMessage()]) == 1
    assert NAN not in scheduler.requests
    assert {one.request_id for one in scheduler.running} == {CLEAN, OTHER}
    cached = {block.block_id for block in scheduler.kv_cache_manager.block_pool.blocks if block.block_hash is not None}
    assert not blocks & cached
    # The step in flight still names it, with a count again: nobody is ended twice, and the others go on.
    outputs = scheduler.update_from_output(second, RUNNERS[runner](list(names), counts))
    assert {one.request_id for one in outputs[0].outputs} == {CLEAN, OTHER}
    third = scheduler.schedule()
    assert set(third.num_scheduled_tokens) == {CLEAN, OTHER}
    assert NAN in first.finished_req_ids | second.finished_req_ids | third.finished_req_ids
    again = request(scheduler, "sent-again", held[1].num_prompt_tokens)
    again.prompt_token_ids[:] = held[1].prompt_token_ids
    assert scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0


def update(scheduler: Any, step: Any, nans: str = "") -> dict[str, Any]:
    """Outputs by request of a step in which the request of this name had logits that are not finite."""
    names = list(step.num_scheduled_tokens)
    counts = [int(name == nans) for name in names]
    outputs = scheduler.update_from_output(step, output_of_new_runner(names, counts))
    return {one.request_id: one for client in outputs.values() for one in client.outputs}


def cached_blocks(scheduler: Any) -> set[int]:
    """Blocks that a later prompt could be given."""
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return {block.block_id for block in blocks if block.block_hash is not None}


def sharing(scheduler: Any) -> tuple[Any, Any, Any, Any]:
    """A prompt of a block and a bit, in flight; another of the same beginning found the block meanwhile.

    Returns (the second request, an uninvolved one, the first step, the second step).
    """
    size = scheduler.cache_config.block_size
    first = request(scheduler, NAN, size + 3)
    request(scheduler, OTHER, 9)
    one = scheduler.schedule()
    second = request(scheduler, "same-beginning", size + 40)
    second.prompt_token_ids[:size] = first.prompt_token_ids[:size]
    rehash(scheduler, second)
    two = scheduler.schedule()
    assert two.num_scheduled_tokens["same-beginning"] == 40
    return second, scheduler.requests[OTHER], one, two


def rehash(scheduler: Any, changed: Any) -> None:
    """The hashes of a request whose prompt was changed."""
    changed._all_token_ids[: changed.num_prompt_tokens] = changed.prompt_token_ids
    changed.block_hashes = []
    changed.block_hashes = scheduler.hasher(changed)


def test_who_took_poisoned_blocks_before_the_count_is_computed_again(scheduler: Any) -> None:
    """The blocks of a step are in the prefix cache while it runs: its count comes after others may have found them."""
    second, other, one, two = sharing(scheduler)
    poisoned = {block for group in scheduler.kv_cache_manager.get_block_ids(NAN) for block in group}
    held = {block for group in scheduler.kv_cache_manager.get_block_ids("same-beginning") for block in group}
    assert poisoned & held
    outputs = update(scheduler, one, NAN)
    assert set(outputs) == {NAN, OTHER}
    assert second not in scheduler.running
    assert other in scheduler.running
    assert not cached_blocks(scheduler) & (poisoned | held)
    # What the second made of the poison is not handed out, and that it is not finite does not end it.
    assert set(update(scheduler, two, "same-beginning")) == {OTHER}
    assert scheduler.requests["same-beginning"] is second
    three = scheduler.schedule()
    assert three.num_scheduled_tokens["same-beginning"] == second.num_prompt_tokens  # all of it, from nothing
    done = update(scheduler, three)
    assert list(done["same-beginning"].new_token_ids) == [7]
    assert done["same-beginning"].finish_reason is None


def test_without_that_it_would_go_on_from_poison(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: blocks leave the prefix cache, and who holds them keeps them."""
    monkeypatch.setattr(isolation, "recompute", lambda scheduler, lost: None)
    second, _, one, _ = sharing(scheduler)
    update(scheduler, one, NAN)
    assert second in scheduler.running


def test_who_shares_older_blocks_goes_on(scheduler: Any) -> None:
    """Blocks that earlier steps wrote are clean: to compute them again would let the poison reach others."""
    size = scheduler.cache_config.block_size
    first = request(scheduler, NAN, size + 3)
    update(scheduler, scheduler.schedule())
    second = request(scheduler, "same-beginning", size + 5)
    second.prompt_token_ids[:size] = first.prompt_token_ids[:size]
    rehash(scheduler, second)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {NAN: 1, "same-beginning": 5}
    assert set(update(scheduler, step, NAN)) == {NAN, "same-beginning"}
    assert second in scheduler.running


def test_a_chunk_of_a_prompt_ends_its_request(scheduler: Any) -> None:
    """A chunk gives no token, but its last row is counted like any other."""
    from vllm.v1.engine import FinishReason

    most = scheduler.max_num_scheduled_tokens
    request(scheduler, NAN, most + 100)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {NAN: most}
    assert update(scheduler, step, NAN)[NAN].finish_reason == FinishReason.ERROR
    assert not cached_blocks(scheduler)


def test_blocks_of_a_client_that_gave_up_leave_the_prefix_cache_too(scheduler: Any) -> None:
    """The count of a step names a request that is gone; its blocks would still be found."""
    from vllm.v1.request import RequestStatus

    second, other, one, two = sharing(scheduler)
    poisoned = {block for group in scheduler.kv_cache_manager.get_block_ids(NAN) for block in group}
    scheduler.finish_requests(NAN, RequestStatus.FINISHED_ABORTED)
    assert cached_blocks(scheduler) & poisoned
    assert set(update(scheduler, one, NAN)) == {OTHER}
    assert not cached_blocks(scheduler) & poisoned
    assert second not in scheduler.running
    update(scheduler, two, NAN)
    assert not scheduler.left
    assert other in scheduler.running


def test_blocks_that_hold_something_else_since_are_not_lost(scheduler: Any) -> None:
    """A block that was given back may be another's when the count arrives; the prefix cache has another hash then."""
    from vllm.v1.request import RequestStatus

    request(scheduler, NAN, scheduler.cache_config.block_size + 3)
    scheduler.schedule()
    scheduler.finish_requests(NAN, RequestStatus.FINISHED_ABORTED)
    left = scheduler.left[NAN]
    (before,) = left.cached(scheduler)
    assert [isolation.behind(scheduler, before, tokens) != set() for tokens in (0, 400)] == [True, False]
    scheduler.kv_cache_manager.evict_blocks(isolation.behind(scheduler, before, 0))
    (after,) = left.cached(scheduler)
    assert isolation.behind(scheduler, after, 0) == set()


@pytest.mark.parametrize("runner", RUNNERS)
def test_without_nans_nobody_is_ended(scheduler: Any, runner: str) -> None:
    for name in (CLEAN, OTHER):
        request(scheduler, name, 6)
    step = scheduler.schedule()
    outputs = scheduler.update_from_output(step, RUNNERS[runner](list(step.num_scheduled_tokens), [0, 0]))
    assert [one.finish_reason for one in outputs[0].outputs] == [None, None]
    assert len(scheduler.running) == 2


def test_a_runner_that_counts_nothing_is_named_once(scheduler: Any, caplog: pytest.LogCaptureFixture) -> None:
    request(scheduler, CLEAN, 6)
    with caplog.at_level("ERROR", logger="vllm.plugins.k3"):
        for _ in range(2):
            step = scheduler.schedule()
            output = output_of_new_runner(list(step.num_scheduled_tokens), [0])
            output.num_nans_in_logits = None
            scheduler.update_from_output(step, output)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["vLLM's model runner counts no NaNs"]


def test_the_configuration_names_the_asynchronous_scheduler(configuration: Any, scheduler: Any) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert configuration.scheduler_config.scheduler_cls == f"{isolation.__name__}.scheduler"
    assert isinstance(scheduler, AsyncScheduler)
    assert isolation.counting()
