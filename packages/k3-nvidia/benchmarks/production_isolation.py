"""NaN or infinity in one request ends that request alone, by name, and reaches nobody else.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python packages/k3-nvidia/benchmarks/production_isolation.py
        [--seconds 180] [--parts plain,drafts,checked]

What is promised, and what is not (docs/serving.md): states, logits and latent rows as they are written end their
request by name. Pages of the latent cache that are struck afterwards do with K3_CHECK_LATENT=1 (part ``checked``);
without it FlashAttention 3 may hide them, and only the others are looked at.

A part of production.py that also runs alone: one JSON line a check to production_isolation.jsonl in $OUT, exit status 1
if a check failed or did not fit into ``--seconds``. With CUDA graphs on a GPU, the same checks on a CPU without one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_smoke
import torch
from gpu_smoke import CAPTURE, GRAPHS, model_of, prompts, say, stop
from production_support import GPU, Checks, Job, Result, Rule, Served, checkpoint, jobs_of, pairs

BITS = Rule(0, 0)
VICTIM = 2
PARTS = ("plain", "drafts", "checked")
#: Tokens that the victim has generated when it is struck. A number of steps would not do: a prompt that does not fit
#: into what a step has left waits, and a strike on a request without blocks strikes nothing.
STRIKE = 4 if GPU else 2
COUNT = 14 if GPU else 9
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    # Seeds of a request need a GPU in vLLM 0.32; the others are greedy and do not depend on what is drawn here.
    "sampled": {"temperature": 1.0, "top_k": 20, "top_p": 0.9} | ({"seed": 5} if GPU else {}),
}


@dataclass
class Heard(logging.Handler):
    """Errors that the plugin logs."""

    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        logging.Handler.__init__(self, logging.ERROR)

    def __hash__(self) -> int:
        return id(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def isolation(check: Checks, work: Path, seconds: float, parts: Sequence[str] = PARTS) -> None:
    """Poison in states, latent pages and logits; slots of others; prompts of the ended request sent again."""
    end = time.monotonic() + seconds
    folder = checkpoint(work)
    if "plain" in parts:
        check.guard("isolation, plain", lambda: plain(check, folder, end))
        stop(None)
    if (
        GPU and "drafts" in parts
    ):  # on a CPU vLLM has its first model runner, whose counts do not tell the rows of drafts apart
        check.guard("isolation, drafts", lambda: drafted(check, folder, end))
        stop(None)
    if GPU and "checked" in parts:  # what runs on a CPU hides nothing
        os.environ["K3_CHECK_LATENT"] = "1"
        check.guard("isolation, checked", lambda: checked(check, folder, end))
        stop(None)
        del os.environ["K3_CHECK_LATENT"]


def plain(check: Checks, folder: Path, end: float) -> None:
    """Every way to strike, greedy and sampled."""
    served = serve(folder)
    facts = how(served)
    check("isolation: how", facts["counting"] and "IsolatingScheduler" in facts["scheduler"], **facts)
    if GPU:
        check.guard("isolation: cost", lambda: cost(check))
    attack = Attack(check, served)
    for name, sampling in SAMPLINGS.items():
        for kind in attack.kinds():
            if time.monotonic() > end:
                check(f"isolation: {kind}, {name}", False, reason="not run in time")
                continue
            check.guard(f"isolation {kind}", lambda kind=kind, name=name, s=sampling: attack.run(kind, name, s))
    check.guard("isolation canaries", lambda: canaries(check, served))
    seen = {"steps": served.counted, "with_nan": served.poisoned}
    check("isolation: counts reached the scheduler", served.poisoned > 0, **seen)


def drafted(check: Checks, folder: Path, end: float) -> None:
    """States struck while drafts are verified: a request has several rows of logits then."""
    speculation = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    attack = Attack(check, serve(folder, speculative_config=speculation))
    kinds = ("NaN in the recurrent state", "infinity in the recurrent state", "NaN in the latent cache")
    for kind in (*kinds, "NaN in the latent of a new token"):
        if time.monotonic() > end:
            check(f"isolation: {kind}, drafts", False, reason="not run in time")
            continue
        check.guard(f"isolation {kind}, drafts", lambda kind=kind: attack.run(kind, "drafts", {}))
    accepted = {str(count): times for count, times in sorted(attack.served.accepted.items())}
    check("isolation: drafts were verified", bool(accepted), accepted=accepted)


def checked(check: Checks, folder: Path, end: float) -> None:
    """Pages of the latent cache struck after they were written, with a second look at them in every step."""
    attack = Attack(check, serve(folder))
    check("isolation: pages are looked at again", attack.promised)
    check.guard("isolation: cost of the second look", lambda: check_cost(check))
    for kind in ("NaN in the latent cache", "infinity in the latent cache", "NaN in the latent of a new token"):
        if time.monotonic() > end:
            check(f"isolation: {kind}, checked", False, reason="not run in time")
            continue
        check.guard(f"isolation {kind}, checked", lambda kind=kind: attack.run(kind, "checked", {}))


def serve(folder: Path, **options: Any) -> Served:
    """The engine under attack: prefix caching, and graphs on a GPU."""
    options |= {"compilation_config": GRAPHS} if GPU else {}
    # A step takes all prompts at once: chunks that must end at a block would make one of them wait for the others.
    sizes = {"max_num_seqs": 8, "num_gpu_blocks_override": 96, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    return Served(folder, enable_prefix_caching=True, **sizes, **options)


def how(served: Served) -> dict[str, Any]:
    """Which of vLLM's runners and schedulers run, and whether NaNs are counted: where counts could be lost."""
    from k3_core.vllm.serving import isolation as ending

    runner = served.core.model_executor.driver_worker.worker.model_runner
    settings = served.config.scheduler_config
    return {
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "scheduler": [cls.__name__ for cls in type(served.scheduler).__mro__[:3]],
        "asynchronous": settings.async_scheduling,
        "counting": ending.counting(),
        "sampler_counts": getattr(getattr(runner, "sampler", None), "compute_nans", None),
        "block": served.config.cache_config.block_size,
        "step_tokens": settings.max_num_batched_tokens,
    }


def cost(check: Checks, vocabulary: int = 163_840) -> None:
    """Device time of marking, of counting, and of vLLM's own count, for the released vocabulary: us a step, by rows.

    Other processes may share the device.
    """
    from vllm.v1.worker.gpu.metrics.logits import get_num_nans

    from k3_core.vllm.serving import isolation as ending

    for rows in (1, 8, 32, 128):
        logits = torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16)
        calls = {"mark_us": ending.mark, "count_us": ending.count_and_clear, "vllm_count_us": get_num_nans}
        took = {name: device_us(lambda call=call, logits=logits: call(logits)) for name, call in calls.items()}
        check(f"isolation: cost, {rows} rows", True, **took)


def device_us(call: Callable[[], Any]) -> float:
    """Device time of one call in microseconds: the least of twenty readings of ten calls each."""
    call()
    readings = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # the calls are queued before the first one runs
        begin.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        readings.append(begin.elapsed_time(end) * 100)
    return round(min(readings), 2)


def check_cost(check: Checks, width: int = 576, page: int = 64) -> None:
    """Device time of the second look at the pages of one layer, in us, and what it reads, in GB/s."""
    from k3_nvidia.kernels import latent_check

    for requests, tokens in ((1, 1 << 17), (32, 1 << 13), (128, 1 << 11)):
        pages = torch.randn(requests * tokens // page, page, width, device="cuda").to(torch.bfloat16)
        order = torch.randperm(len(pages), device="cuda").to(torch.int32).view(requests, -1)
        lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
        bounds = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        marks = torch.zeros(requests, 1, device="cuda", dtype=torch.bfloat16)
        us = device_us(lambda: latent_check.check(marks, pages, order, lengths, bounds))
        gbs = round(pages.numel() * 2 / us / 1e3)
        check(f"isolation: cost of the second look, {requests} x {tokens}", not marks.isnan().any(), us=us, gbs=gbs)


@dataclass(frozen=True)
class Way:
    """A way to strike: what is done to the request of a name when it has so many tokens.

    joined: another prompt comes with the strike, so that the step is none that a captured graph replays. seen: the
    request has to end by name.
    """

    strike: Callable[[str], None]
    tokens: int = STRIKE
    joined: bool = False
    seen: bool = True


class Attack:
    """One batch, struck in different ways, against the same batch whose victim the client aborts."""

    def __init__(self, check: Checks, served: Served) -> None:
        self.check, self.served = check, served
        self.heard = Heard()
        logging.getLogger("vllm.plugins.k3").addHandler(self.heard)
        block = served.config.cache_config.block_size
        self.jobs = jobs_of((20, 37, block + 30, 5, 41), seed=8, count=COUNT)
        self.fresh = jobs_of((33, block + 12, 8), seed=9, count=6)
        # Longer than any captured step: of mixed ones vLLM replays what lies between the breaks of a graph, too.
        (self.joining,) = jobs_of((CAPTURE[-1] + 5,), seed=10, count=6)
        self.places = 0
        self.promised = pages_are_promised()
        served.forget()
        self.before = served.run(self.fresh)

    def kinds(self) -> dict[str, Way]:
        """Ways to strike; ``places`` counts what each has struck."""
        bad = {"NaN": float("nan"), "infinity": float("inf")}
        ways: dict[str, Way] = {}
        for word, value in bad.items():
            ways[f"{word} in the recurrent state"] = Way(lambda n, v=value: self.note(self.fill(n, 1, v)))
            ways[f"{word} in the convolution's window"] = Way(lambda n, v=value: self.note(self.fill(n, 0, v)))
            ways[f"{word} in the latent of a prompt's token"] = Way(
                lambda n, v=value: self.fill_written(n, v, prompt=True), tokens=0
            )
            ways[f"{word} in the latent of a new token"] = Way(
                lambda n, v=value: self.fill_written(n, v, prompt=False), joined=True
            )
            ways[f"{word} in the latent cache"] = Way(
                lambda n, v=value: self.note(self.fill_latent(n, v)), seen=self.promised
            )
            ways[f"{word} in the logits"] = Way(lambda n, v=value: self.note(self.fill_logits(n, v)))
        return ways

    def note(self, places: int) -> None:
        self.places += places

    def fill_written(self, name: str, value: float, prompt: bool) -> None:
        """One value of one row, before its norm and before it enters the cache, in the last latent attention layer:
        nothing behind that could see it. Of a prompt the row in the middle, which is in nobody's logits."""
        from k3_core.vllm import compat
        from k3_core.vllm.serving.mla_layer import LatentAttention

        layer = [m for m in model_of(self.served.llm).modules() if isinstance(m, LatentAttention)][-1]
        honest = layer.norms

        def norms(low: Any, latent: torch.Tensor, *rest: Any) -> Any:
            step = compat.forward_metadata(layer.attention_name)
            rows = range(0) if step is None else self.rows_of(step, layer, name)
            if len(rows) and (len(rows) > 4) == prompt:
                del layer.norms
                latent[rows[len(rows) // 2 if prompt else 0], 3] = value
                self.note(1)
            return honest(low, latent, *rest)

        layer.norms = norms

    def rows_of(self, step: Any, layer: Any, name: str) -> range:
        """Rows of the request in a step, by the first block of its table: vLLM orders a batch as it likes."""
        from k3_core.vllm import compat

        if name not in self.served.scheduler.requests:
            return range(0)
        (group,) = (i for i, names in enumerate(self.served.groups()) if layer.attention_name in names)
        blocks = self.served.blocks(name)[group]
        if not blocks:
            return range(0)
        total = self.served.scheduler.kv_cache_config.num_blocks
        first = blocks[0] * (compat.latent_pages(layer.attn.kv_cache).shape[0] // total)
        tables = [step.block_table] if hasattr(step, "block_table") else []
        tables += [part.block_table for part in (getattr(step, "decode", None), getattr(step, "prefill", None)) if part]
        bounds = step.bounds if hasattr(step, "bounds") else step.query_start_loc.tolist()
        order = [int(block) for table in tables for block in table[:, 0].tolist()][: len(bounds) - 1]
        return range(bounds[order.index(first)], bounds[order.index(first) + 1]) if first in order else range(0)

    def fill(self, name: str, which: int, value: float) -> int:
        struck, layers = 0, self.served.layers()
        for group, blocks in zip(self.served.groups(), self.served.blocks(name), strict=True):
            for layer in (layers[n] for n in group if n in layers):
                for block in blocks:
                    if block:
                        layer.states()[which][block] = value
                        struck += 1
        return struck

    def fill_latent(self, name: str, value: float) -> int:
        context = self.served.config.compilation_config.static_forward_context
        struck, layers = 0, self.served.layers()
        from k3_core.vllm import compat

        for group, blocks in zip(self.served.groups(), self.served.blocks(name), strict=True):
            for layer in (context[n] for n in group if n not in layers):
                pages = compat.latent_pages(layer.kv_cache)
                split = pages.shape[0] // self.served.scheduler.kv_cache_config.num_blocks  # kernels may use less
                for block in blocks:
                    if block:
                        pages[block * split][:1] = value  # the first token: every later one sees it
                        struck += 1
        return struck

    def fill_logits(self, name: str, value: float) -> int:
        """In the row that the victim had in the step before: the batch is the same."""
        row, model = self.served.order[name], model_of(self.served.llm)
        text = getattr(model, "language_model", model)
        honest = text.logits_processor.forward

        def forward(*args: Any, **named: Any) -> Any:
            logits = honest(*args, **named)
            text.logits_processor.forward = honest
            logits[row, 3] = value
            return logits

        text.logits_processor.forward = forward
        return 1

    def batch(
        self, sampling: dict[str, Any], way: Way, act: Callable[[str], Any], later: int
    ) -> tuple[list[Any], list[Any]]:
        """Run the batch and ``act`` on the victim ``later`` steps after ``way`` strikes it.

        Returns results (None: no output) and steps.
        """
        served = self.served
        served.clear()
        jobs = list(self.jobs)
        jobs[VICTIM] = Job(jobs[VICTIM].ids, COUNT, sampling=sampling)
        names = [served.add(job) for job in jobs]
        served.until_generated(names[VICTIM], way.tokens)
        names += [served.add(self.joining)] if way.joined else []
        numbers = {served.external[name]: number for number, name in enumerate(names) if name in served.external}
        for _ in range(later):
            served.step()
        act(names[VICTIM])
        served.drain()
        steps = [tuple((numbers.get(name, name), n) for name, n in rows) for rows in served.steps]
        return [served.results.pop(name, None) for name in names], steps

    def run(self, kind: str, how: str, sampling: dict[str, Any]) -> None:
        """Strike once; compare the others bit for bit with the batch whose client gave up."""
        check, what, way = self.check, f"isolation: {kind}, {how}", self.kinds()[kind]
        self.heard.lines.clear()
        self.places, poisoned, name = 0, self.served.poisoned, ""

        def act(victim: str) -> None:
            nonlocal name
            name = victim
            way.strike(victim)

        struck, steps = self.batch(sampling, way, act, 0)
        victim: Result | None = struck[VICTIM]
        said = [line for line in self.heard.lines if name in line]
        figures = {
            "places_struck": self.places,
            "finish": victim and victim.finish,
            "tokens": victim and len(victim.tokens),
            "said": len(said),
            "steps_with_nan": self.served.poisoned - poisoned,
        }
        ended = victim is not None and victim.finish == "error"
        if way.seen:
            check(f"{what}: ended by name", ended and len(said) == 1 and self.places > 0, **figures)
        else:
            check(f"{what}: not promised to be seen", victim is not None and self.places > 0, **figures)
        others = [r for i, r in enumerate(struck) if i != VICTIM]
        # The client gives up in the step in which the engine did: the same batches, so the same bits. Who goes on
        # with what nobody saw takes the same steps as if there were nothing to see.
        controls: list[tuple[Callable[[str], Any], int]] = [(self.served.abort, later) for later in range(5)]
        if not ended:
            controls.insert(0, (lambda name: None, 0))
        for give_up, later in controls:
            control, control_steps = self.batch(sampling, way, give_up, later)
            if control_steps == steps:
                break
        same = control_steps == steps
        figures = pairs(others, [r for i, r in enumerate(control) if i != VICTIM], *([BITS] if same else []))
        complete = all(result is not None and result.finish == "length" for result in others)
        ok = figures.pop("ok") and complete
        check(f"{what}: others untouched", ok, same_steps=same, steps_to_the_end=len(steps), **figures)
        self.served.forget()
        after = self.served.run(self.fresh)
        check(f"{what}: new requests on its blocks", **pairs(after, self.before, BITS))
        if not way.seen:  # its prompt sent again would resume from the damage
            return
        struck, _ = self.batch({}, way, way.strike, 0)
        (again,) = self.served.run([self.jobs[VICTIM]])  # no reset in between: its blocks must not be found
        (clean,) = self.served.solo([self.jobs[VICTIM]])
        figures = pairs([again], [clean])
        check(f"{what}: sent again", figures.pop("ok") and again.finish == "length", cached=again.cached, **figures)


def pages_are_promised() -> bool:
    """Whether a struck page of the latent cache has to end its request: by the contract on a CPU, or by the switch."""
    if not GPU:
        return True
    from k3_nvidia.kernels import latent_check

    return latent_check.wanted()


def canaries(check: Checks, served: Served) -> None:
    """Each step changes the states of its own requests only; the null block and free blocks keep their bytes."""
    served.clear()
    layers = served.layers()
    jobs = [Job(ids, 5) for ids in prompts((60, 9, 300, 2), 12, 500)]
    names = [served.add(job) for job in jobs[:2]]
    late = jobs[2:]
    touched = foreign = steps = 0
    while served.engine.has_unfinished_requests():
        before = {n: [pool.clone() for pool in layer.states()] for n, layer in layers.items()}
        owned: dict[str, set[int]] = {n: set() for n in layers}

        def note(output: Any, owned: dict[str, set[int]] = owned) -> None:
            for name in output.num_scheduled_tokens:
                for blocks in served.blocks(name):
                    for layer in layers:  # groups share memory: a block of any group is a row of every pool
                        owned[layer] |= set(blocks)

        known = {layer: set(blocks) for layer, blocks in previous(served, names, layers).items()}
        served.after_schedule = note
        served.step()
        if GPU:
            torch.cuda.synchronize()
        for name, layer in layers.items():
            for old, new in zip(before[name], layer.states(), strict=True):
                changed = (old.flatten(1).view(torch.uint8) != new.flatten(1).view(torch.uint8)).any(1)
                blocks = set(changed.nonzero().flatten().tolist())
                touched += len(blocks)
                foreign += len(blocks - (owned[name] | known[name])) + (0 in blocks)
        steps += 1
        if late and steps >= 2:
            names.append(served.add(late.pop()))
    served.after_schedule = None
    check("isolation: slots of others keep their bytes", foreign == 0 and touched > 0, touched=touched, steps=steps)


def previous(served: Served, names: list[str], layers: dict[str, Any]) -> dict[str, list[int]]:
    """Blocks of requests that are running before a step (asynchronous scheduling executes one step later)."""
    found: dict[str, list[int]] = {name: [] for name in layers}
    for name in names:
        if name in served.scheduler.requests:
            for blocks in served.blocks(name):
                for layer in layers:
                    found[layer] += [block for block in blocks if block]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180, help="no further kind of poison begins after these")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="without drafts, with them, pages looked at again (both: a GPU only)"
    )
    options = parser.parse_args()
    gpu_smoke.LOG = "production_isolation.jsonl"
    gpu_smoke.prepare()
    check, began = Checks("isolation"), time.monotonic()
    with tempfile.TemporaryDirectory(dir=os.environ.get("K3_SCRATCH")) as work:
        check.guard("isolation", lambda: isolation(check, Path(work), options.seconds, options.parts.split(",")))
    say(part="isolation", seconds=round(time.monotonic() - began, 1), ok=not check.failed, failed=check.failed)
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
