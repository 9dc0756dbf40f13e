"""What the parts of production.py share: a checkpoint, an engine stepped by hand, and the rule for comparing outputs.

The rule (docs/serving.md, "What is checked under load"): the same batch gives the same bits. In other company a
request may differ by rounding: while its tokens are the same, its log probabilities differ by at most ``Rule.bound``,
and the first token that differs was a tie, within ``Rule.tie`` of the other in the solo run. What follows a different
token is another text and is not compared.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_smoke
import torch
from gpu_smoke import prompts, say, start
from torch import Tensor

GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if GPU else "float32"
TOP = 8


@dataclass(frozen=True)
class Rule:
    """Bounds in nats. bfloat16: logits of size 4 to 8 have steps of 2^-5, and both of a pair are rounded behind some
    layers of bfloat16 inputs: eight steps. float32: the golden data's bound for two implementations."""

    bound: float
    tie: float


RULE = Rule(0.25, 0.25) if GPU else Rule(2e-3, 2e-3)


@dataclass
class Checks:
    """Rows of one part: each is printed and written when it is known."""

    part: str
    failed: list[str] = field(default_factory=list)

    def __call__(self, check: str, ok: bool, **figures: Any) -> bool:
        say(part=self.part, check=check, ok=bool(ok), **figures)
        if not ok:
            self.failed.append(check)
        return ok

    def guard(self, check: str, run: Callable[[], Any]) -> Any:
        """Run one check; what it raises is a failed row and the next one runs."""
        began = time.monotonic()
        try:
            return run()
        except Exception as error:
            import traceback

            traceback.print_exc()
            self(check, False, reason=f"{type(error).__name__}: {error}"[:500], seconds=round(time.monotonic() - began))
            return None


def checkpoint(work: Path, *, every_expert: bool = True, **text: Any) -> Path:
    """A random Kimi K3 of long memory, with heads of the kernels' sizes on a GPU.

    every_expert: each token goes to all experts. A near-tie in the router, which legitimately moves a row by far more
    than rounding does, can then neither hide a mixed-up row nor look like one.
    """
    from k3_core.checkpoint import tiny_config, write_tiny

    changes = gpu_smoke.tiny_text("k3", GPU) | text
    if every_expert:
        changes["num_experts_per_token"] = tiny_config("k3").text.num_experts
    return write_tiny(work / f"k3-{int(every_expert)}", tiny_config("k3", **changes), seed=3, long_memory=True)


@dataclass
class Job:
    """One request."""

    ids: list[int]
    count: int = 8
    image: Any = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """What came of it: tokens, the log probabilities of the best at each step, why it ended, tokens from the cache."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    finish: str | None
    cached: int


class Served:
    """An engine of this process, stepped by hand."""

    def __init__(self, folder: Path, **options: Any) -> None:
        defaults: dict[str, Any] = {"dtype": DTYPE, "max_num_batched_tokens": 256}
        if not GPU:
            defaults |= {"enforce_eager": True}
        self.llm = start(folder, **defaults | options)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.config = self.engine.vllm_config
        self.external: dict[str, str] = {}
        self.results: dict[str, Result] = {}
        self.steps: list[tuple[tuple[str, int], ...]] = []
        self.order: dict[str, int] = {}
        self.after_schedule: Callable[[Any], None] | None = None
        self.preempted = 0
        self.preempted_names: set[str] = set()
        #: Steps whose output carried NaN counts, and those in which a count was not zero.
        self.counted = self.poisoned = 0
        #: How many drafted tokens were accepted: how often.
        self.accepted: Counter[int] = Counter()
        self._watch()

    def _watch(self) -> None:
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def watched(*args: Any, **named: Any) -> Any:
            output = schedule(*args, **named)
            rows = tuple((self.external.get(name, name), n) for name, n in output.num_scheduled_tokens.items())
            self.steps += [rows] if rows else []
            self.preempted += len(output.preempted_req_ids or ())
            self.preempted_names |= set(output.preempted_req_ids or ())
            if self.after_schedule is not None and rows:
                hook, self.after_schedule = self.after_schedule, None
                hook(output)
            return output

        def updated(scheduled: Any, output: Any) -> Any:
            self.order = dict(output.req_id_to_index)
            self.counted += output.num_nans_in_logits is not None
            self.poisoned += any((output.num_nans_in_logits or {}).values())
            for name in scheduled.scheduled_spec_decode_tokens:
                sampled = output.sampled_token_ids[output.req_id_to_index[name]]
                self.accepted.update([len(sampled) - 1] if len(sampled) else [])
            return update(scheduled, output)

        self.scheduler.schedule, self.scheduler.update_from_output = watched, updated

    def add(self, job: Job) -> str:
        """Enqueue a request and return the engine's own name for it."""
        from vllm import SamplingParams

        values: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": TOP}
        request: dict[str, Any] = {"prompt_token_ids": list(job.ids)}
        if job.image is not None:
            request["multi_modal_data"] = {"image": [job.image]}
        sampling = SamplingParams(**values | {"max_tokens": job.count} | job.sampling)
        (name,) = self.llm.enqueue([request], sampling, use_tqdm=False)
        self.external[name] = self.engine.output_processor.request_states[name].external_req_id
        return str(name)

    def step(self) -> None:
        """One step of the engine; finished requests go to ``results`` under the name that ``add`` gave."""
        names = {value: key for key, value in self.external.items()}
        for output in self.engine.step():
            if output.finished:
                completion = output.outputs[0]
                rows = [{t: e.logprob for t, e in row.items()} for row in completion.logprobs or []]
                name = names.get(output.request_id, "")
                if not name:  # aborted while its last step was under way
                    continue
                self.results[name] = Result(
                    list(completion.token_ids), rows, completion.finish_reason, output.num_cached_tokens or 0
                )
                del self.external[name]

    def until_generated(self, name: str, tokens: int) -> None:
        """Step until the request has this many tokens of output; an error if it ends or does not come to run."""
        for _ in range(500):
            request = self.scheduler.requests.get(name)
            if request is None:
                raise AssertionError(f"request {name} ended before it had {tokens} tokens")
            if request.num_output_tokens >= tokens:
                return
            self.step()
        raise AssertionError(f"request {name} does not run: {request.num_output_tokens} tokens after 500 steps")

    def abort(self, name: str) -> None:
        self.engine.abort_request([name], internal=True)
        self.external.pop(name, None)

    def drain(self) -> None:
        """Step until nothing is left; an engine that makes no progress is an error."""
        steps = 0
        while self.engine.has_unfinished_requests():
            self.step()
            steps += 1
            if steps > 50_000:
                raise AssertionError("requests that do not end in 50,000 steps")

    def clear(self) -> None:
        """As if new: nothing running, nothing cached. For the check after one that failed."""
        self.after_schedule = None
        for name in list(self.external):
            self.abort(name)
        self.drain()
        self.results.clear()
        self.forget()

    def run(self, jobs: Iterable[Job]) -> list[Result]:
        """All of them at once."""
        names = [self.add(job) for job in jobs]
        self.drain()
        return [self.results.pop(name) for name in names]

    def forget(self) -> None:
        for _ in range(8):  # blocks of a request that ended while a step was under way come free a step later
            if self.llm.reset_prefix_cache() is not False:
                break
            self.step()
        else:
            raise AssertionError("the prefix cache cannot be emptied: blocks are still held")
        self.steps.clear()

    def solo(self, jobs: Iterable[Job]) -> list[Result]:
        """One after another, each from an empty prefix cache."""
        results = []
        for job in jobs:
            self.forget()
            results += self.run([job])
        return results

    # ------------------------------------------------------------------------------------------------------- states

    def layers(self) -> dict[str, Any]:
        """KDA layers by name."""
        context = self.config.compilation_config.static_forward_context
        return {name: layer for name, layer in context.items() if hasattr(layer, "plan_prefill")}

    def groups(self) -> list[list[str]]:
        """Names of the layers of every cache group."""
        return [list(group.layer_names) for group in self.scheduler.kv_cache_config.kv_cache_groups]

    def blocks(self, name: str) -> tuple[list[int], ...]:
        """Cache blocks of a running request, by group."""
        return tuple(list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(name))

    def snapshots(self) -> dict[tuple[bytes, str], Tensor]:
        """States that the prefix cache holds: (hash of the block's prefix, layer) -> conv_state and recurrent_state."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        layers, groups = self.layers(), self.groups()
        found: dict[tuple[bytes, str], Tensor] = {}
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is None or block.is_null:
                continue
            for name in groups[get_group_id(block.block_hash)]:
                if name in layers:
                    states = [pool[block.block_id].float().flatten().cpu() for pool in layers[name].states()]
                    found[bytes(block.block_hash), name] = torch.cat(states)
        return found


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def compare_states(ours: dict[Any, Tensor], reference: dict[Any, Tensor]) -> dict[str, Any]:
    """Snapshots of the same prefixes: how many, how many with the same bits, the largest relative difference."""
    common = ours.keys() & reference.keys()
    same = sum(digest(ours[key]) == digest(reference[key]) for key in common)
    worst = max((float((ours[k] - reference[k]).norm() / reference[k].norm()) for k in common), default=0.0)
    finite = all(bool(ours[key].isfinite().all()) for key in common)
    return {"snapshots": len(common), "same_bits": same, "worst": worst if finite else float("inf")}


# ------------------------------------------------------------------------------------------------------------ the rule


@dataclass
class Difference:
    """Two results of one request: same bits, differences of log probabilities, the gap of the first other token."""

    bits: bool
    deltas: list[float]
    gap: float | None


def difference(ours: Result, reference: Result, greedy: bool = True) -> Difference:
    """Up to and with the first position whose tokens differ. gap: in the reference, infinite where it has no such
    token among its best; None where all tokens are the same, or were sampled."""
    if ours == reference or (ours.tokens, ours.logprobs) == (reference.tokens, reference.logprobs):
        return Difference(True, [0.0], None)
    deltas: list[float] = []
    for position, (mine, theirs) in enumerate(zip(ours.logprobs, reference.logprobs, strict=False)):
        deltas += [abs(mine[t] - theirs[t]) for t in mine.keys() & theirs.keys()]
        a, b = ours.tokens[position], reference.tokens[position]
        if a != b:
            gap = theirs[b] - theirs[a] if a in theirs else float("inf")
            return Difference(False, deltas, gap if greedy else None)
    if len(ours.tokens) != len(reference.tokens):
        return Difference(False, deltas, float("inf"))
    return Difference(False, deltas, None)


def holds(found: Difference, rule: Rule = RULE) -> bool:
    """Whether a difference is within the rule; NaN is not."""
    small = all(delta <= rule.bound for delta in found.deltas)
    return small and (found.gap is None or found.gap <= rule.tie)


def judged(found: list[Difference], rule: Rule = RULE) -> dict[str, Any]:
    """Figures of many differences, and whether all are within the rule."""
    deltas = torch.tensor([d for one in found for d in one.deltas] or [0.0], dtype=torch.float64)
    chosen = deltas[torch.randperm(len(deltas))[:1_000_000]]
    gaps = [one.gap for one in found if one.gap is not None]
    figures = {f"p{q}": float(chosen.quantile(q / 100)) for q in (50, 90, 99)}
    return {
        "ok": all(holds(one, rule) for one in found),
        "requests": len(found),
        "same_bits": sum(one.bits for one in found),
        "other_tokens": len(gaps),
        **{name: round(value, 6) for name, value in figures.items()},
        "max": float(deltas.max()),
        "worst_gap": max(gaps, default=0.0),
        "outside": sum(not holds(one, rule) for one in found),
    }


def pairs(ours: list[Result], reference: list[Result], rule: Rule = RULE) -> dict[str, Any]:
    """``judged`` of two lists of greedy results."""
    return judged([difference(a, b) for a, b in zip(ours, reference, strict=True)], rule)


def jobs_of(lengths: Iterable[int], seed: int, count: int = 8) -> list[Job]:
    """Greedy requests with random prompts."""
    return [Job(ids, count) for ids in prompts(tuple(lengths), seed=seed, vocabulary=500)]
