"""Part of production.py: minutes of mixed load, every output compared with its solo run by the documented rule.

Requests come in bursts that fill the engine, as many as solo runs can follow (about 28 a second on an H200): prompts of
1 to 30,000 tokens (log-uniform, mostly short), a third of them with one of eight common beginnings, some with an image,
some sampled with a seed, some aborted by the client. Afterwards each is run alone, from an empty prefix cache. Where
time does not suffice for all, requests are drawn at random and the row says what share was compared; less than 10%
fails. The load takes half of ``--seconds`` left after the start: five minutes of it want ``--seconds 660``.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from gpu_smoke import compiled_since, stop
from production_support import GPU, Checks, Difference, Job, Result, Served, checkpoint, difference, holds, judged

LONGEST = 30_000 if GPU else 300
LEAST = 3_000 if GPU else 16
IN_FLIGHT = 160 if GPU else 12
LEAST_SHARE = 0.1
#: Requests of a burst, and the seconds from one to the next: 20 a second, at most IN_FLIGHT of them at a time.
BURST, EVERY = 160, 8.0


def _image(seed: int) -> Any:
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 255, (40 + 14 * (seed % 5), 70, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


class Traffic:
    """Requests by number, always the same."""

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
        ids = draw.choices(range(4, 500), k=LONGEST if number == 5 else self.length(draw))
        kind = draw.random()
        image = None
        if kind < 0.05:
            image, ids = draw.choice(self.images), [*ids[:50], self.pad, *ids[50:100]]
        elif kind < 0.38:
            common = draw.choice(self.common)
            ids = (common[: draw.randrange(1, len(common))] + ids)[:LONGEST]
        sampling: dict[str, Any] = {}
        if GPU and draw.random() < 0.25:  # seeds of a request need a GPU in vLLM 0.32
            sampling = {"temperature": 0.8, "top_p": draw.choice((0.9, 1.0)), "seed": number}
        return Job(ids, draw.randrange(1, 9), image, sampling)

    def aborted_after(self, number: int) -> int | None:
        """Steps after which the client gives up; None: it waits."""
        draw = random.Random(number + 77)
        return draw.randrange(0, 6) if draw.random() < (0.05 if GPU else 0.3) else None


def soak(check: Checks, work: Path, seconds: float) -> None:
    """The load, then the solo runs."""
    folder = checkpoint(work, max_position_embeddings=65_536)
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 1024}
    if GPU:
        graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
        options = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 32_768}
        options |= {"compilation_config": graphs}
    began = time.monotonic()
    served = Served(folder, enable_prefix_caching=True, **options)
    compiled_since()
    left = seconds - (time.monotonic() - began)
    traffic = Traffic(served.config.model_config.hf_config.media_placeholder_token_id)
    results, aborted, spent = load(served, traffic, 0.5 * left)
    total = len(results) + len(aborted)
    lengths = [len(traffic.job(number).ids) for number in results]
    check(
        "soak: load", total >= LEAST, requests=total, finished=len(results), aborted=len(aborted),
        seconds=round(spent, 1), a_second=round(total / spent, 1), longest=max(lengths), prompt_tokens=sum(lengths),
        cached_tokens=sum(r.cached for r in results.values()), preempted=served.preempted,
        images=sum(traffic.job(number).image is not None for number in results),
    )  # fmt: skip
    late = [] if not GPU else compiled_since()
    check("soak: nothing compiled under load", not late, compiled=late)
    odd = [n for n, r in results.items() if r.finish != "length" or len(r.tokens) != traffic.job(n).count]
    check("soak: every request ended as asked", not odd, odd=odd[:20])
    compared(check, served, traffic, results, seconds - (time.monotonic() - began) - 5)
    del served
    stop(None)


def load(served: Served, traffic: Traffic, limit: float) -> tuple[dict[int, Result], list[int], float]:
    """Requests until the time is over (and, if slow, until there were enough): results and aborted, by number."""
    results: dict[int, Result] = {}
    numbers: dict[str, int] = {}
    leave: dict[str, int] = {}
    aborted: list[int] = []
    began, number, steps = time.monotonic(), 0, 0
    while True:
        spent = time.monotonic() - began
        more = spent < limit and (GPU or number < LEAST)
        if not more and not numbers:
            return results, aborted, spent
        come = BURST * (1 + int(spent / EVERY)) if GPU else LEAST
        while more and len(numbers) < IN_FLIGHT and number < come:
            name = served.add(traffic.job(number))
            numbers[name] = number
            patience = traffic.aborted_after(number)
            if patience is not None:
                leave[name] = steps + patience
            number += 1
        for name in [name for name, when in leave.items() if when <= steps]:
            del leave[name]
            if name in numbers and name not in served.results:
                served.abort(name)
                aborted.append(numbers.pop(name))
        if numbers:
            served.step()
        else:
            time.sleep(0.01)
        steps += 1
        for name in list(served.results):
            leave.pop(name, None)
            results[numbers.pop(name)] = served.results.pop(name)
        if steps % 500 == 0:
            print(f"soak: {len(results)} requests, {spent:.0f} s", flush=True)


def compared(check: Checks, served: Served, traffic: Traffic, results: dict[int, Result], limit: float) -> None:
    """Solo runs of all requests, or of a random share where time is short."""
    end = time.monotonic() + limit
    order = list(results)
    random.Random(9).shuffle(order)
    found: list[Difference] = []
    outside: list[dict[str, Any]] = []
    for number in order:
        if time.monotonic() > end:
            break
        job = traffic.job(number)
        (alone,) = served.solo([job])
        one = difference(results[number], alone, greedy=not job.sampling)
        found.append(one)
        if not holds(one):
            outside.append({"number": number, "tokens": len(job.ids), "gap": one.gap, "max": max(one.deltas)})
    share = len(found) / max(len(results), 1)
    figures = judged(found)
    ok = figures.pop("ok") and share >= LEAST_SHARE
    check("soak: against alone", ok, share=round(share, 3), examples=outside[:8], **figures)
