"""A request whose logits are not finite ends alone, by name, with an error; nobody else notices.

NaN in a request's state (a damaged cache page, an overflow) makes its logits NaN, from which a sampler draws token 0 or
anything else, for ever, or a token that does not exist: vLLM's second model runner then looks it up in the next step,
which is already under way, and the lookup's assertion ends the whole engine (seen on an H200 with a vocabulary that is
no multiple of 1024). Four pieces end the request alone, at the step it happens in, without a wait in the decoding path:

* :func:`mark` turns infinite logits into NaN, on the device, so that one count covers both;
* vLLM counts the NaNs of every row on the device and copies the counts beside the sampled tokens
  (``VLLM_COMPUTE_NANS_IN_LOGITS``), graphs and asynchronous scheduling included;
* :func:`guard` puts zeros in the place of a row that has a NaN, once it is counted and before a token is drawn from it;
* :func:`scheduler`, vLLM's scheduler with one more look at those counts, finishes the requests concerned with the
  status ``FINISHED_ERROR`` (the client gets an error, not text), logs their ids, and takes their blocks out of the
  prefix cache, so that no later prompt resumes from a poisoned state. Blocks that others hold stay theirs, but for
  those of this step and later ones: who took them from the prefix cache before the count was here computes again.

Latent attention may hide what its cache holds: FlashAttention 3 gives finite values where a row is NaN. A vendor whose
attention does so looks at each row before it is written, and marks its request's last row (``LatentAttention.marks``).
A page that was damaged after it was written is not seen by that.

What keeps the others clean is not here: operators read and write the slots of their own rows only, new sequences start
from zeros whatever a slot holds, and vLLM zeroes the latent pages it hands out again.

With speculation vLLM counts a row a draft but names a row a request, so the count of one request would be read as
another's: :func:`count_by_request` sums the rows of each request, on the device, in vLLM's second model runner.

Off where it cannot be right or free: with speculation in vLLM's first model runner, and in releases that wait for the
counts in every step, unless ``VLLM_COMPUTE_NANS_IN_LOGITS=1`` asks for it there. ``VLLM_COMPUTE_NANS_IN_LOGITS=0``
switches all of it off; ``--scheduler-cls`` keeps the user's own scheduler, which then ends nothing. Each of these, and
a runner that counts nothing, is said in one line of the log.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger("vllm.plugins.k3")

COUNT = "VLLM_COMPUTE_NANS_IN_LOGITS"
#: Modules of vLLM's second model runner that count NaNs.
COUNTERS = ("sample.sampler", "spec_decode.rejection_sampler")


def install(vllm_config: Any) -> bool:
    """Have the engine of ``vllm_config`` end poisoned requests; whether it will. For a configuration hook."""
    settings = vllm_config.scheduler_config
    name = f"{__name__}.{scheduler.__name__}"
    if settings.scheduler_cls == name:
        return True
    asked = os.environ.get(COUNT, "")
    if vllm_config.speculative_config is not None and not (
        getattr(vllm_config, "use_v2_model_runner", False) and count_by_request()
    ):
        logger.warning("speculation: vLLM's counts name the wrong request, so none is ended for logits not finite")
        return False
    if not asked and not counts_without_waiting():
        return False
    if asked == "0":
        logger.warning("%s=0: requests with logits that are not finite will not be ended", COUNT)
        return False
    if settings.scheduler_cls is not None:
        logger.warning("--scheduler-cls replaces the scheduler that ends requests with logits that are not finite")
        return False
    os.environ[COUNT] = "1"  # worker processes inherit it
    if not counting():
        logger.warning("%s=1 comes too late in this process: requests with logits not finite will not be ended", COUNT)
        return False
    settings.scheduler_cls = name
    return True


def counts_without_waiting() -> bool:
    """Whether this vLLM copies the counts beside the sampled tokens; the same change brought the switch to raise."""
    from vllm import envs

    return "VLLM_RAISE_ON_LOGIT_NANS" in envs.environment_variables


def counting() -> bool:
    """Whether vLLM counts NaNs in logits, so that marking them has a use."""
    from vllm import envs

    return bool(envs.VLLM_COMPUTE_NANS_IN_LOGITS)


def mark(logits: Tensor) -> Tensor:
    """``logits`` [n, vocab] with NaN where they were infinite, in place, all other bits unchanged: x + 0 * x."""
    return logits.add_(logits, alpha=0)


def count_and_clear(logits: Tensor) -> Tensor:
    """NaNs of each row of ``logits`` [n, vocab], int32 [n]; a row that has one becomes zeros, in place.

    On the device: whatever sampler reads the row next draws a token that exists.
    """
    counts = logits.isnan().sum(-1, dtype=torch.int32)
    logits.masked_fill_((counts > 0)[:, None], 0)
    return counts


def guard() -> bool:
    """Have vLLM's second model runner count by :func:`count_and_clear`, in this process; whether it could be told to.

    It counts before it samples, from the very tensor that it samples from; the first runner counts afterwards, and
    samples by ``torch.argmax``, which gives the place of a NaN (with FlashInfer's sampler, top-k or top-p without a
    seed, what a row of NaN gives is FlashInfer's affair and was not tried).
    """
    try:
        modules = [importlib.import_module(f"vllm.v1.worker.gpu.{name}") for name in COUNTERS]
    except ImportError:
        modules = []
    if not modules or not all(hasattr(module, "get_num_nans") for module in modules):
        logger.warning("vLLM samples from rows with NaN before we see them: such a request may end the engine")
        return False
    for module in modules:
        module.__dict__["get_num_nans"] = count_and_clear
    return True


def count_by_request() -> bool:
    """Have vLLM's second model runner sum the counts of a request's drafts, in this process; whether it has them."""
    try:
        from vllm.v1.worker.gpu.input_batch import InputBatch
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    except ImportError:
        return False
    if "cu_num_logits" not in InputBatch.__annotations__:
        return False
    cls: Any = RejectionSampler
    honest = cls.__call__
    if getattr(honest, "counts_by_request", False):
        return True

    @functools.wraps(honest)
    def call(self: Any, logits: Tensor, input_batch: Any, *args: Any, **named: Any) -> Any:
        output = honest(self, logits, input_batch, *args, **named)
        if output.num_nans is not None:
            output.num_nans = by_request(output.num_nans, input_batch.cu_num_logits)
        return output

    call.counts_by_request = True  # type: ignore[attr-defined]
    cls.__call__ = call
    return True


def by_request(counts: Tensor, ends: Tensor) -> Tensor:
    """Counts [n] of rows, summed for each request, int32 [B]; its rows are ends[i] to ends[i + 1], ends [B + 1]."""
    running = functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return running[ends[1:]] - running[ends[:-1]]


def poisoned(counts: dict[str, int] | None) -> list[str]:
    """Requests with NaNs in their logits, of vLLM's counts by request (None where nothing was counted)."""
    return [name for name, count in (counts or {}).items() if count > 0]


def scheduler(*args: Any, **named: Any) -> Any:
    """vLLM's scheduler for this configuration (the asynchronous one where that is on), ending poisoned requests."""
    settings = (named["vllm_config"] if "vllm_config" in named else args[0]).scheduler_config
    if settings.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Base
    else:
        from vllm.v1.core.sched.scheduler import Scheduler as Base
    return isolating(Base)(*args, **named)


@functools.cache
def isolating(base: type[Any]) -> type[Any]:
    """``base``, a scheduler of vLLM, that finishes poisoned requests before it takes their tokens."""

    class IsolatingScheduler(base):
        _silent = False

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.left: dict[str, Left] = {}

        def _free_request_blocks(self, request: Any) -> Any:
            if request.num_in_flight_tokens > 0:  # of a client that gave up, or preempted: its step is under way
                name = request.request_id
                groups = [[(block, hash_of(self, block)) for block in ids] for ids in held_by(self, name)]
                known = self.left.setdefault(name, Left([], 0))
                known.blocks.append(groups)
                known.tokens = request.num_in_flight_tokens
            return super()._free_request_blocks(request)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            counts = model_runner_output.num_nans_in_logits
            if not counts and model_runner_output.req_ids and not self._silent:
                self._silent = True
                logger.error("vLLM's model runner counts no NaNs: requests with logits not finite will not be ended")
            names = poisoned(counts)
            ended = end(self, names, starts(scheduler_output, names)) if names else []
            for name in [name for name in self.left if name in scheduler_output.num_scheduled_tokens]:
                self.left[name].tokens -= scheduler_output.num_scheduled_tokens[name]
                if self.left[name].tokens <= 0:
                    del self.left[name]
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            for request in ended:
                add_error(outputs, request)
            return outputs

    return IsolatingScheduler


Blocks = Sequence[Sequence[int]]


@dataclass
class Left:
    """What a request gave back while steps with ``tokens`` tokens of it were under way: (block, hash), by group."""

    blocks: list[list[list[tuple[int, Any]]]]
    tokens: int

    def cached(self, scheduler: Any) -> Iterator[Blocks]:
        """Those of them that the prefix cache still has for what they held then, in their places; the others are 0."""
        for groups in self.blocks:
            yield [[b if h is not None and hash_of(scheduler, b) == h else 0 for b, h in group] for group in groups]


def held_by(scheduler: Any, name: str) -> Blocks:
    """Blocks of a request, by cache group."""
    ids: Blocks = scheduler.kv_cache_manager.get_block_ids(name)
    return ids


def hash_of(scheduler: Any, block: int) -> Any:
    """By which the prefix cache knows this block; None if it does not."""
    return scheduler.kv_cache_manager.block_pool.blocks[block].block_hash


def starts(scheduler_output: Any, names: Iterable[str]) -> dict[str, int]:
    """How many tokens of each of these requests were computed before the step; 0 where the step does not say."""
    cached = scheduler_output.scheduled_cached_reqs
    found = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    found |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    return {name: found.get(name, 0) for name in names}


def end(scheduler: Any, names: Iterable[str], begun: dict[str, int] | None = None) -> list[Any]:
    """Finish the named requests that still run, evict their blocks from the prefix cache, and return them.

    begun: tokens of each that were computed before the step that poisoned it (else: none). Blocks of later tokens are
    poisoned: other requests that hold some, from the prefix cache, are computed again. Those are not finished for what
    their steps under way count, which is of the blocks that they gave back.
    """
    from vllm.v1.request import RequestStatus

    names, left = list(names), getattr(scheduler, "left", {})
    alive = [
        name
        for name in names
        if name in scheduler.requests
        and not scheduler.requests[name].is_finished()
        and not dropped(scheduler.requests[name])
    ]
    manager, lost = scheduler.kv_cache_manager, set[int]()
    for name in names:
        held = list(left[name].cached(scheduler)) if name in left else []
        for ids in [*held, *([held_by(scheduler, name)] if name in alive else [])]:
            lost |= behind(scheduler, ids, (begun or {}).get(name, 0))
            manager.evict_blocks(behind(scheduler, ids, 0))
    for name in alive:
        logger.error(
            "request %s: logits that are not finite after %d tokens; the request is ended with an error and its "
            "blocks leave the prefix cache, other requests go on",
            name,
            scheduler.requests[name].num_tokens,
        )
    requests: list[Any] = [scheduler.requests[name] for name in alive]
    # Releases before 0.33 and vLLM's own callers differ in what finish_requests returns; the requests are known here.
    scheduler.finish_requests(alive, RequestStatus.FINISHED_ERROR)
    recompute(scheduler, lost)
    return requests


def dropped(request: Any) -> bool:
    """Whether the oldest step of a request that is under way is of its life before it began anew (``recompute``), so
    that vLLM drops its tokens."""
    return bool(request.drop_stale_output and request.num_stale_output_tokens > 0)


def behind(scheduler: Any, ids: Blocks, tokens: int) -> set[int]:
    """Of a request's blocks, by cache group, those that hold anything behind its first ``tokens`` tokens."""
    null = scheduler.kv_cache_manager.block_pool.null_block.block_id
    return {
        block for size, group in zip(sizes(scheduler), ids, strict=True) for block in [*group][tokens // size :]
    } - {null}


def sizes(scheduler: Any) -> list[int]:
    """Tokens of a block, by cache group."""
    return [int(group.kv_cache_spec.block_size) for group in scheduler.kv_cache_config.kv_cache_groups]


def recompute(scheduler: Any, lost: set[int]) -> None:
    """Preempt running requests that hold blocks of ``lost``; what they computed from them leaves the prefix cache.

    They shared a prefix before the count of the step that wrote it was here, so nothing that they made of it has been
    handed out: steps of theirs that are under way are dropped, as vLLM does when it resets its prefix cache.
    """
    if not lost:
        return
    manager = scheduler.kv_cache_manager

    def of_lost(ids: Blocks) -> set[int]:
        """The blocks of ``ids`` from the first lost one on."""
        first = [
            size * min(i for i, block in enumerate(group) if block in lost)
            for size, group in zip(sizes(scheduler), ids, strict=True)
            if lost & set(group)
        ]
        return behind(scheduler, ids, min(first)) if first else set()

    for known in getattr(scheduler, "left", {}).values():
        for ids in known.cached(scheduler):
            manager.evict_blocks(of_lost(ids))
    for request in list(scheduler.running):
        name = request.request_id
        after = of_lost(held_by(scheduler, name))
        if not after:
            continue
        logger.warning("request %s: it shares blocks with a request whose logits are not finite; computed again", name)
        manager.evict_blocks(after)
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # As vLLM does: it may be resumed in the very next step, and must then be sent whole.
        scheduler.prev_step_scheduled_req_ids.discard(name)


def add_error(outputs: dict[int, Any], request: Any) -> None:
    """Put the error that ``request`` ends with among the ``outputs`` of its client."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    more: dict[str, Any] = {}
    if "error" in EngineCoreOutput.__struct_fields__:  # from 0.33: the words that the client gets
        from vllm.outputs import RequestError

        words = f"the logits of request {request.request_id} were not finite"
        more["error"] = RequestError(code="internal_error", message=words)
    result = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        trace_headers=request.trace_headers,
        **more,
    )
    outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(result)
