"""AttnRes on one GPU: ours against vLLM's own kernel (where vLLM is installed) and against the byte floor.

``python bench.py --rows attnres``; ``python bench_attnres.py --sweep`` times launch configurations instead, to fill the
tuning table (``--table FILE`` writes it, ``--use FILE`` compares with vLLM under it). Delta and fused norm are on in
every row. Every size is timed in a CUDA graph over input sets that together exceed the L2: cold memory, no launch gaps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import (
    Results,
    copy_bandwidth,
    kernel_names,
    relative_error,
    require,
    table,
    time_pair_graph,
)

from k3_core.contracts import attn_res as contract
from k3_nvidia.kernels import attn_res as kernel

HIDDEN = 7168
EPS = 1e-5
SETS_BYTES = 256 << 20  # input sets of a graph together exceed the L2 several times


class Inputs:
    """Random inputs of one call; bank slots above ``blocks`` hold NaN."""

    def __init__(self, tokens: int, blocks: int, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

        self.blocks = blocks
        self.prefix, self.delta = normal(tokens, HIDDEN), normal(tokens, HIDDEN)
        self.bank = torch.full((tokens, 8, HIDDEN), float("nan"), dtype=torch.bfloat16, device="cuda")
        if blocks:
            self.bank[:, :blocks] = normal(tokens, blocks, HIDDEN)
        self.norm, self.proj, self.out_norm = normal(HIDDEN), normal(HIDDEN) * 0.05, normal(HIDDEN)
        self.out = torch.full((tokens, HIDDEN), float("nan"), dtype=torch.bfloat16, device="cuda")

    def ours(self, config: kernel.Config | None = None) -> torch.Tensor:
        return kernel.attn_res(
            self.prefix, self.delta, self.bank, self.norm, self.proj, EPS, self.blocks,
            output_norm_weight=self.out_norm, output_norm_eps=EPS, out=self.out, config=config,
        )  # fmt: skip

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, prefix) in fp64 from the contract, the prefix rounded as the contract says."""
        prefix = (self.prefix.float() + self.delta.float()).bfloat16()
        mixed = contract.mix(
            self.bank[:, : self.blocks].double(), prefix.double(), self.norm.double(), self.proj.double(), EPS
        )
        scale = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + EPS)
        return mixed * scale * self.out_norm.double(), prefix


def vllm_call(inputs: Inputs) -> Any:
    """vLLM's kernel on the same inputs, or None where it cannot be imported."""
    try:
        from vllm.models.kimi_k3.nvidia.ops.attn_res import attn_res
    except Exception:
        return None
    return lambda: attn_res(
        inputs.prefix, inputs.delta, inputs.bank, inputs.norm, inputs.proj, inputs.out_norm, inputs.blocks, -1, EPS, EPS
    )


def check(tokens: int, blocks: int, config: kernel.Config | None = None) -> None:
    inputs = Inputs(min(tokens, 300), blocks, seed=1)
    want, prefix = inputs.expected()
    got = inputs.ours(config)
    error = relative_error(got, want)
    require(error < 6e-3, f"relative error {error:.2e} against fp64")
    require(torch.equal(inputs.prefix, prefix), "prefix is not the rounded sum")


def floor_bytes(tokens: int, blocks: int) -> int:
    return tokens * HIDDEN * 2 * (blocks + 4)


def sets_for(tokens: int, blocks: int) -> list[Inputs]:
    one = tokens * HIDDEN * 2 * 12
    return [Inputs(tokens, blocks, seed=s) for s in range(max(2, min(64, SETS_BYTES // one)))]


def measure(tokens: int, blocks: int) -> dict[str, Any]:
    sets = sets_for(tokens, blocks)
    sides = [[s.ours for s in sets]]
    rival = [vllm_call(s) for s in sets]
    if rival[0] is not None:
        sides.append(rival)
    times = time_pair_graph(sides, iters=20 if tokens < 1024 else 10)
    floor = floor_bytes(tokens, blocks) / copy_bandwidth(floor_bytes(tokens, blocks)) * 1e6
    row: dict[str, Any] = {
        "tokens": tokens, "blocks": blocks, "how": "graph", "ours_us": times[0], "floor_us": floor,
        "ours_over_floor": times[0] / floor,
    }  # fmt: skip
    if rival[0] is not None:
        row |= {"vllm_us": times[1], "ours_over_vllm": times[0] / times[1], "vllm_over_floor": times[1] / floor}
    if blocks == 8:  # profiles take longer than the figures
        row["ours_kernels"] = kernel_names(sides[0][0])
        if rival[0] is not None:
            row["vllm_kernels"] = kernel_names(rival[0])
    return row


def run(out: Path, slices: Sequence[str]) -> None:
    results = Results(out / "attnres.json")
    shown = []
    for tokens, blocks in itertools.product((1, 8, 32, 128, 512, 1024, 8192), (1, 4, 8)):
        key = f"T{tokens}-n{blocks}"
        if slices and not any(s in key for s in slices):
            continue
        row = results.check_then_time(
            key, lambda t=tokens, b=blocks: check(t, b), lambda t=tokens, b=blocks: measure(t, b)
        )
        if row and "error" in row:
            print(key, row["error"])
        elif row:
            shown.append([key, row["ours_us"], row.get("vllm_us", 0.0), row["floor_us"], row["ours_over_floor"]])
    print(table(shown, ["row", "ours us", "vllm us", "floor us", "x floor"]))


CLUSTERS = [kernel.Config(0, 0, 0, False, 0, cluster=blocks) for blocks in (4, 8, 2, 1)]
#: Fewer registers a block: blocks of the next token, or of the next call, fit beside those at work.
DENSE = [kernel.Config(0, 0, 0, False, most, cluster=blocks) for blocks, most in ((4, 3), (4, 4), (4, 6), (2, 3))]
ONE_TOKEN = [
    kernel.Config(1024, w, g, False, 0, maxnreg)
    for w, g, maxnreg in ((8, 5, None), (8, 3, None), (16, 5, None), (8, 3, 128))
]
MANY = [
    *(kernel.Config(1024, w, 1, False, programs, ring=ring) for w, programs, ring in (
        (4, 2, 6), (4, 2, 7), (4, 2, 5), (8, 2, 4), (8, 2, 7),
    )),
    *(kernel.Config(1024, w, g, True, programs, maxnreg) for w, g, programs, maxnreg in (
        (8, 3, 1, None), (8, 2, 1, None), (4, 1, 2, None),
    )),
]  # fmt: skip
SWEEP = [*CLUSTERS, *DENSE, *ONE_TOKEN, *MANY]


def tried(tokens: int) -> list[kernel.Config]:
    """What is timed at this size: a block or a cluster a token for few, programs that walk them for many."""
    if tokens < 32:
        return [*CLUSTERS, *ONE_TOKEN]
    if tokens < 512:
        return [*CLUSTERS, *DENSE, *ONE_TOKEN]
    return [*(CLUSTERS[-2:] + DENSE[:2] if tokens <= 1024 else ()), *ONE_TOKEN[:1], *MANY]


def name_of(config: kernel.Config) -> str:
    """One word: warps, group, prefetch, programs, register cap, or what the ring or the cluster has."""
    if config.cluster:
        return f"cluster{config.cluster}" + (f"-p{config.programs}" if config.programs else "")
    if config.ring:
        return f"ring{config.ring}-c{config.chunk}-w{config.warps}-p{config.programs}"
    return "-".join(map(str, (config.warps, config.group, int(config.prefetch), config.programs, config.maxnreg)))


def _compile(job: tuple[int, int, kernel.Config]) -> str:
    tokens, blocks, config = job
    try:
        Inputs(tokens, blocks).ours(config)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{config}: {type(error).__name__} {error}"[:200]
    return ""


def compile_all() -> None:
    """Triton's variants in other processes, into the cache on disk; meanwhile the cluster kernels, which have none."""
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        jobs = [(t, n, c) for n in (8, 4, 1) for c in [*ONE_TOKEN, *MANY] for t in ((600,) if c in MANY else (1,))]
        others = pool.map_async(_compile, jobs, chunksize=2)
        said = [_compile((1, n, c)) for c in [*CLUSTERS, *DENSE] for n in (8, 4, 1)] if clusters() else ["no clusters"]
        print(f"clusters compiled, {time.time() - began:.0f} s", flush=True)
        print([word for word in [*said, *others.get()] if word][:3], flush=True)
    print(f"compiled, {time.time() - began:.0f} s", flush=True)


def clusters() -> bool:
    """Whether the cluster kernel can run here."""
    from k3_nvidia.kernels import attn_res_cluster

    ok, why = attn_res_cluster.available()
    if not ok:
        print(why, flush=True)
    return ok


def sweep(out: Path, seconds: float) -> None:
    """Every launch configuration at every size until the time is up; the best of each are printed.

    Against vLLM's kernel: ``run``.
    """
    end = time.time() + seconds
    compile_all()
    results = Results(out / "attnres_sweep.json")
    for tokens, blocks in itertools.product((1, 32, 8192, 128, 1024, 8, 512), (8, 1, 4)):
        sets = sets_for(tokens, blocks)[:16]
        live = []
        for config in tried(tokens):
            if time.time() > end:
                print("time is up", flush=True)
                return

            def one(config: kernel.Config = config) -> dict[str, Any]:
                check(tokens, blocks, config)
                return {"us": time_pair_graph([[lambda s=s: s.ours(config) for s in sets]], iters=8)[0]}

            row = results.row(f"T{tokens}-n{blocks} {name_of(config)}", one, redo=True) or {}
            live.append((row.get("us", float("inf")), name_of(config), row.get("error", "")))
        live.sort()
        floor = floor_bytes(tokens, blocks) / 4.27e12 * 1e6
        best = "; ".join(f"{name} {us:.2f}" for us, name, _ in live[:4])
        print(f"T{tokens} n{blocks} floor {floor:.2f}: {best} {live[-1][2][:80]}", flush=True)


#: Sizes measured -> the largest number of tokens, and of blocks, for which their best choice stands.
TOKEN_BOUNDS = {1: 3, 8: 16, 32: 64, 128: 256, 512: 700, 1024: 2048, 8192: 1 << 20}
BLOCK_BOUNDS = {1: 2, 4: 5, 8: 64}
#: A choice that another size has already is kept where it takes at most this much longer: fewer kernels to compile.
NEAR = 1.03


def _best(times: dict[str, float], used: list[str]) -> str:
    """The fastest, or one that is nearly as fast and in use already."""
    least = min(times.values())
    near = [name for name in used if times.get(name, float("inf")) <= NEAR * least]
    name = min(near, key=lambda name: times[name]) if near else min(times, key=lambda name: times[name])
    used.append(name)
    return name


def write_table(results: dict[str, Any], path: Path) -> None:
    """The tuning table from a sweep; sizes without a measurement keep what the table says.

    Where a cluster is best the best of Triton's follows it, for where there are no clusters.
    """
    from k3_nvidia.tuning import attn_res as tuning

    configs = {name_of(config): config for config in SWEEP}
    rows: list[dict[str, Any]] = []
    used: list[str] = []
    measured = []
    for (tokens, token_bound), (blocks, block_bound) in itertools.product(TOKEN_BOUNDS.items(), BLOCK_BOUNDS.items()):
        times = {
            key.split(" ")[1]: row["us"]
            for key, row in results["rows"].items()
            if key.startswith(f"T{tokens}-n{blocks} ") and "us" in row and key.split(" ")[1] in configs
        }
        plain = {name: us for name, us in times.items() if not configs[name].cluster}
        chosen = list(dict.fromkeys(tuning.choose(tokens, blocks, HIDDEN, some) for some in (True, False)))
        if plain:
            chosen = [configs[_best(plain, used)]]
            fastest = _best(times, used)
            if configs[fastest].cluster:
                chosen.insert(0, configs[fastest])
            measured.append(f"{tokens}x{blocks}")
        for config in chosen:
            rows.append({"max_tokens": token_bound, "max_blocks": block_bound, "config": dataclasses.asdict(config)})
    environment = results["environment"]
    data = {
        "device": environment["device"],
        "date": environment["date"][:10],
        "measured": f"tokens x blocks {', '.join(measured)} (benchmarks/results/attnres_sweep.json)",
    }
    text = json.dumps({**data, "rows": []}, indent=1)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(text.replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=80, help="of the sweep, compiling included")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--table", type=Path, help="measure nothing: write the tuning table from the sweep in --out")
    parser.add_argument("--use", type=Path, help="time with this tuning table")
    options = parser.parse_args()
    if options.use:
        from k3_nvidia.tuning import attn_res as tuning

        rows = tuning.read(options.use)
        tuning._table = lambda: rows  # type: ignore[assignment]
    if options.table:
        write_table(json.loads((options.out / "attnres_sweep.json").read_text()), options.table)
    elif options.sweep:
        sweep(options.out, options.seconds)
    else:
        run(options.out, [])
