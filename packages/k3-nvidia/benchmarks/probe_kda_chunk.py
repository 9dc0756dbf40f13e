"""kda_chunk_cuda against the Triton kernels and fp64 on one GPU: errors of every output, then times in CUDA graphs.

``python probe_kda_chunk.py [--variants 302,303] [--parts check,times,passes]``: a line a measurement.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from harness import require, time_pair_graph

from k3_nvidia.kernels import cuda_host, kda_chunk_cuda, kda_prefill
from k3_nvidia.kernels.kda_plan import plan_prefill
from k3_nvidia.tuning import kda as tuning

BOUND, DIM, NAMES = -5.0, 128, ("w", "ut", "qg", "kg", "a", "gamma")
LOG = Path(os.environ.get("OUT", ".")) / "kda_chunk.jsonl"


@functools.cache
def variant(code: int, tiled: bool = False, deep: int = 1) -> cuda_host.CudaKernel:
    """3DB: B blocks a multiprocessor, D sixteens of value channels at once (0: 1)."""
    return cuda_host.CudaKernel(
        "kda_chunk", "kda_chunk_cuda", 128, kda_chunk_cuda.SHARED_BYTES, BLOCKS=code % 10, TILED=int(tiled),
        DEEP=max(code // 10 % 10, 1),
    )  # fmt: skip


REAL = kda_chunk_cuda.kernel
kda_chunk_cuda.kernel = variant


def report(**row: object) -> None:
    text = json.dumps(row)
    print(text, flush=True)
    with LOG.open("a") as file:
        file.write(text + "\n")


def inputs(tokens: int, heads: int, kind: str, packed: bool = True) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator(device="cuda").manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    qkv = draw(tokens, 3, heads, DIM)
    z, beta = draw(tokens, heads, DIM), torch.sigmoid(draw(tokens, heads))
    a_log, dt_bias = draw(heads) * 0.3, draw(heads, DIM) * 0.5
    if kind == "bound":
        z = z * 0 + 20
    if kind in ("long", "equal"):
        z = z - 9
    if kind == "equal":
        qkv[:, 1] = qkv[:1, 1]
        beta = torch.sigmoid(draw(tokens, heads) + 4)
    q, k, v = qkv.bfloat16().unbind(1)
    if not packed:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return q, k, v, z.bfloat16(), beta, a_log, dt_bias


def empty(places: int, fill: float = float("nan")) -> list[torch.Tensor]:
    big = [torch.full((places, 64 * DIM), fill, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    a = torch.full((places, 64 * 64), fill, dtype=torch.bfloat16, device="cuda")
    return [*big, a, torch.full((places, DIM), fill, dtype=torch.float32, device="cuda")]


def exact(x: tuple[torch.Tensor, ...], chunks: torch.Tensor) -> list[torch.Tensor]:
    """fp64, a chunk at a time; shapes of `empty`."""
    q, k, v, z, beta, a_log, dt_bias = (y.double() for y in x)
    heads = q.shape[1]
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * DIM**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g = BOUND * torch.sigmoid(a_log.exp()[:, None] * (z + dt_bias.view(heads, DIM)))
    found: list[list[torch.Tensor]] = [[] for _ in NAMES]
    eye = torch.eye(64, dtype=torch.float64, device="cuda")
    for token, rows, *_ in chunks.tolist():

        def pad(y: torch.Tensor, token: int = token, rows: int = rows) -> torch.Tensor:
            full = y.new_zeros(64, *y.shape[1:])
            full[:rows] = y[token : token + rows]
            return full.transpose(0, 1)

        Q, K, V, G, B = pad(q), pad(k), pad(v), pad(g).cumsum(1), pad(beta.unsqueeze(-1))[..., 0]
        decay = (G[:, :, None] - G[:, None, :]).clamp(max=0).exp()
        M = torch.einsum("nic,njc,nijc->nij", K, K, decay).tril(-1) * B[:, :, None]
        A = torch.einsum("nic,njc,nijc->nij", Q, K, decay).tril()
        T = torch.linalg.inv(eye + M) * B[:, None, :]
        parts = (
            -T @ (K * G.exp()),
            (T @ V).transpose(1, 2),
            Q * G.exp(),
            K * (G[:, -1:] - G).exp(),
            A,
            G[:, -1].exp(),
        )
        for store, part in zip(found, parts, strict=True):
            store.append(part.reshape(heads, -1))
    return [torch.cat(y) for y in found]


def run(x: tuple[torch.Tensor, ...], plan: object, outputs: list[torch.Tensor], blocks: int) -> None:
    if blocks:
        kda_chunk_cuda.chunk(*x, BOUND, plan.chunks, *outputs, blocks=blocks)
    else:
        kda_prefill._inside_chunks(*x, BOUND, plan, tuple(outputs))


def errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> dict[str, str]:
    found = {}
    for name, g, w in zip(NAMES, got, want, strict=True):
        d = g.double() - w
        found[name] = f"{(d.norm() / w.norm()).item():.2e} max {d.abs().max().item():.1e}"
    return found


def correct(variants: list[int]) -> set[int]:
    good = set(variants)
    for kind in ("mixed", "bound", "long", "equal"):
        x = inputs(64 * 6 + 37 + 1, 3, kind)
        plan = plan_prefill([0, 165, 166, 64 * 6 + 38], 3, "cuda", engine="chunks")
        want = exact(x, plan.chunks)
        for blocks in (0, *sorted(good)):
            try:
                got = empty(want[0].shape[0])
                run(x, plan, got, blocks)
                torch.cuda.synchronize()
                again = empty(want[0].shape[0])
                run(x, plan, again, blocks)
                same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
                found = errors(got, want)
                report(check=kind, blocks=blocks, same_bits=same, **found)
                if not same or any(float(f.split()[0]) > 1e-2 or "nan" in f for f in found.values()):
                    good.discard(blocks)
            except Exception:
                traceback.print_exc()
                good.discard(blocks)
    return good


def times(variants: list[int]) -> None:
    for heads, tokens in ((6, 8192), (12, 8192), (6, 32768), (12, 32768)):
        x = inputs(tokens, heads, "mixed", packed=False)
        plan = plan_prefill([0, tokens], heads, "cuda", engine="chunks")
        outputs = empty(plan.num_chunks * heads)
        us = time_pair_graph([lambda b=b: run(x, plan, outputs, b) for b in (0, *variants)], iters=12)
        report(heads=heads, tokens=tokens, part="chunk", us=dict(zip(("triton", *variants), us, strict=True)))
        q, k, v, z, beta, a_log, dt_bias = x
        state = torch.zeros(3, heads, DIM, DIM, device="cuda")
        slots, cu = torch.tensor([1], device="cuda", dtype=torch.int32), torch.tensor([0, tokens], device="cuda")
        init = torch.zeros(1, dtype=torch.bool, device="cuda")
        results = {}

        def whole(blocks: int) -> None:
            tuning.chunk_cuda = lambda: {"blocks": blocks} if blocks else {}
            tuning.passes = dict
            results[blocks] = kda_prefill.kda_prefill(
                q, k, v, z, beta, a_log, dt_bias, BOUND, state, slots, cu.int(), init, plan=plan
            )

        for b in (0, *variants):
            whole(b)
        base = results[0].double()
        apart = {b: f"{((results[b].double() - base).norm() / base.norm()).item():.2e}" for b in variants}
        results.clear()
        us = time_pair_graph([lambda b=b: whole(b) for b in (0, *variants)], iters=12)
        report(
            heads=heads,
            tokens=tokens,
            part="prefill",
            us=dict(zip(("triton", *variants), us, strict=True)),
            apart=apart,
        )


PASSES = {
    "local": [{"BR": 64, "STAGES": 3, "num_warps": 4}, {"BR": 128, "STAGES": 3, "num_warps": 8},
              {"BR": 128, "STAGES": 4, "num_warps": 8}],
    "output": [{"BR": 64, "STAGES": 3, "num_warps": 4}, {"BR": 128, "STAGES": 3, "num_warps": 8},
               {"BR": 128, "STAGES": 2, "num_warps": 8}],
}  # fmt: skip


def passes(blocks: int) -> None:
    """Times of the passes over chunks alone and of the whole, by segment length and options."""
    table = tuning.table()
    for heads, tokens, cuts in (
        (6, 8192, (12, 6, 10)), (12, 8192, (26, 12, 13, 22)), (12, 32768, (94, 47, 103, 24)), (6, 32768, (47, 24, 94)),
    ):  # fmt: skip
        q, k, v, z, beta, a_log, dt_bias = inputs(tokens, heads, "mixed", packed=False)
        state = torch.zeros(3, heads, DIM, DIM, device="cuda")
        slots, cu = torch.tensor([1], device="cuda", dtype=torch.int32), torch.tensor([0, tokens], device="cuda").int()
        init = torch.zeros(1, dtype=torch.bool, device="cuda")
        tuning.chunk_cuda = lambda: {"blocks": blocks} if blocks else {}
        for cut in cuts:
            plan = plan_prefill([0, tokens], heads, "cuda", segment_chunks=cut)
            us = {}
            for out in PASSES["output"]:
                for local in PASSES["local"][:2]:
                    if out["STAGES"] == 2 and local["BR"] == 128:
                        continue

                    def whole(out: dict = out, local: dict = local, plan: object = plan) -> None:
                        table["output"], table["local"] = out, local
                        kda_prefill.kda_prefill(
                            q, k, v, z, beta, a_log, dt_bias, BOUND, state, slots, cu, init, plan=plan
                        )

                    try:
                        whole()
                        torch.cuda.synchronize()
                        label = f"out {out['BR']}x{out['STAGES']} local {local['BR']}x{local['STAGES']}"
                        us[label] = round(time_pair_graph([whole], iters=10)[0], 1)
                    except Exception as error:
                        us[str(out) + str(local)] = str(error)[:100]
            report(heads=heads, tokens=tokens, part="passes", cut=cut, segments=plan.num_segments, us=us)
            if cut != cuts[0]:
                continue
            us, kept = {}, table["scan"]
            for rows, stages, warps in ((16, 3, 4), (16, 3, 8), (32, 3, 4), (32, 3, 8), (16, 2, 4)):
                table["scan"] = {"BR": rows, "STAGES": stages, "num_warps": warps}
                try:
                    whole(PASSES["output"][0], PASSES["local"][0])
                    torch.cuda.synchronize()
                    first = [lambda: whole(PASSES["output"][0], PASSES["local"][0])]
                    us[f"scan {rows}x{stages} warps {warps}"] = round(time_pair_graph(first, iters=10)[0], 1)
                except Exception as error:
                    us[f"scan {rows}x{stages} warps {warps}"] = str(error)[:100]
            table["scan"] = kept
            report(heads=heads, tokens=tokens, part="scan", cut=cut, us=us)


def tiled(x: tuple, plan: object, state: torch.Tensor, slots: torch.Tensor, init: torch.Tensor, code: int,
          local: tuple[int, int], output: tuple[int, int], parts: str = "clso") -> torch.Tensor:  # fmt: skip
    """The prefill with kda_passes_cuda; parts: which kernels run (chunk, local, scan, output)."""
    from k3_nvidia.kernels import kda_passes_cuda as passes_cuda

    heads = x[0].shape[1]
    places, segments = plan.num_chunks * heads, plan.num_segments
    w, ut, qg, kg = torch.empty(4, places, 64 * DIM, dtype=torch.bfloat16, device="cuda").unbind(0)
    a = torch.empty(places, 4096, dtype=torch.bfloat16, device="cuda")
    gamma = torch.empty(places, DIM, device="cuda")
    start = torch.empty(segments, heads, DIM, DIM, device="cuda")
    hi, lo = torch.empty(2, segments, heads, DIM, DIM, device="cuda", dtype=torch.bfloat16).unbind(0)
    out = torch.empty_like(x[2], memory_format=torch.contiguous_format)
    if "c" in parts:
        kda_chunk_cuda.chunk(*x, BOUND, plan.chunks, w, ut, qg, kg, a, gamma, blocks=code, tiled=True)
    tensors = passes_cuda.Tensors(
        w, ut, qg, kg, a, gamma, plan.chunks, plan.segments, plan.order, start, hi, lo, out, state, slots, init
    )
    if plan.order.numel() and "l" in parts:
        passes_cuda.local(tensors, heads, *local)
    if plan.scans.numel() and "s" in parts:
        passes_cuda.scan(tensors, plan.scans, heads)
    if "o" in parts:
        passes_cuda.output(tensors, heads, *output)
    return out


def wgmma(code: int) -> None:
    """kda_passes_cuda against the Triton passes, then times."""
    for heads, bounds, cut in ((2, [0, 64 * 7 + 37, 64 * 7 + 38, 64 * 9], 2), (3, [0, 1000], 0), (6, [0, 8192], 12)):
        x = inputs(bounds[-1], heads, "long")
        plan = plan_prefill(bounds, heads, "cuda", segment_chunks=cut)
        n = len(bounds) - 1
        start = torch.randn(n + 1, heads, DIM, DIM, device="cuda")
        slots = torch.arange(n, 0, -1, device="cuda", dtype=torch.int32)
        init = torch.arange(n, device="cuda") % 2 == 0
        tuning.chunk_cuda = dict
        ours, theirs = start.clone(), start.clone()
        want = kda_prefill.kda_prefill(*x, BOUND, theirs, slots, torch.tensor(bounds).int(), init, plan=plan)
        for local in ((1, 4), (2, 4)):
            for output in ((1, 3), (2, 3)):
                ours.copy_(start)
                got = tiled(x, plan, ours, slots, init, code, local, output)
                torch.cuda.synchronize()
                d = (got.double() - want.double()).norm() / want.double().norm()
                e = (ours.double() - theirs.double()).norm() / theirs.double().norm()
                report(check="wgmma", heads=heads, cut=cut, local=local, output=output, out=d.item(), state=e.item())
                require(d.item() < 8e-3 and e.item() < 8e-3, "the passes differ from Triton's")


SHAPES = ((6, 8192), (12, 8192), (6, 32768), (12, 32768))


def serving_case(heads: int, lengths: list[int], kind: str = "mixed") -> tuple:
    """Inputs as a layer has them (columns of one tensor), state, slots, init."""
    x = inputs(sum(lengths), heads, kind, packed=False)
    state = torch.zeros(len(lengths) + 1, heads, DIM, DIM, device="cuda")
    slots = torch.arange(1, len(lengths) + 1, device="cuda").int()
    return x, state, slots, torch.zeros(len(lengths), dtype=torch.bool, device="cuda")


def choose(codes: list[int], write: str) -> None:
    """Blocks of the chunk kernel, rows and segment lengths of the passes: times, and the table that they make."""
    total: dict[int, float] = {}
    whole: dict[tuple[int, int], float] = {}
    steps: dict[str, list[float]] = {"local": [], "scan": [], "output": []}
    for heads, tokens in SHAPES:
        x, state, slots, init = serving_case(heads, [tokens])
        chunks = tokens // 64
        plan = plan_prefill([0, tokens], heads, "cuda", segment_chunks=12)
        calls = [lambda c=c: tiled(x, plan, state, slots, init, c, (2, 3), (2, 3), "c") for c in codes]
        for code, us in zip(codes, time_pair_graph(calls, iters=10), strict=True):
            total[code] = total.get(code, 1.0) * us
        code = min(total, key=total.__getitem__)
        report(part="choose chunk", heads=heads, tokens=tokens, product=total)
        best: dict[tuple[int, int], float] = {}
        for pieces in sorted({5, 8, 11, 15, 22, max(2, round(132 / 2 / heads))}):
            cut = -(-chunks // pieces)
            plan = plan_prefill([0, tokens], heads, "cuda", segment_chunks=cut)
            for groups in ((1, 1), (1, 2), (2, 1), (2, 2)):
                local, output = (groups[0], 4), (groups[1], 3)
                call = [
                    lambda p=p: tiled(x, plan, state, slots, init, code, local, output, p)
                    for p in ("clso", "l", "s", "o")
                ]
                us = dict(zip(("whole", "local", "scan", "output"), time_pair_graph(call, iters=6), strict=True))
                report(
                    part="choose", heads=heads, tokens=tokens, cut=cut, segments=plan.num_segments, groups=groups, us=us
                )
                best[groups] = min(best.get(groups, 1e9), us["whole"])
                waves = -(-heads * (plan.num_segments - 1) * (4 // groups[0]) // (132 * (3 - groups[0])))
                waves_out = -(-heads * plan.num_segments * (2 // groups[1]) // 132)
                if groups == (2, 2) and cut > 8:
                    steps["local"].append((us["local"] - 3) / (waves * cut))
                    steps["output"].append((us["output"] - 3) / (waves_out * cut))
                    steps["scan"].append((us["scan"] - 3) / max(plan.num_segments - 2, 1))
        for groups, us in best.items():
            whole[groups] = whole.get(groups, 1.0) * us
    groups = min(whole, key=whole.__getitem__)
    costs = {name: round(sorted(found)[len(found) // 2], 2) for name, found in steps.items()}
    chosen = {
        "local": {"groups": groups[0], "stages": 4}, "output": {"groups": groups[1], "stages": 3},
        "cost_us": {**costs, "cut": 6.0}, "concurrent": {"local": 3 - groups[0], "output": 1},
    }  # fmt: skip
    code = min(total, key=total.__getitem__)
    report(part="chosen", code=code, passes=chosen, products={str(k): v for k, v in whole.items()})
    if write:
        path = Path(write)
        text = path.read_text().rstrip().removesuffix("}").rstrip()
        form = json.dumps({"blocks": code % 10, "deep": max(code // 10 % 10, 1)})
        text += f',\n  "chunk_cuda": {form},\n  "passes_cuda": {json.dumps(chosen)}\n}}\n'
        json.loads(text)
        path.write_text(text)


def choose_chunk(codes: list[int], write: str) -> None:
    """As choose where only the chunk kernel is right."""
    total = dict.fromkeys(codes, 1.0)
    for heads, tokens in SHAPES:
        x, *_ = serving_case(heads, [tokens])
        plan = plan_prefill([0, tokens], heads, "cuda", engine="chunks")
        kept = empty(plan.num_chunks * heads)
        calls = [lambda c=c: run(x, plan, kept, c) for c in codes]
        for code, us in zip(codes, time_pair_graph(calls, iters=10), strict=True):
            total[code] *= us
    code = min(total, key=total.__getitem__)
    report(part="chosen", code=code, products=total)
    if write:
        path = Path(write)
        text = path.read_text().rstrip().removesuffix("}").rstrip()
        path.write_text(text + f',\n  "chunk_cuda": {{"blocks": {code % 10}, "deep": {max(code // 10 % 10, 1)}}}\n}}\n')


def chosen_form() -> None:
    """From here on kda_prefill runs as the table says."""
    tuning.table.cache_clear()
    importlib.reload(tuning)
    kda_prefill.tuning = tuning
    kda_chunk_cuda.kernel = REAL


def rival() -> None:
    """kda_prefill as the table has it against vLLM's FlashKDA operator with its gather and scatter, alternating."""
    from k3_nvidia.kernels import kda_flash

    chosen_form()
    cases = [(h, [t]) for h, t in SHAPES] + [
        (6, [2048]),
        (12, [2048]),
        (24, [8192]),
        (96, [8192]),
        (12, [1024] * 8),
        (6, [512] * 16),
    ]
    for heads, lengths in cases:
        x, state, slots, init = serving_case(heads, lengths)
        bounds = [0, *itertools.accumulate(lengths)]
        cu = torch.tensor(bounds, device="cuda").int()
        sides = {}
        for engine in ("chunks", "flash") if kda_flash.operator()[0] is not None else ("chunks",):
            plan = plan_prefill(bounds, heads, "cuda", engine=engine)
            sides[engine] = lambda plan=plan: kda_prefill.kda_prefill(*x, BOUND, state, slots, cu, init, plan=plan)
        us = dict(zip(sides, time_pair_graph(list(sides.values()), iters=10), strict=True))
        plan = plan_prefill(bounds, heads, "cuda", engine="chunks")
        ratio = round(us["chunks"] / us["flash"], 3) if len(us) == 2 else None
        report(part="rival", heads=heads, lengths=str(lengths)[:40], segments=plan.num_segments, us=us, ratio=ratio)


def conform(choose: Callable[[], None] = chosen_form) -> None:
    """Every small and real case of the operator through this wheel's kernels as the table, or ``choose``, has them."""
    import conformance as script

    from k3_core.testing import conformance as suite
    from k3_nvidia.kernels import kda_passes_cuda

    choose()
    tuning.prefill_engine = lambda *_: "chunks"
    ran = {"chunk": 0, "passes": 0}
    chunk, output = kda_chunk_cuda.chunk, kda_passes_cuda.output

    def counted_chunk(*args: object, **named: object) -> None:
        ran["chunk"] += 1
        chunk(*args, **named)

    def counted_output(*args: object, **named: object) -> None:
        ran["passes"] += 1
        output(*args, **named)

    kda_chunk_cuda.chunk, kda_passes_cuda.output = counted_chunk, counted_output
    kernel = script.implementation("kda_prefill")
    done = suite.Report()
    for case in suite.cases("kda_prefill", ("small", "real")):
        done.rows.append(suite.run_case(case, kernel, "cuda"))
    report(part="conformance", ran=ran, summary=done.summary()[:3000])
    require(done.ok and ran["chunk"] > 0, "conformance")


def accuracy() -> None:
    """Error norms of output and state against fp64, ours and FlashKDA's."""
    from k3_core.contracts import kda as contract
    from k3_nvidia.kernels import kda_flash

    chosen_form()
    for kind in ("mixed", "bound", "long", "equal"):
        tokens = [4096, 100]
        x, state, slots, init = serving_case(6, tokens, kind)
        bounds = [0, 4096, 4196]
        q, k, v, z, beta, a_log, dt_bias = x
        g = contract.gate(z.double(), a_log, dt_bias, BOUND)
        want, after = contract.chunked(q.double(), k.double(), v.double(), g, beta.double(), None, bounds)
        found = {}
        for engine in ("chunks", "flash") if kda_flash.operator()[0] is not None else ("chunks",):
            plan = plan_prefill(bounds, 6, "cuda", engine=engine)
            mine = state.clone()
            got = kda_prefill.kda_prefill(
                *x, BOUND, mine, slots, torch.tensor(bounds, device="cuda").int(), init, plan=plan
            )
            pairs = ((got, want), (mine[1:], after))
            found[engine] = [f"{((a.double() - b).norm() / b.norm()).item():.2e}" for a, b in pairs]
        report(part="accuracy", kind=kind, out_and_state=found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", default="302,303")
    parser.add_argument("--parts", default="check,times")
    parser.add_argument("--write", default="", help="kda.json that choose puts its choice into")
    args = parser.parse_args()
    variants = [int(v) for v in args.variants.split(",")]
    report(device=torch.cuda.get_device_name(), torch=torch.__version__)
    for blocks in variants:
        start = time.time()
        try:
            if "check" in args.parts:
                kda_chunk_cuda.kernel(blocks).function(0)
            report(compiled=blocks, seconds=round(time.time() - start, 2))
        except Exception as error:
            report(refused=blocks, error=f"{type(error).__name__}: {str(error)[:1500]}")
    good = variants if "check" not in args.parts else sorted(correct(variants))
    report(correct=good)
    if "times" in args.parts:
        times(good)
    passes_right = True
    if "wgmma" in args.parts:
        try:
            wgmma(good[0])
        except Exception:
            traceback.print_exc()
            passes_right = False
    if "choose" in args.parts:
        (choose if passes_right else choose_chunk)(good, args.write)
    if "rival" in args.parts:
        rival()
    if "accuracy" in args.parts:
        accuracy()
    if "conform" in args.parts:
        conform()
    if "passes" in args.parts and good:
        passes(good[-1])


if __name__ == "__main__":
    sys.exit(main())
