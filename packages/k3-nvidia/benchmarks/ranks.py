"""Do several ranks compute what one does? Engines over two GPUs of one host, and the forms of the MoE reduction timed.

    python packages/k3-nvidia/benchmarks/ranks.py [--parts engines,reductions] [--modes graphs,eager]
        [--forms merged,sharded,separate] [--kinds tp2,ep2,tp2wide] [--launch external,mp] [--together 7]
        [--seconds 560]

engines: a tiny Kimi K3 with kernel-sized heads is served by one rank, then with tensor parallelism over two (tp2) and
with whole experts distributed over them (ep2), each reduction form forced in turn, eager and with CUDA graphs; texts
that are read in chunks, and images of several sizes in the same batch, which the ranks encode in parallel. tp2pp2 is
four ranks, the pipeline cut inside a block of attention residuals; on a CPU only. tp2wide serves another checkpoint,
in the first form and with a run of one rank of its own: wide scales in the second rank's part of one layer only, so
that the ranks' layers are of different kinds (wide_case.py); a row's facts say which layers have them on each rank.

The rule is that of runs.py, against the run of one rank; and all ranks say the same, bit for bit. A kind and a form
have processes of their own, which serve the modes one after another; ``--together`` of these groups run at a time on
the same GPUs (a fixed cache each), since most of a case is the start of an engine, and a result is compared as soon as
it and that of one rank are there.

reductions: see bench_reductions.py.

Every rank is a process of its own that this script starts, watches and stops (k3_core.vllm.testing.world); with
"--launch external,mp" a case that fails as such ranks is tried again as ranks that vLLM starts (the wheels must be
installed then: vLLM's processes find them by their entry points). Rows are written as
they come to $OUT/ranks.jsonl (and printed); exit status 1 if a check failed or is missing.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_smoke
import wide_case
from runs import CPU_BOUND, SAFE, Judge, Log, against_one, on_gpu, run_parts, sized_text

from k3_core.vllm.testing import world

HERE = Path(__file__).parent
LENGTHS, CPU_LENGTHS = (1, 5, 64, 65, 130, 300), (1, 65, 150)
IMAGES = ([100, 70, 0], [40, 180, 1], [56, 56, 2])
STEP_TOKENS = 128
say = Log("ranks.jsonl").say
FORMS = ("merged", "sharded", "separate")
#: Ranks of each kind, and the kinds that are of the first form only.
KINDS = {"tp2": 2, "ep2": 2, "tp2pp2": 4, "tp2wide": 2}
ONE_FORM = ("tp2pp2", "tp2wide")


# ---------------------------------------------------------------------------------------------------------------- cases


def checkpoint(work: Path, wide: bool = False) -> tuple[Path, int]:
    """Write a checkpoint; (folder, id of the image pad). On a GPU half of its heads and experts fit the kernels.

    wide: with scale bytes above 128 that only the second of two ranks holds (``wide_case.widen``).
    """
    from k3_core.checkpoint import tiny_config, write_tiny

    # Eight layers on a CPU: two stages of four, the first ends inside a block of three, each has both kinds of layer.
    # Engines of ranks that were started one by one know their own stage only, and schedule by the layers it has.
    config = tiny_config("k3", **sized_text(8) or {"num_hidden_layers": 8})
    pad = config.media_placeholder_token_id
    assert pad is not None
    folder = write_tiny(work / ("k3wide" if wide else "k3"), config, seed=3, long_memory=True)
    if wide:
        wide_case.widen(folder)
    return folder, pad


def requests(pad: int) -> dict[str, Any]:
    """Prompts of a case, with and without an image."""
    ids = gpu_smoke.prompts(LENGTHS if on_gpu() else CPU_LENGTHS, seed=1)
    more = gpu_smoke.prompts((4,) * len(IMAGES), seed=2)
    pictured = [[*a[:2], pad, *a[2:]] for a in more]
    return {
        "prompts": ids + pictured,
        "images": [None] * len(ids) + list(IMAGES),
        "count": gpu_smoke.GENERATED,
        "top": gpu_smoke.TOP,
    }


def case(name: str, folder: Path, asked: dict[str, Any], mode: str, **options: Any) -> dict[str, Any]:
    """A case of k3_core.vllm.testing.rank_engine."""
    common: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": STEP_TOKENS,
        "seed": 0,
        "dtype": "bfloat16" if on_gpu() else "float32",
        "disable_log_stats": True,
    }
    if on_gpu():
        # A fixed cache: other programs may share the devices, so free memory says nothing.
        common |= {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05}
    common |= {"enforce_eager": True} if mode == "eager" else {"compilation_config": gpu_smoke.GRAPHS}
    vendor = ["nvidia", "k3_nvidia"]
    return {
        "name": name,
        "folder": str(folder),
        "vendor": vendor,
        "launch": "external",
        "options": common | options,
        **asked,
    }


def cases(kind: str, folder: Path, asked: dict[str, Any], modes: list[str], forms: list[str]) -> list[dict[str, Any]]:
    """All cases of a kind: one rank ("one", "one wide"), or one of :data:`KINDS`."""
    if is_wide(kind):
        asked = asked | {"wide": wide_case.by_rank(folder, KINDS.get(kind, 1))}
    if kind not in KINDS:
        return [case(f"{kind} {mode}", folder, asked, mode) for mode in modes]
    sizes: dict[str, Any] = {"tensor_parallel_size": 2}
    if kind == "ep2":
        sizes["enable_expert_parallel"] = True
    if kind == "tp2pp2":
        sizes["pipeline_parallel_size"] = 2
    return [
        case(f"{kind} {form} {mode}", folder, asked, mode, additional_config={"k3_moe_reduction": form}, **sizes)
        for mode in modes
        for form in forms
    ]


def alone(rank: int) -> dict[str, str]:
    """On a CPU: ranks with different names share no memory, so vLLM's collectives are gloo's."""
    return {} if on_gpu() else {"VLLM_DIST_IDENT": f"k3-rank-{rank}"}


def engines(todo: list[dict[str, Any]], processes: int, limits: argparse.Namespace) -> Iterator[world.Result]:
    """Run cases; those that fail are tried with the next way to start ranks."""
    for launch in limits.launch.split(",") if processes > 1 else ("external",):
        external = launch == "external"
        found = world.run(
            [sys.executable, "-m", "k3_core.vllm.testing.rank_engine"],
            [one | {"launch": launch} for one in todo],
            processes if external else 1,
            case_seconds=limits.case_seconds,
            deadline=limits.deadline,
            environment=SAFE,
            per_rank=alone if external else lambda rank: {},
        )
        todo = []
        for result in found:
            if result.ranks is None:
                todo.append(result.case)
                say(part="engines", case=result.case["name"], launch=launch, ok=False, why=result.why[:4000])
            else:
                yield result


# ---------------------------------------------------------------------------------------------------------- comparison


def judge(result: world.Result, reference: Judge | None, one: list[dict[str, Any]]) -> bool:
    """Write the row of a case; whether it is right."""
    assert result.ranks is not None
    name, ranks = result.case["name"], result.ranks
    outputs = ranks[0]["outputs"]
    row: dict[str, Any] = {
        "part": "engines",
        "case": name,
        "launch": result.case["launch"],
        "seconds": round(result.seconds, 1),
        "start_s": ranks[0]["start_s"],
        "generate_s": ranks[0]["generate_s"],
        "facts": [rank["facts"] for rank in ranks],
        "ranks_agree": all(rank["outputs"] == outputs for rank in ranks),
        "as_asked": as_asked(result),
    }
    if result.before:
        row["before"] = result.before[-600:]
    checks = [row["ranks_agree"], row["as_asked"]]
    bound = 0.0
    if reference is not None:
        row["reference"] = reference.against_reference(outputs, result.case["prompts"], result.case["images"])
        checks.append(row["reference"]["ok"])
        bound = 2 * row["reference"]["max_bf16_reference"]
    row["one"] = against_one(outputs, one, bound)
    checks.append(row["one"]["ok"])
    if reference is None:
        checks.append(row["one"]["max_distance_from_one"] <= CPU_BOUND)
    row["ok"] = all(checks)
    say(**row)
    return bool(row["ok"])


def as_asked(result: world.Result) -> bool:
    """Whether the model of every rank had the form, the experts and the layers that the case is about."""
    assert result.ranks is not None
    options = result.case["options"]
    known = [rank["facts"] for rank in result.ranks]
    wide = result.case.get("wide")
    if not known[0]:
        return wide is None  # ranks that vLLM started are not asked; whose scales are wide is what that case is about
    form = options.get("additional_config", {}).get("k3_moe_reduction", "none")
    right = all(facts["forms"] == [form] for facts in known)
    right &= all(facts["expert_parallel"] == bool(options.get("enable_expert_parallel")) for facts in known)
    if options.get("pipeline_parallel_size", 1) > 1:
        # Stages differ, and the first ends inside a block of three layers.
        right &= known[0]["layers"] != known[-1]["layers"] and known[0]["layers"][1] % 3 != 0
    if wide is not None:
        right &= wide_case.right_facts(known, wide, variants=on_gpu())
    return bool(right)


# ----------------------------------------------------------------------------------------------------------------- main


def groups(
    limits: argparse.Namespace, folders: dict[bool, Path], asked: dict[str, Any]
) -> list[tuple[int, list[dict[str, Any]]]]:
    """(ranks, cases) of what shares processes: one rank of each checkpoint first, then each form of each kind.

    folders: the checkpoints by whether they have wide scales, those that a kind needs.
    """
    modes = limits.modes.split(",") if on_gpu() else ["eager"]
    forms, kinds = limits.forms.split(","), limits.kinds.split(",")
    wanted = [(form, kind) for form in forms for kind in kinds if kind not in ONE_FORM or form == forms[0]]
    several = [(KINDS[kind], cases(kind, folders[is_wide(kind)], asked, modes, [form])) for form, kind in wanted]
    ones = [(1, cases("one wide" if wide else "one", folder, asked, modes, forms)) for wide, folder in folders.items()]
    return [*ones, *several]


def is_wide(kind: str) -> bool:
    """Whether a kind serves the checkpoint with wide scales."""
    return kind.endswith("wide")


def run_engines(limits: argparse.Namespace) -> bool:
    """Every group, ``limits.together`` at a time; True if every case ran and is right."""
    found: queue.Queue[world.Result | None] = queue.Queue()

    def produce(ranks: int, todo: list[dict[str, Any]]) -> None:
        try:
            for result in engines(todo, ranks, limits):
                found.put(result)
        finally:
            found.put(None)

    with tempfile.TemporaryDirectory() as work:
        needed = sorted({is_wide(kind) for kind in limits.kinds.split(",")})
        written = {wide: checkpoint(Path(work), wide) for wide in needed}
        folders = {wide: folder for wide, (folder, _) in written.items()}
        todo = groups(limits, folders, requests(written[needed[0]][1]))
        with ThreadPoolExecutor(limits.together if on_gpu() else 1) as pool:
            running = [pool.submit(produce, *group) for group in todo]
            right = compare_all(list(folders.values()), found, len(running))
        for group in running:
            group.result()
    return right == sum(len(cases) for _, cases in todo)


def compare_all(folders: list[Path], found: queue.Queue[world.Result | None], producers: int) -> int:
    """Rows of all results as they come, those that one rank's must come before held back; how many are right."""
    references = {str(folder): Judge(folder) for folder in folders if on_gpu()}
    alone_outputs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    waiting: list[world.Result] = []
    right = 0
    while producers:
        result = found.get()
        if result is None:
            producers -= 1
            continue
        waiting.append(result)
        if result.case["name"].startswith("one "):
            assert result.ranks is not None
            alone_outputs[twin_of(result)] = result.ranks[0]["outputs"]
        for ready in [one for one in waiting if twin_of(one) in alone_outputs]:
            waiting.remove(ready)
            right += judge(ready, references.get(ready.case["folder"]), alone_outputs[twin_of(ready)])
    for result in waiting:
        say(part="engines", case=result.case["name"], ok=False, why="one rank did not run in this mode")
    return right


def twin_of(result: world.Result) -> tuple[str, str]:
    """(checkpoint, eager or graphs): what a run of one rank must have in common with those that it is compared with."""
    return result.case["folder"], str(result.case["name"].split()[-1])


def run_reductions(limits: argparse.Namespace) -> bool:
    """Rows of bench_reductions.py, each token count a case."""
    counts = [int(word) for word in limits.tokens.split(",")]
    todo = [{"name": f"{count} tokens", "tokens": count, "ranks": limits.ranks} for count in counts]
    right = True
    for result in world.run(
        [sys.executable, str(HERE / "bench_reductions.py")],
        todo,
        limits.ranks,
        case_seconds=min(limits.case_seconds, 90),
        deadline=limits.deadline,
        environment=SAFE,
        per_rank=alone,
    ):
        if result.ranks is None:
            say(part="reductions", tokens=result.case["tokens"], ok=False, why=result.why[:4000])
            right = False
            continue
        for rows in zip(*result.ranks, strict=True):
            # A collective is done when the last rank is: the slower one counts.
            slowest = max(rows, key=lambda row: row.get("us", 0.0))
            say(part="reductions", **slowest)
            right &= bool(slowest["ok"])
    return right


def main() -> int:
    """All wanted parts, each guarded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="engines,reductions")
    parser.add_argument("--modes", default="graphs,eager")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--kinds", default="tp2,ep2", help=", ".join(KINDS))
    parser.add_argument("--launch", default="external,mp")
    parser.add_argument("--together", type=int, default=7, help="groups of ranks at a time on GPUs")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--ranks", type=int, default=2, help="of the reductions")
    parser.add_argument("--case-seconds", type=float, default=150)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("K3_BENCH_SECONDS", 560)))
    limits = parser.parse_args()
    return run_parts("ranks.py", limits, {"engines": run_engines, "reductions": run_reductions}, say)


if __name__ == "__main__":
    sys.exit(main())
