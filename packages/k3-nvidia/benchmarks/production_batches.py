"""Parts of production.py about batches: CUDA graphs against none, determinism, and a restart with warm caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_smoke
import torch
from gpu_smoke import model_of, stop
from production_support import GPU, RULE, Checks, Job, Result, Rule, Served, checkpoint, jobs_of, judged, pairs
from production_support import difference as differ

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 32, 128) if GPU else (1, 2, 3)
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128]
#: Tokens drafted a step, and batches in which 0 to all of them are accepted in turn.
DRAFTS, DRAFTED_SIZES, DRAFTED_COUNT = 3, (1, 3, 8, 16) if GPU else (2,), 24
MODES = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY") if GPU else ("NONE", "NONE")
#: A token that chooses its experts may choose others: single rows then move further than rounding does.
ROUTED = Rule(1.5, 1.5) if GPU else RULE


def _lengths(size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 * size + seed)
    return torch.randint(1, 90, (size,), generator=generator).tolist()


def graph_batches() -> dict[str, list[Job]]:
    """Decoding batches of every size, twice with other lengths and slots, and prompts among decoding rows."""
    batches = {f"{n} rows, round {r}": jobs_of(_lengths(n, r), seed=10 * n + r) for r in (0, 1) for n in SIZES}
    mixed = jobs_of([3, 700, 20, 450, 1, 90, 300, 64, 5] if GPU else [3, 300, 20], seed=7, count=12)
    return batches | {"prompts among decoding rows": mixed}


def graphs(check: Checks, work: Path, seconds: float) -> None:
    """The same batches in every mode of CUDA graphs, against none."""
    end = time.monotonic() + seconds
    folder = checkpoint(work)
    expected: dict[str, list[Result]] = {}
    for number, mode in enumerate(MODES):
        if time.monotonic() > end:
            check(f"graphs {mode}", False, reason="out of time")
            continue
        check.guard(f"graphs {mode}", lambda mode=mode, number=number: _graphs(check, folder, mode, number, expected))
        stop(None)
    check.guard("graphs, drafts", lambda: accepted(check, folder))
    stop(None)


def accepted(check: Checks, folder: Path) -> None:
    """Graphs replayed with other accepted counts: drafts of which 0 to all are right, against none without drafts.

    The proposals are what the run without drafts says, with one wrong token at a varying place or none
    (k3_core.vllm.testing.draft_engine); verification, graphs and states are the engine's own.
    """
    from k3_core.vllm.testing.draft_engine import propose_from

    batches = {
        f"{n} rows, round {r}": jobs_of(_lengths(n, r + 7), seed=300 + 10 * n + r, count=DRAFTED_COUNT)
        for r in (0, 1)
        for n in DRAFTED_SIZES
    }
    sizes: dict[str, Any] = {"max_num_seqs": 16, "enable_prefix_caching": False}
    served = Served(folder, enforce_eager=True, **sizes)
    expected = {name: served.run(batch) for name, batch in batches.items()}
    del served
    stop(None)
    asked = [job for batch in batches.values() for job in batch]
    said = [result for results in expected.values() for result in results]
    script = [job.ids + result.tokens for job, result in zip(asked, said, strict=True)]
    speculation = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": DRAFTS}
    # Rows of a decoding step come in groups of one token and its drafts.
    captured = [(1 + DRAFTS) * n for n in (1, 2, 4, 8, 16)]
    options: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": captured}} if GPU else {}
    served = Served(folder, speculative_config=speculation, **sizes, **options)
    restore = propose_from(script)  # not before: it loads numba, after which no engine starts on a CPU
    try:
        mode = str(served.config.compilation_config.cudagraph_mode)
        for name, batch in batches.items():
            before = served.accepted.copy()
            figures = pairs(served.run(batch), expected[name])
            counts = {str(n): served.accepted[n] - before[n] for n in range(DRAFTS + 1)}
            check(f"graphs, drafts: {name}", mode=mode, accepted=counts, **figures)
        met = {n: served.accepted[n] for n in sorted(served.accepted)}
        check("graphs, drafts: every count was accepted", all(met.get(n) for n in range(DRAFTS + 1)), accepted=met)
        again = batches[f"{DRAFTED_SIZES[-1]} rows, round 0"]
        check("graphs, drafts: replay", **pairs(served.run(again), served.run(again), Rule(0, 0)))
    finally:
        restore()


def _graphs(check: Checks, folder: Path, mode: str, number: int, expected: dict[str, list[Result]]) -> None:
    from vllm.compilation.counter import compilation_counter

    captured = compilation_counter.num_cudagraph_captured
    graph_options = {"compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": CAPTURED}}
    options: dict[str, Any] = {"enforce_eager": True} if mode == "NONE" else graph_options
    served = Served(folder, enable_prefix_caching=False, max_num_seqs=128 if GPU else 8, **options)
    actual = str(served.config.compilation_config.cudagraph_mode)
    captured = compilation_counter.num_cudagraph_captured - captured
    if mode != "NONE":
        # The model is not compiled in pieces: PIECEWISE alone leaves vLLM nothing to capture, and must still be right.
        check(f"graphs {mode}: captured", (captured > 0) == (mode != "PIECEWISE"), mode=actual, graphs=captured)
    for name, batch in graph_batches().items():
        results = served.run(batch)
        if number == 0:
            expected[name] = results
        else:
            check(f"graphs {mode}: {name}", mode=actual, **pairs(results, expected[name]))
    if mode != "NONE":
        again = next(iter(graph_batches().values()))
        check(f"graphs {mode}: replay", **pairs(served.run(again), served.run(again), Rule(0, 0)))


def determinism(check: Checks, work: Path, seconds: float) -> None:
    """The same batch twice; and what other company changes, with and without a choice of experts."""
    for every in (True, False):
        what = "all experts" if every else "chosen experts"
        check.guard(what, lambda every=every, what=what: _determinism(check, work, every, what))
        stop(None)


def _determinism(check: Checks, work: Path, every: bool, what: str) -> None:
    served = Served(checkpoint(work, every_expert=every), max_num_seqs=64, max_num_batched_tokens=512)
    jobs = jobs_of([*_lengths(40 if GPU else 5, 5), 300, 64, 65, 1], seed=3, count=16 if GPU else 6)
    served.forget()
    first = served.run(jobs)
    served.forget()
    again = served.run(jobs)
    check(f"{what}: the same batch twice", **pairs(again, first, Rule(0, 0)))
    solo = served.solo(jobs)
    check(f"{what}: alone twice", **pairs(served.solo(jobs[:8]), solo[:8], Rule(0, 0)))
    rule = RULE if every else ROUTED
    for size in (2, 3, 8, 17, len(jobs)):
        results: list[Result] = []
        for begin in range(0, len(jobs), size):
            served.forget()
            results += served.run(jobs[begin : begin + size])
        check(f"{what}: in batches of {size} against alone", **pairs(results, solo, rule))
    if every:
        # A result that another request got must be noticed: the check can fail.
        swapped = judged([differ(a, b) for a, b in zip(solo, solo[1:] + solo[:1], strict=True)])
        check("two requests' outputs exchanged are noticed", not swapped["ok"], outside=swapped["outside"])


# ------------------------------------------------------------------------------------------------------------- restart


def restart(check: Checks, work: Path, seconds: float) -> None:
    """Two starts in fresh processes on the same caches: the second compiles nothing."""
    folder = checkpoint(work)
    caches = {"TRITON_CACHE_DIR": str(work / "triton"), "VLLM_CACHE_ROOT": str(work / "vllm")}
    rows = []
    for number in (1, 2):
        before = _files(caches)
        run = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("production.py")), "--first-token", str(folder)],
            env=os.environ | caches,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        lines = [line for line in run.stdout.splitlines() if line.startswith('{"first_token_s"')]
        if run.returncode or not lines:
            check(f"start {number}", False, reason=(run.stdout + run.stderr)[-600:])
            return
        rows.append(json.loads(lines[-1]))
        new = sorted(_files(caches) - before)
        kernels = [name for name in new if name.endswith((".cubin", ".so", ".ptx", ".o"))]
        check(f"start {number}", number == 1 or not kernels, new_files=len(new), new_kernels=kernels[:8], **rows[-1])
    check("both starts give the same tokens", rows[0]["tokens"] == rows[1]["tokens"])


def _files(caches: dict[str, str]) -> set[str]:
    return {str(f.relative_to(root)) for root in caches.values() for f in Path(root).rglob("*") if f.is_file()}


def first_token(folder: Path) -> None:
    """Start an engine, generate one token, and print the seconds from loaded weights to it."""
    from k3_core.vllm.serving import outer

    loaded: list[float] = []
    honest = outer.load

    def load(*args: Any, **named: Any) -> Any:
        result = honest(*args, **named)
        loaded.append(time.monotonic())
        return result

    outer.load = load
    began = time.monotonic()
    options: dict[str, Any] = {"compilation_config": gpu_smoke.GRAPHS} if GPU else {}
    served = Served(folder, **options)
    (result,) = served.run([Job([7, 8, 9], 1)])
    now = time.monotonic()
    model = type(model_of(served.llm)).__name__
    row = {"first_token_s": round(now - loaded[0], 2), "start_s": round(now - began, 2), "tokens": result.tokens}
    print(json.dumps(row | {"model": model}), flush=True)
