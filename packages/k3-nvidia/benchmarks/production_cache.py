"""Parts of production.py about the prefix cache (mode align) and long prompts."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_smoke
import torch
from gpu_smoke import prompts, stop
from production_support import DTYPE, GPU, RULE, Checks, Job, Rule, Served, checkpoint, compare_states, pairs

#: Relative difference of a whole state computed in other company. bfloat16: the golden data's bound for 95% of the rows
#: of one layer; float32: a few thousand roundings of 2^-24. A state that was not copied differs by its own size.
STATE_BOUND = 0.04 if GPU else 1e-3
NEW = 6
#: What a request finds that reads a state nobody wrote for it: finite, and no state of these prompts.
STALE = 1.0


@contextlib.contextmanager
def without_copies() -> Iterator[None]:
    """The mutant: states are not copied from a finished block to the next one, in either of vLLM's runners."""
    from vllm.v1.worker import mamba_utils

    def skip(*args: Any, **named: Any) -> None:
        return None

    places = [(mamba_utils, "do_mamba_copy_block"), (mamba_utils.MambaSpecDecodeGPUContext, "run_fused_precopy")]
    honest = [(owner, name, getattr(owner, name)) for owner, name in places if hasattr(owner, name)]
    if not honest:
        raise AssertionError("this vLLM copies states in another place: the mutant would be none")
    for owner, name, _ in honest:
        setattr(owner, name, skip)
    try:
        yield
    finally:
        for owner, name, function in honest:
            setattr(owner, name, function)


def block_of(served: Served) -> int:
    """Tokens between two snapshots."""
    cache = served.config.cache_config
    return int(cache.mamba_block_size or cache.block_size)


def align(check: Checks, work: Path, seconds: float) -> None:
    """Hits, misses, cuts, aborts, eviction and preemption: states and tokens as if each prompt had been alone."""
    folder = checkpoint(work)
    odd = 200 if GPU else 48  # never a multiple of a block: chunks end in the middle of one
    served = Served(folder, max_num_batched_tokens=odd, max_model_len=4096 if GPU else 1024, enable_prefix_caching=True)
    block = block_of(served)
    cases = Cases(check, served, block)
    check("mode", str(served.config.cache_config.mamba_cache_mode) == "align", block=block, step_tokens=odd)
    for name in ("again", "aba", "concurrent", "lengths", "aborted", "stale", "mutant"):
        check.guard(f"align {name}", getattr(cases, name))
    del served, cases
    stop(None)
    check.guard("align small cache", lambda: small_cache(check, folder, odd, block))
    stop(None)


class Cases:
    """Checks on one engine. ``first`` and ``other`` are prompts of some blocks."""

    def __init__(self, check: Checks, served: Served, block: int) -> None:
        self.check, self.served, self.block = check, served, block
        self.first, self.other = (Job(ids, NEW) for ids in prompts((2 * block + 44, 2 * block + 34), 4, 500))
        self.alone = served.solo([self.other, self.first])
        self.states = served.snapshots()
        check("align: snapshots exist", bool(self.states), snapshots=len(self.states))

    def again(self) -> None:
        """The same call gives the same bits."""
        results = self.served.solo([self.first])
        found = compare_states(self.served.snapshots(), self.states)
        same = found["snapshots"] > 0 and found["snapshots"] == found["same_bits"]
        self.check("align: recomputed alone, same bits", same, **found)
        figures = pairs(results, self.alone[1:], Rule(0, 0))
        self.check("align: tokens recomputed alone, same bits", **figures)

    def aba(self) -> None:
        """A, B, A, and A made longer."""
        self.served.forget()
        longer = Job(self.first.ids + prompts((70,), 5, 500)[0], NEW)
        results = [self.served.run([job])[0] for job in (self.first, self.other, self.first, longer)]
        hits = [result.cached for result in results]
        found = compare_states(self.served.snapshots(), self.states)
        self.check("align: A, B, A keeps A's snapshots", found["same_bits"] == found["snapshots"] > 0, **found)
        whole = 2 * self.block
        self.check("align: A, B, A hits", hits == [0, 0, whole, whole], hits=hits)
        (fresh,) = self.served.solo([longer])
        expected = [self.alone[1], self.alone[0], self.alone[1], fresh]
        self.check("align: A, B, A tokens", **pairs(results, expected))

    def concurrent(self) -> None:
        """Cold prompts with the same beginning, all at once."""
        tails = prompts((1, 9, 40, 77), 6, 500)
        jobs = [Job(self.first.ids[: 2 * self.block + 3] + tail, NEW) for tail in tails]
        alone = self.served.solo(jobs)
        self.served.forget()
        results = self.served.run(jobs)
        found = compare_states(self.served.snapshots(), self.states)
        ok = found["snapshots"] > 0 and found["worst"] <= STATE_BOUND
        self.check("align: concurrent cold prompts, snapshots", ok, bound=STATE_BOUND, **found)
        self.check("align: concurrent cold prompts, tokens", **pairs(results, alone))

    def lengths(self) -> None:
        """Prompts of k blocks, and one token more and less; cold, then cached."""
        for size in [k * self.block + d for k in (1, 2) for d in (-1, 0, 1)]:
            job = Job(prompts((size,), 20 + size, 500)[0], NEW)
            (cold,) = self.served.solo([job])
            (warm,) = self.served.run([job])
            most = (size - 1) // self.block * self.block
            ok = warm.cached <= most and warm.cached % self.block == 0
            figures = pairs([warm], [cold])
            ok &= figures.pop("ok")
            self.check(f"align: a prompt of {size} tokens", ok, cached=warm.cached, possible=most, **figures)

    def aborted(self) -> None:
        """A request that is aborted between scheduling and execution, then sent again."""
        for chunk in (1, 2):
            self.served.forget()
            name = self.served.add(self.first)
            for _ in range(chunk - 1):
                self.served.step()
            self.served.after_schedule = lambda output, name=name: self.served.abort(name)
            self.served.step()
            self.served.drain()
            results = self.served.run([self.first])
            found = compare_states(self.served.snapshots(), self.states)
            ok = found["snapshots"] > 0 and found["worst"] <= STATE_BOUND
            self.check(f"align: aborted in chunk {chunk}, snapshots", ok, **found)
            self.check(f"align: aborted in chunk {chunk}, tokens", **pairs(results, self.alone[1:]))

    def left_behind(self, value: float) -> None:
        """``value`` in every state of every block but vLLM's null block; nothing runs and nothing is cached then.

        vLLM zeroes new blocks of latent pages, not of states: those hold what their last owner left in them.
        """
        self.served.forget()
        for layer in self.served.layers().values():
            for pool in layer.states():
                pool[1:] = value

    def stale(self) -> None:
        """NaN in all free blocks reaches nobody: new sequences start from zeros, copies replace whole states."""
        self.left_behind(float("nan"))
        results = self.served.run([self.first])
        found = compare_states(self.served.snapshots(), self.states)
        same = found["snapshots"] > 0 and found["snapshots"] == found["same_bits"]
        self.check("align: what free blocks hold is not read, states", same, **found)
        figures = pairs(results, self.alone[1:], Rule(0, 0))
        self.check("align: what free blocks hold is not read, tokens", **figures)
        self.served.forget()

    def mutant(self) -> None:
        """The check must catch an engine that does not carry the state over to the next block.

        The block then gives what it held: a finite value, put there first, or a block that an earlier check left NaN in
        would end the request by name, without a snapshot to compare.
        """
        self.left_behind(STALE)
        with without_copies():
            results = self.served.run([self.first])
            found = compare_states(self.served.snapshots(), self.states)
        whole = results[0].finish == "length" and found["snapshots"] > 0
        wrong = STATE_BOUND < found["worst"] < math.inf and not pairs(results, self.alone[1:])["ok"]
        self.check("align: a skipped copy is noticed in states and tokens", whole and wrong, **found)
        self.served.forget()


def small_cache(check: Checks, folder: Path, odd: int, block: int) -> None:
    """Eviction and preemption: a cache for few requests."""
    served = Served(
        folder,
        max_num_batched_tokens=odd,
        max_model_len=3 * block,
        max_num_seqs=8,
        enable_prefix_caching=True,
        num_gpu_blocks_override=16,
    )
    lengths = (2 * block - 6, block - 8, 2 * block - 10, 2 * block - 4, block - 28, 2 * block - 16)
    jobs = [Job(ids, 24) for ids in prompts(lengths, 21, 500)]
    alone = served.solo(jobs)
    states = served.snapshots()
    served.forget()
    results = served.run(jobs)
    figures = pairs(results, alone)
    check("align: preempted and resumed, tokens", figures.pop("ok") and served.preempted > 0,
          preempted=served.preempted, **figures)  # fmt: skip
    served.forget()
    rounds = [served.run([job])[0] for job in (*jobs, *jobs)]
    check("align: evicted and computed again, tokens", **pairs(rounds, alone + alone))
    found = compare_states(served.snapshots(), states)
    check("align: evicted and computed again, snapshots", found["worst"] <= STATE_BOUND, **found)


# ---------------------------------------------------------------------------------------------------------------- long


def long(check: Checks, work: Path, seconds: float) -> None:
    """A prompt of 200,000 tokens, in two ways of cutting it, and a needle that the reference recalls as well."""
    most = 262_144 if GPU else 2048
    length = 200_000 if GPU else 900
    folder = checkpoint(work, max_position_embeddings=most)
    near = (512, 4096) if GPU else (64, 300)
    results = {}
    for budget in (8192, 5000) if GPU else (256, 100):
        results[budget] = check.guard(f"long {budget}", lambda b=budget: _long(check, folder, most, length, b, near))
        stop(None)
    (a, b) = results.values()
    if a and b:
        check(f"long: {length} tokens cut in two ways", budgets=list(results), **pairs(a, b))


def needle(length: int, seed: int) -> list[Job]:
    """Two prompts that differ in one token near the beginning: the needle."""
    (ids,) = prompts((length,), seed, 500)
    return [Job(ids, NEW), Job([*ids[:10], (ids[10] + 250) % 500 + 4, *ids[11:]], NEW)]


def _long(check: Checks, folder: Path, most: int, length: int, budget: int, near: tuple[int, ...]) -> Any:
    options: dict[str, Any] = {"compilation_config": gpu_smoke.GRAPHS} if GPU else {}
    served = Served(folder, max_model_len=most, max_num_batched_tokens=budget, enable_prefix_caching=True, **options)
    began = time.monotonic()
    far = served.solo(needle(length, 31)[:1])
    finite = all(value == value for row in far[0].logprobs for value in row.values())
    ok = finite and len(far[0].tokens) == NEW and far[0].finish == "length"
    check(f"long: {length} tokens, {budget} a step", ok, seconds=round(time.monotonic() - began, 2))
    for size in near:
        _recall(check, folder, served, size, budget)
    return far


def _recall(check: Checks, folder: Path, served: Served, size: int, budget: int) -> None:
    """How far the needle moves the log probabilities of the next token: ours, and the reference's in fp32."""
    from k3_core.reference import load_model

    device = "cuda" if GPU else "cpu"
    jobs = needle(size, 31)
    ours = served.solo(jobs)
    exact, rounded = (load_model(folder, dtype, device) for dtype in (torch.float32, getattr(torch, DTYPE)))
    errors, theirs, moved = [], [], 0.0
    rows = []
    for job, result in zip(jobs, ours, strict=True):
        reference = exact.logits(torch.tensor(job.ids)).float().log_softmax(-1)[-1]
        bf16 = rounded.logits(torch.tensor(job.ids)).float().log_softmax(-1)[-1]
        rows.append(reference)
        errors += [abs(value - float(reference[token])) for token, value in result.logprobs[0].items()]
        theirs += [abs(float(bf16[token] - reference[token])) for token in result.logprobs[0]]
    moved = float((rows[0] - rows[1]).abs().max())
    common = ours[0].logprobs[0].keys() & ours[1].logprobs[0].keys()
    seen = max((abs(ours[0].logprobs[0][t] - ours[1].logprobs[0][t]) for t in common), default=float("inf"))
    allowed = max(RULE.bound, 2 * max(theirs))
    check(
        f"long: needle {size} tokens ago, {budget} a step, against the reference",
        max(errors) <= allowed,
        worst=max(errors),
        allowed=allowed,
        needle_moves_reference=moved,
        needle_moves_ours=seen,
    )
