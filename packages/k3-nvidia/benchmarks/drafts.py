"""Do drafted tokens change what is generated? And does a latent cache in FP8 keep its distance? On one GPU, or a CPU.

    python packages/k3-nvidia/benchmarks/drafts.py [--parts drafts,fp8kv] [--modes graphs,eager] [--drafts 3,7,1]
        [--together 6] [--seconds 560]

drafts: a tiny Kimi K3 with kernel-sized heads, served without drafts and with vLLM's n-gram speculation of 1, 3 and 7
tokens, with and without prefix caching (align), eager and with CUDA graphs, text beside an image. The proposals are the
known continuation with one wrong token at a varying place, so 0 to k of them are accepted in turn and the rest thrown
away (k3_core.vllm.testing.draft_engine); "ngram" cases keep vLLM's own proposals. Each case serves its requests,
serves them again (from cached prefixes), and a third time with what they generated behind them: with prefix caching
that text begins at states that were saved while drafts were verified. The rule is that of runs.py, against the run
without drafts.

fp8kv: the same requests with ``kv_cache_dtype="fp8"`` (the latents of the MLA layers; states of KDA layers are not
part of it). Yardstick: the reference in fp32 whose latent rows are rounded to e4m3, as the cache does with its scale of
one; that and the bf16 reference's distance are independent, and queries may be rounded to e4m3 as well (the same size
of error again), so ours may be twice their sum at the 90th percentile.

Rows are written as they come to $OUT/drafts.jsonl (and printed); exit status 1 if a check failed or is missing.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpu_smoke
import torch
from runs import CPU_BOUND, SAFE, Judge, Log, Remembering, against_one, on_gpu, run_parts, sized_text

from k3_core.vllm.testing import world

say = Log("drafts.jsonl").say
COUNT = 24
#: Generation crosses the ends of cache blocks (128, or 256 where a state is that large), and starts far from them.
LENGTHS, CPU_LENGTHS = (1, 5, 64, 120, 250, 300, 506), (1, 30, 120)
IMAGE = [100, 70, 0]
EXTRA = [11, 12, 13]
LOOKUP = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


# ---------------------------------------------------------------------------------------------------------------- cases


def checkpoint(work: Path) -> tuple[Path, int]:
    """Write the checkpoint; (folder, id of the image pad)."""
    from k3_core.checkpoint import tiny_config, write_tiny

    config = tiny_config("k3", **sized_text(4))
    assert config.media_placeholder_token_id is not None
    return write_tiny(work / "k3", config, seed=3, long_memory=True), config.media_placeholder_token_id


def requests(pad: int) -> list[dict[str, Any]]:
    """Texts, one that repeats itself (so that plain n-grams find something), and an image."""
    ids = gpu_smoke.prompts(LENGTHS if on_gpu() else CPU_LENGTHS, seed=1)
    ids.append(gpu_smoke.prompts((20,), seed=5)[0] * 4)
    texts = [{"ids": one, "image": None} for one in ids]
    return [*texts, {"ids": [7, 8, 9, pad, 10, 11], "image": IMAGE}]


def case(name: str, folder: Path, asked: list[dict[str, Any]], mode: str, **changes: Any) -> dict[str, Any]:
    """A case of k3_core.vllm.testing.draft_engine; changes: of vLLM's options, or ``script`` and ``rounds``."""
    script, rounds = changes.pop("script", None), changes.pop("rounds", ("new", "again", "longer"))
    options: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "seed": 0,
        "dtype": "bfloat16" if on_gpu() else "float32",
        "enable_prefix_caching": False,
    }
    if on_gpu():
        options |= {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05}
    if mode == "eager":
        options["enforce_eager"] = True
    else:
        width = 1 + changes.get("speculative_config", {}).get("num_speculative_tokens", 0)
        options["compilation_config"] = {"cudagraph_capture_sizes": [width * n for n in (1, 2, 4, 8, 16)]}
    return {
        "name": name,
        "folder": str(folder),
        "vendor": ["nvidia", "k3_nvidia"],
        "compilers": gpu_smoke.COMPILERS,
        "requests": asked,
        "rounds": list(rounds),
        "extra": EXTRA,
        "script": script,
        "count": COUNT,
        "top": gpu_smoke.TOP,
        "options": options | changes,
    }


def drafted(
    folder: Path, asked: list[dict[str, Any]], plain: dict[str, Any], limits: argparse.Namespace
) -> list[dict[str, Any]]:
    """All cases with drafts; those of the first mode and count first."""
    # What each request says in the rounds "new" and "longer" of the run without drafts of the same mode.
    scripts = {
        mode: [one["prompt"] + one["tokens"] for name in (0, 2) for one in result["rounds"][name]]
        for mode, result in plain.items()
    }
    result = []
    for mode in plain:
        for count in [int(word) for word in limits.drafts.split(",")]:
            speculation = LOOKUP | {"num_speculative_tokens": count}
            # vLLM copies states between cache blocks with a GPU's kernel where drafts are verified.
            for caching in (True, False) if on_gpu() else (False,):
                name = f"{mode} k={count} {'align' if caching else 'none'}"
                more: dict[str, Any] = {"speculative_config": speculation, "enable_prefix_caching": caching}
                result.append(case(name, folder, asked, mode, script=scripts[mode], **more))
                if count == 3:
                    result.append(case(f"{name} ngram", folder, asked, mode, **more))
    return result


def run(todo: list[dict[str, Any]], limits: argparse.Namespace) -> Iterator[world.Result]:
    """Results of cases as they come, failures said.

    On a GPU cases of one mode and configuration share a process, ``limits.together`` processes run at a time (a fixed
    cache each; most of a case is the start of its engine). On a CPU each case has its process, one after another (a
    proposer's numba stays loaded).
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in todo:
        groups.setdefault(one["name"].removesuffix(" ngram") if on_gpu() else one["name"], []).append(one)
    found: queue.Queue[world.Result | None] = queue.Queue()

    def produce(several: list[dict[str, Any]]) -> None:
        try:
            for result in world.run(
                [sys.executable, "-m", "k3_core.vllm.testing.draft_engine"],
                several,
                1,
                case_seconds=limits.case_seconds,
                deadline=limits.deadline,
                environment=SAFE,
            ):
                found.put(result)
        finally:
            found.put(None)

    with ThreadPoolExecutor(limits.together if on_gpu() else 1) as pool:
        running = [pool.submit(produce, several) for several in groups.values()]
        left = len(running)
        while left:
            result = found.get()
            if result is None:
                left -= 1
            elif result.ranks is None:
                say(part="drafts", case=result.case["name"], ok=False, why=result.why[-3000:])
            else:
                yield result
        for group in running:
            group.result()


# ----------------------------------------------------------------------------------------------------------- comparison


def rounds_row(result: dict[str, Any], plain: dict[str, Any], reference: Judge | None) -> list[dict[str, Any]]:
    """The comparison of each round with the reference and with the run without drafts."""
    rows = []
    for ours, theirs in zip(result["rounds"], plain["rounds"], strict=False):
        row: dict[str, Any] = {"cached": [one["cached"] for one in ours]}
        bound, right = 0.0, True
        if reference is not None:
            sizes = [IMAGE if len(one["prompt"]) != len(one["ids"]) else None for one in ours]
            row["reference"] = reference.against_reference(ours, [one["ids"] for one in ours], sizes)
            bound, right = 2 * row["reference"]["max_bf16_reference"], row["reference"]["ok"]
        # A text that departed in the first round asks something else in the third.
        same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a["prompt"] == b["prompt"]]
        row["plain"] = against_one([a for a, _ in same], [b for _, b in same], bound)
        right &= row["plain"]["ok"] and 2 * len(same) > len(ours)
        if reference is None:
            right &= row["plain"]["max_distance_from_one"] <= CPU_BOUND
        row["ok"] = right
        rows.append(row)
    return rows


def drafts_row(case: dict[str, Any], counted: dict[str, Any]) -> dict[str, Any]:
    """vLLM's counters, and whether drafts were accepted in full, in part and not at all as the script wants it."""
    row = dict(counted)
    width = case["options"].get("speculative_config", {}).get("num_speculative_tokens", 0)
    if not width:
        return row | {"ok": True}
    places = counted.get("accepted_tokens_per_pos", [])
    if case["script"] is None:
        return row | {"ok": counted.get("drafts", 0) > 0}
    # Each place accepted less often than the one before it, and none never: 0, 1, ..., k were all met.
    steps = [counted["drafts"], *places]
    return row | {"ok": len(places) == width and places[-1] > 0 and all(a > b for a, b in pairwise(steps))}


def run_drafts(limits: argparse.Namespace) -> bool:
    """Without drafts, then with; each case is judged as it ends. True if every case ran and is right."""
    modes = limits.modes.split(",") if on_gpu() else ["eager"]
    with tempfile.TemporaryDirectory() as work:
        folder, pad = checkpoint(Path(work))
        asked = requests(pad)
        plain: dict[str, Any] = {}
        for result in run([case(f"{mode} plain", folder, asked, mode) for mode in modes], limits):
            assert result.ranks is not None
            plain[result.case["name"].split()[0]] = result.ranks[0]
        if not plain:
            return False
        todo = drafted(folder, asked, plain, limits)
        reference = None
        right, count = len(plain) == len(modes), 0
        # The next case is served while one is judged.
        for result in run(todo, limits):
            assert result.ranks is not None
            if reference is None and on_gpu():
                reference = Judge(folder)
            payload, mode = result.ranks[0], result.case["name"].split()[0]
            counted = drafts_row(result.case, payload["drafts"])
            right &= judged(result.case["name"], payload, plain[mode], reference, counted)
            count += 1
        for mode, payload in plain.items():
            right &= judged(f"{mode} plain", payload, plain[mode], reference, {"ok": True})
    return bool(right) and count == len(todo)


def judged(
    name: str, payload: dict[str, Any], plain: dict[str, Any], reference: Judge | None, counted: dict[str, Any]
) -> bool:
    """Write the row of a case; whether it is right."""
    rounds = rounds_row(payload, plain, reference)
    names = ("block_size", "cache_mode", "graphs", "attention", "start_s", "generate_s", "late")
    facts = {key: payload[key] for key in names}
    ok = counted["ok"] and all(row["ok"] for row in rounds) and not payload["late"]
    say(part="drafts", case=name, drafts=counted, rounds=rounds, **facts, ok=ok)
    return bool(ok)


# ------------------------------------------------------------------------------------------------------------------ fp8


def rounded_rows(exact: Any) -> Any:
    """The reference with its latent rows rounded to e4m3: an object with ``logits``."""
    from k3_core.contracts import mla

    honest = mla.cache_rows

    def coarse(*args: Any, **kwargs: Any) -> torch.Tensor:
        rows = honest(*args, **kwargs)
        return rows.clamp(-448, 448).to(torch.float8_e4m3fn).to(rows.dtype)

    class Coarse:
        def logits(self, ids: torch.Tensor, images: Any = None) -> torch.Tensor:
            """As ReferenceK3.logits."""
            mla.cache_rows = coarse
            try:
                result: torch.Tensor = exact.logits(ids, **({} if images is None else {"images": images}))
            finally:
                mla.cache_rows = honest
            return result

    return Coarse()


def run_fp8kv(limits: argparse.Namespace) -> bool:
    """The FP8 cache against its yardstick; on a CPU: that it is refused before weights load."""
    with tempfile.TemporaryDirectory() as work:
        folder, pad = checkpoint(Path(work))
        asked = requests(pad)
        modes = limits.modes.split(",") if on_gpu() else ["eager"]
        todo = [
            case(f"{mode} fp8", folder, asked, mode, kv_cache_dtype="fp8", enable_prefix_caching=caching)
            for mode, caching in zip(modes, (True, False), strict=False)
        ]
        if not on_gpu():
            return refused(todo[0], limits)
        found = list(run(todo, limits))
        reference = Judge(folder)
        coarse = Remembering(rounded_rows(reference.exact.model))
        right = len(found) == len(todo)
        for result in found:
            assert result.ranks is not None
            right &= fp8_row(result.case["name"], result.ranks[0], reference, coarse)
    return right


def refused(one: dict[str, Any], limits: argparse.Namespace) -> bool:
    """Whether a case is refused by name."""
    (result,) = world.run(
        [sys.executable, "-m", "k3_core.vllm.testing.draft_engine"],
        [one],
        1,
        case_seconds=limits.case_seconds,
        deadline=limits.deadline,
        environment=SAFE,
    )
    ok = result.ranks is None and "--kv-cache-dtype fp8 is not supported on a CPU" in result.why
    say(part="fp8kv", case="refused on a CPU", seconds=round(result.seconds, 1), ok=ok)
    return ok


def fp8_row(name: str, payload: dict[str, Any], reference: Judge, coarse: Any) -> bool:
    """Write the row of a case; whether its distance keeps the bound."""
    rows, right = [], True
    for ours in payload["rounds"]:
        sizes = [IMAGE if len(one["prompt"]) != len(one["ids"]) else None for one in ours]
        ids = [one["ids"] for one in ours]
        bf16 = reference.against_reference(ours, ids, sizes)
        yardstick = Judge.compare(ours, ids, sizes, reference.exact, coarse)["p90_bf16_reference"]
        bound = 2 * (yardstick + bf16["p90_bf16_reference"]) + 0.02
        row = {
            "p90": bf16["p90_ours"],
            "p90_fp8_reference": yardstick,
            "p90_bf16_reference": bf16["p90_bf16_reference"],
        }
        row |= {"bound": bound, "finite": bf16["finite"], "cached": [one["cached"] for one in ours]}
        row["ok"] = bf16["finite"] and bf16["p90_ours"] <= bound
        right &= bool(row["ok"])
        rows.append(row)
    attention = payload["attention"]
    right &= any("fp8" in one for one in attention) and not payload["late"]
    facts = {key: payload[key] for key in ("attention", "block_size", "start_s", "late")}
    say(part="fp8kv", case=name, rounds=rows, **facts, ok=right)
    return right


def main() -> int:
    """All wanted parts, each guarded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="drafts,fp8kv")
    parser.add_argument("--modes", default="graphs,eager")
    parser.add_argument("--drafts", default="3,7,1")
    parser.add_argument("--together", type=int, default=6)
    parser.add_argument("--case-seconds", type=float, default=180)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("K3_BENCH_SECONDS", 560)))
    limits = parser.parse_args()
    gpu_smoke.GENERATED = COUNT
    return run_parts("drafts.py", limits, {"drafts": run_drafts, "fp8kv": run_fp8kv}, say)


if __name__ == "__main__":
    sys.exit(main())
