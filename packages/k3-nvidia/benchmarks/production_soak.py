"""Part of production.py: minutes of mixed load on a small cache, every output compared with its solo run.

First each distinct request is run alone, from an empty prefix cache, until there are enough of them or a sixth of the
time is over. Then they come back at random for up to five minutes, always more of them in flight than the cache can
hold, so that requests are preempted and resumed: prompts of 1 to 30,000 tokens (log-uniform, mostly short), a third
with one of eight common beginnings, some with an image, some sampled with a seed, one in ten with an output that
crosses a cache block, some aborted by the client. Each output is compared by the documented rule the moment it ends;
requests that are the same in every byte (ids, image, sampling, length) share one solo run, so no output goes
uncompared.

An output outside the rule's fixed bound is looked at again with the reference (:class:`Yardstick`): how far a rounding
moves this very text, and whether both runs are as near to fp32 as twice that. Rows are written every 15 seconds; a
process that does not end is ended, with a traceback, a minute after its ``--seconds``. Five minutes of load want
``--seconds 470`` on an H200.
"""

from __future__ import annotations

import faulthandler
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_smoke import compiled_since, say, stop
from production_support import (
    GPU,
    RULE,
    Checks,
    Difference,
    Job,
    Result,
    Rule,
    Served,
    checkpoint,
    difference,
    holds,
    judged,
)
from torch import Tensor

LONGEST = 30_000 if GPU else 300
LEAST = 3_000 if GPU else 16
IN_FLIGHT = 160 if GPU else 12
LOAD_SECONDS = 300.0 if GPU else 60.0
#: Distinct requests, how many at least, and the share of the time that their solo runs may take.
DISTINCT, FEWEST = (1600, 200) if GPU else (10, 8)
SOLO_SHARE = 0.16
#: Cache blocks: about 7 a request, so that the cache and not the number of sequences is what is short.
BLOCKS = 384 if GPU else 26
REPORT = 15.0
#: Requests in flight may end after the load's time is over; what has not ended then is aborted and not counted.
DRAIN = 20.0
#: Seconds for the reference's opinion, and evaluations of it with other roundings.
APPEAL, DRAWS = 35.0, 12


def _image(seed: int) -> Any:
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 255, (40 + 14 * (seed % 5), 70, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


class Traffic:
    """Distinct requests by number, always the same."""

    def __init__(self, pad: int) -> None:
        self.pad = pad
        draw = random.Random(1)
        self.common = [draw.choices(range(4, 500), k=min(2000, LONGEST // 2)) for _ in range(8)]
        self.images = [_image(seed) for seed in range(6)]

    def length(self, draw: random.Random) -> int:
        top = LONGEST if draw.random() < 0.02 else min(3000, LONGEST)
        return round(top ** draw.random())

    def job(self, number: int) -> Job:
        draw = random.Random(number + 1000)
        ids = draw.choices(range(4, 500), k={5: LONGEST, 6: 1}.get(number) or self.length(draw))
        kind = draw.random()
        image = None
        if number in (5, 6):
            pass
        elif kind < 0.05:
            image, ids = draw.choice(self.images), [*ids[:50], self.pad, *ids[50:100]]
        elif kind < 0.38:
            common = draw.choice(self.common)
            ids = (common[: draw.randrange(1, len(common))] + ids)[:LONGEST]
        sampling: dict[str, Any] = {}
        if GPU and draw.random() < 0.25:  # seeds of a request need a GPU in vLLM 0.32
            sampling = {"temperature": 0.8, "top_p": draw.choice((0.9, 1.0)), "seed": number}
        count = draw.randrange(30, 61) if draw.random() < 0.1 else draw.randrange(1, 9)
        return Job(ids, count, image, sampling)


@dataclass
class Tally:
    """What came of the load so far. Differences of requests inside the rule are kept for the figures."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    longest: int = 0
    shortest: int = 1 << 30
    resumed: int = 0
    odd: list[int] = field(default_factory=list)
    found: list[Difference] = field(default_factory=list)
    outside: list[tuple[int, Result]] = field(default_factory=list)
    #: Outputs beyond half the bound: where, and whether they were preempted or began at a cached state.
    far: list[dict[str, Any]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """As columns of a row."""
        lists = {"odd": self.odd[:20], "compared": len(self.found), "outside": len(self.outside)}
        return {k: v for k, v in vars(self).items() if isinstance(v, int)} | lists


def soak(check: Checks, work: Path, seconds: float) -> None:
    """The solo runs, then the load."""
    faulthandler.dump_traceback_later(seconds + 60, exit=True)
    end = time.monotonic() + seconds
    folder = checkpoint(work, max_position_embeddings=65_536)
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 1024}
    if GPU:
        graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
        options = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 32_768}
        options |= {"compilation_config": graphs}
    began = time.monotonic()
    served = Served(folder, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS, **options)
    compiled_since()
    say(part="soak", started=round(time.monotonic() - began, 1))
    traffic = Traffic(served.config.model_config.hf_config.media_placeholder_token_id)
    left = end - time.monotonic() - LOAD_SECONDS - 1.5 * DRAIN
    jobs, alone = solos(served, traffic, max(min(left, SOLO_SHARE * seconds), 0.05 * seconds))
    check("soak: solo runs", len(alone) >= FEWEST, distinct=len(alone))
    tally, spent = load(served, jobs, alone, min(LOAD_SECONDS, end - time.monotonic() - 1.5 * DRAIN))
    enough = tally.requests >= LEAST and len(tally.found) == tally.finished
    check("soak: load", enough, seconds=round(spent, 1), a_second=round(tally.requests / spent, 1),
          distinct=len(alone), preempted=served.preempted, **tally.figures())  # fmt: skip
    resumed = {"preempted": served.preempted, "resumed_and_compared": tally.resumed}
    check("soak: preempted and resumed under load", not GPU or (served.preempted > 0 < tally.resumed), **resumed)
    late = [] if not GPU else compiled_since()
    check("soak: nothing compiled under load", not late, compiled=late)
    check("soak: every request ended as asked", not tally.odd, odd=tally.odd[:20])
    figures = judged(tally.found)
    figures.pop("ok")
    tally.far.sort(key=lambda row: -row["delta"])
    same = {"outputs": len(tally.far), "requests": len({row["number"] for row in tally.far})}
    same |= {"resumed": sum(row["resumed"] for row in tally.far), "cached": sum(row["cached"] > 0 for row in tally.far)}
    check("soak: beyond half the bound", True, **same, farthest=tally.far[:12])
    del served
    stop(None)
    verdict = appeal(folder, jobs, alone, tally) if tally.outside else {"ok": True}
    ok = verdict.pop("ok") and len(tally.found) > 0
    check("soak: against alone", ok, share=1.0 if enough else None, **figures, **verdict)
    faulthandler.cancel_dump_traceback_later()


def solos(served: Served, traffic: Traffic, limit: float) -> tuple[list[Job], list[Result]]:
    """Distinct requests and what each says alone: as many as fit into the time, and FEWEST."""
    began = time.monotonic()
    jobs: list[Job] = []
    alone: list[Result] = []
    while len(jobs) < FEWEST or (len(jobs) < DISTINCT and time.monotonic() - began < limit):
        jobs.append(traffic.job(len(jobs)))
        alone += served.solo(jobs[-1:])
    say(part="soak", solo_runs=len(alone), seconds=round(time.monotonic() - began, 1))
    served.forget()
    served.preempted = 0
    served.preempted_names.clear()
    return jobs, alone


class Crowd:
    """Requests under way: their numbers, and when an impatient client leaves."""

    def __init__(self, served: Served, jobs: list[Job]) -> None:
        self.served, self.jobs, self.draw = served, jobs, random.Random(77)
        self.numbers: dict[str, int] = {}
        self.leave: dict[str, int] = {}
        self.steps = 0

    def fill(self, most: int) -> int:
        """Add requests until ``most`` are in flight; how many."""
        added = 0
        while len(self.numbers) < most:
            number = self.draw.randrange(len(self.jobs)) if added or self.steps else 5
            name = self.served.add(self.jobs[number])
            self.numbers[name] = number
            if self.draw.random() < (0.05 if GPU else 0.2):
                self.leave[name] = self.steps + self.draw.randrange(0, 6)
            added += 1
        return added

    def give_up(self) -> int:
        """Abort those whose time has come; how many."""
        due = [name for name, when in self.leave.items() if when <= self.steps]
        gone = 0
        for name in due:
            del self.leave[name]
            if name in self.numbers and name not in self.served.results:
                self.served.abort(name)
                del self.numbers[name]
                gone += 1
        return gone

    def ended(self) -> list[tuple[str, int, Result]]:
        """Take what ended: name, number, result."""
        names = list(self.served.results)
        for name in names:
            self.leave.pop(name, None)
        return [(name, self.numbers.pop(name), self.served.results.pop(name)) for name in names]


def load(served: Served, jobs: list[Job], alone: list[Result], limit: float) -> tuple[Tally, float]:
    """Requests until the time is over (and, where that is slow, until there were enough): the tally and seconds."""
    tally, crowd = Tally(), Crowd(served, jobs)
    began = reported = time.monotonic()
    while True:
        spent = time.monotonic() - began
        more = spent < limit if GPU else tally.requests < LEAST + IN_FLIGHT
        if more:
            tally.requests += crowd.fill(IN_FLIGHT)
        elif not crowd.numbers or spent > limit + DRAIN:
            tally.requests -= len(crowd.numbers)
            return tally, min(spent, limit)
        tally.aborted += crowd.give_up()
        served.step()
        crowd.steps += 1
        for name, number, result in crowd.ended():
            resumed = name in served.preempted_names
            served.preempted_names.discard(name)
            count(tally, number, jobs[number], result, alone[number], resumed)
        if time.monotonic() - reported > REPORT:
            reported = time.monotonic()
            say(part="soak", progress=round(spent), preempted=served.preempted, **tally.figures())


def count(tally: Tally, number: int, job: Job, result: Result, alone: Result, resumed: bool) -> None:
    """Compare one output with its solo run and add it to the tally."""
    tally.finished += 1
    tally.resumed += resumed
    tally.prompt_tokens += len(job.ids)
    tally.cached_tokens += result.cached
    tally.images += job.image is not None
    tally.longest, tally.shortest = max(tally.longest, len(job.ids)), min(tally.shortest, len(job.ids))
    if result.finish != "length" or len(result.tokens) != job.count:
        tally.odd.append(number)
    one = difference(result, alone, greedy=not job.sampling)
    if not holds(one, Rule(RULE.bound / 2, RULE.tie / 2)):
        facts = {"number": number, "tokens": len(job.ids), "cached": result.cached, "resumed": resumed, "gap": one.gap}
        tally.far.append(facts | farthest(result, alone))
    if not holds(one):
        tally.outside.append((number, result))
        print(f"soak: outside the bound: {tally.far[-1]}", flush=True)
    tally.found.append(one)


# -------------------------------------------------------------------------------------------------- beyond the bound


def farthest(ours: Result, alone: Result) -> dict[str, Any]:
    """Where two results of one request are farthest apart, up to the first position whose tokens differ."""
    worst: dict[str, Any] = {"delta": 0.0}
    for position, (mine, theirs) in enumerate(zip(ours.logprobs, alone.logprobs, strict=False)):
        for token in mine.keys() & theirs.keys():
            delta = abs(mine[token] - theirs[token])
            if not delta <= worst["delta"]:
                worst = {"delta": delta, "position": position, "token": token, "alone_said": theirs[token]}
        if ours.tokens[position] != alone.tokens[position]:
            break
    return worst


class Yardstick:
    """Distances from the fp32 reference, teacher-forced on a request's own text.

    The reference in bfloat16 is one evaluation with rounding; DRAWS more of it, each with the embedding's entries moved
    by less than one rounding (2^-8 of their size, rounded again), say how far rounding can move this text: a text may
    amplify it, and a single evaluation may miss that.
    """

    def __init__(self, folder: Path) -> None:
        from k3_core.reference import load_model

        device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
        self.exact = load_model(folder, torch.float32, device)
        self.rounded = load_model(folder, dtype, device)
        self._known: dict[Any, tuple[Tensor, list[Tensor]]] = {}

    def _asked(self, job: Job, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Log probabilities by the fp32 reference and by each rounded evaluation; once a text."""
        key = (id(job), tuple(tokens))
        if key not in self._known:
            given = {} if job.image is None else {"images": [job.image]}
            whole, rows = torch.tensor(job.ids + tokens[:-1]), len(tokens)
            exact = self.exact.logits(whole, **given).float().log_softmax(-1)[-rows:].cpu()
            self._known[key] = (exact, list(self.evaluations(whole, given, rows)))
        return self._known[key]

    def evaluations(self, whole: Tensor, given: dict[str, Any], rows: int) -> Iterator[Tensor]:
        """Log probabilities of the last ``rows`` positions by the rounded reference, then with other roundings."""
        embed = self.rounded.weights.embed
        kept, step = embed.clone(), torch.finfo(embed.dtype).eps / 2
        generator = torch.Generator(embed.device).manual_seed(0)
        try:
            for draw in range(1 + DRAWS):
                if draw:
                    noise = torch.rand(embed.shape, generator=generator, device=embed.device) * 2 - 1
                    embed.copy_((kept.double() * (1 + step * noise)).to(embed.dtype))
                yield self.rounded.logits(whole, **given).float().log_softmax(-1)[-rows:].cpu()
        finally:
            embed.copy_(kept)

    def distances(self, job: Job, *results: Result) -> tuple[list[float], list[float]]:
        """Largest distances of the rounded evaluations and of each result, over the tokens that the first one lists."""
        first = results[0]
        exact, evaluations = self._asked(job, first.tokens)
        rows = len(first.tokens)
        theirs = [
            max(float((rounded[i, t] - exact[i, t]).abs()) for i in range(rows) for t in first.logprobs[i])
            for rounded in evaluations
        ]
        ours = []
        for result in results:
            worst = 0.0
            for i in range(min(rows, len(result.tokens))):
                worst = max([worst, *(abs(v - float(exact[i, t])) for t, v in result.logprobs[i].items())])
                if result.tokens[i] != first.tokens[i]:
                    break
            ours.append(worst)
        return theirs, ours


def appeal(folder: Path, jobs: list[Job], alone: list[Result], tally: Tally) -> dict[str, Any]:
    """Outputs outside the fixed bound against the reference: both runs as near to fp32 as twice the rounded reference.

    Outputs that there is no time for, and more than one output in a thousand, are a failure whatever the reference
    says.
    """
    yardstick, end = Yardstick(folder), time.monotonic() + APPEAL
    rows: list[dict[str, Any]] = []
    far = unseen = 0
    for number, result in tally.outside:
        if time.monotonic() > end:
            unseen += 1
            continue
        theirs, (ours, solo) = yardstick.distances(jobs[number], result, alone[number])
        row = {"number": number, "tokens": len(jobs[number].ids), "ours": ours, "alone": solo}
        row |= {"bf16": theirs[0], "other_roundings": max(theirs), **farthest(result, alone[number])}
        far += max(ours, solo) > 2 * max(theirs)
        rows.append(row)
        say(part="soak", outside=row)
    few = len(tally.outside) <= max(3, tally.finished // 1000)
    ok = not far and not unseen and few
    return {"ok": ok, "beyond_twice_the_reference": far, "unseen": unseen, "examples": rows[:8]}
