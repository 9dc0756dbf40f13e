"""KDA on one GPU: prefill, decode, verification and their neighbours against vLLM's kernels and the byte floor.

``python bench.py --rows kda`` (``--slice prefill`` and so on for a part). Every row is checked against the fp64
contract before it is timed; a red check suppresses the figure. Prefill rows carry three figures a side: cold eager
time (launches included), the same inside a CUDA graph (device time), and the error against fp64. "Ours" is the path
that serving takes for the shape, named in the row (this wheel's chunk kernels, or vLLM's FlashKDA operator between our
gather and scatter); "theirs" is the path of vLLM's layer around the same operator, its gather and scatter included.
Times of both of ours are in the row. `kernels` names what ran on both sides.

Resumable: finished rows are kept. K3_BENCH_SECONDS limits the time after which no further row is begun. At the end
plots_kda.py draws the plots beside the results and ci/render_docs.py writes the page, where they are here.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import plots_kda
import rival_kda
import torch
from harness import (
    Results,
    copy_bandwidth,
    kernel_names,
    relative_error,
    require,
    table,
    time_pair_cold,
    time_pair_graph,
)

from k3_core.contracts import kda as contract
from k3_nvidia.kernels import kda_flash, kda_plan, kda_prefill, kda_step
from k3_nvidia.tuning import kda as tuning

BOUND = -5.0
DIM = 128
GRAPH_BYTES = 160 << 20  # state touched by the input sets of one graph: several times the L2

HEADLINES = [(6, (8192,)), (12, (8192,)), (6, (32768,)), (12, (32768,)), (96, (8192,))]
SWEEP = [
    (heads, lengths)
    for lengths in (
        (1024,) * 8,
        (512,) * 16,
        (2048,) * 4,
        (8192,) * 4,
        (7000, 900, 200, 92),
        (1024,),
        (4096,),
        (16384,),
    )
    for heads in (6, 12, 24, 48, 96)
]
DECODE = [
    *((12, n) for n in (1, 8, 32, 64, 128, 256)),
    *((6, n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    *((24, n) for n in (32, 128)),
    *((96, n) for n in (8, 32, 128)),
]
LAYER = [(6, (8192,)), (12, (8192,)), (96, (8192,)), (96, (1024,) * 8), (12, (1024,) * 8)]
VERIFY = [(heads, n, spec) for heads in (6, 12) for spec in (1, 3, 7) for n in (1, 8, 32, 64)]


def prefill_case(heads: int, lengths: Sequence[int], seed: int = 0, long_memory: bool = True) -> dict[str, Any]:
    """Random inputs; gates from the bound to near one (dt_bias spread as in the checkpoints), half the states new."""
    torch.manual_seed(seed)
    tokens, sequences = sum(lengths), len(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    qkv = normal(tokens, 3 * heads * DIM).bfloat16()
    q, k, v = (normal(tokens, heads, DIM).bfloat16() for _ in range(3))
    bias = -6.0 * torch.rand(heads, DIM, device="cuda") if long_memory else normal(heads, DIM)
    return dict(
        qkv=qkv, q=q, k=k, v=v, z=normal(tokens, heads, DIM).bfloat16(), gate=normal(tokens, heads, DIM).bfloat16(),
        beta=torch.sigmoid(normal(tokens, heads)), a_log=normal(heads) * 0.3, dt_bias=bias, lower_bound=BOUND,
        conv_weight=normal(3 * heads * DIM, 4), o_norm_weight=normal(DIM), o_norm_eps=1e-5,
        conv_state=normal(sequences + 1, 3, 3 * heads * DIM).bfloat16().transpose(1, 2),
        recurrent_state=normal(sequences + 1, heads, DIM, DIM),
        slot_mapping=(torch.randperm(sequences, device="cuda") + 1).int(),
        has_initial_state=torch.arange(sequences, device="cuda") % 2 == 1,
    )  # fmt: skip


def boundaries(lengths: Sequence[int]) -> torch.Tensor:
    """cu_seqlens on the CPU, as the scheduler has them."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def ours_prefill(case: dict[str, Any], cu: torch.Tensor, plan: kda_plan.PrefillPlan, out: torch.Tensor) -> Any:
    names = ("q", "k", "v", "z", "beta", "a_log", "dt_bias", "lower_bound", "recurrent_state", "slot_mapping")
    args = [case[n] for n in names]
    first = case["has_initial_state"]
    return lambda: kda_prefill.kda_prefill(*args, cu, first, out=out, plan=plan)


def expected_prefill(case: dict[str, Any], cu: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 outputs and final states of the first `heads` heads."""
    slots = case["slot_mapping"].long()
    first = case["has_initial_state"].view(-1, 1, 1, 1)
    start = torch.where(first, case["recurrent_state"][slots, :heads], torch.zeros((), device="cuda")).double()
    q, k, v, z = (case[n][:, :heads].double() for n in ("q", "k", "v", "z"))
    g = contract.gate(z, case["a_log"][:heads].double(), case["dt_bias"][:heads].double(), BOUND)
    return contract.chunked(q, k, v, g, case["beta"][:, :heads].double(), start, cu.cuda(), chunk=64)


def plain_name(name: str) -> str:
    """A kernel's name without return type, template and parameters, whether the profiler gives it mangled or not."""
    if mangled := re.match(r"_Z(\d+)", name):
        return name[mangled.end() : mangled.end() + int(mangled[1])]
    return name.removeprefix("void ").split("<")[0].split("(")[0]


_names: dict[str, list[str]] = {}


def named(key: str, call: Callable[[], Any]) -> list[str]:
    """Kernels of a path, asked of the profiler once a path; their parameter lists are left out."""
    if key not in _names:
        try:
            _names[key] = [plain_name(name) for name in kernel_names(call)]
        except Exception as error:
            _names[key] = [f"not known: {type(error).__name__}"]
    return _names[key]


def engines(heads: int, cu: torch.Tensor) -> tuple[str, dict[str, kda_plan.Plan]]:
    """(what serving chooses, a plan for each of our implementations that can run here)."""
    chosen = kda_plan.plan_prefill(cu, heads, "cuda").engine
    there = [kda_plan.CHUNKS] + ([kda_plan.FLASH] if kda_flash.operator()[0] is not None else [])
    if chosen not in there:
        chosen = kda_plan.CHUNKS
    return chosen, {name: kda_plan.plan_prefill(cu, heads, "cuda", engine=name) for name in there}


def prefill_row(heads: int, lengths: Sequence[int]) -> dict[str, Any]:
    case, cu = prefill_case(heads, lengths), boundaries(lengths)
    device_cu = cu.cuda()
    chosen, plans = engines(heads, cu)
    saved = case["recurrent_state"].clone()
    shown = min(heads, 3 if sum(lengths) <= 8192 else 1)
    o, state = expected_prefill(case, cu, shown)
    slots = case["slot_mapping"].long()
    row: dict[str, Any] = {"engine": chosen, "tokens": sum(lengths), "longest": max(lengths), "heads": heads}
    out = torch.empty_like(case["q"])
    sides: dict[str, Any] = {name: ours_prefill(case, device_cu, plan, out) for name, plan in plans.items()}
    for name, call in sides.items():
        out.fill_(math.nan)
        call()
        errors = [relative_error(out[:, :shown], o), relative_error(case["recurrent_state"][slots, :shown], state)]
        require(max(errors) < 8e-3, f"prefill {heads} {lengths[:4]} {name}: errors {errors}")
        require(bool(out.isfinite().all()), f"{name} left rows unwritten")
        row[f"{name}_errors"] = errors
        case["recurrent_state"].copy_(saved)
    row["errors"] = row[f"{chosen}_errors"]
    theirs = rival_kda.prefill(case, device_cu)
    if theirs is not None:
        got, final = theirs()
        row["rival_errors"] = [relative_error(got[:, :shown], o), relative_error(final[:, :shown], state)]
        sides["rival"] = theirs
    calls = list(sides.values())
    for how, times in (("cold", time_pair_cold(calls, 10)), ("graph", time_pair_graph(calls, 8))):
        row |= {f"{name}_{how}_us": us for name, us in zip(sides, times, strict=True)}
        row[f"{how}_us"] = row[f"{chosen}_{how}_us"]
        if theirs is not None:
            row[f"{how}_ratio"] = row[f"{how}_us"] / row[f"rival_{how}_us"]
    row["floor_bytes"] = sum(lengths) * heads * (DIM * 10 + 4) + len(lengths) * heads * DIM * DIM * 8
    cut = "cut" if chosen == kda_plan.CHUNKS and plans[chosen].order.numel() else "uncut"
    row["kernels"] = {"ours": named(f"prefill {chosen} {cut}", sides[chosen])}
    if theirs is not None:
        row["rival"] = "gather + FlashKDA + scatter (vLLM)"
        row["kernels"]["theirs"] = named("prefill rival", theirs)
    return row


def accuracy_row(kind: str, heads: int = 6, tokens: int = 4096) -> dict[str, Any]:
    """Errors of both sides against fp64 on inputs chosen to hurt; nothing is timed."""
    case, cu = prefill_case(heads, (tokens, 100)), boundaries((tokens, 100))
    if kind == "bound":
        case["dt_bias"].fill_(30.0)
    if kind in ("long", "same key"):
        case["dt_bias"].fill_(-8.0)
    if kind == "same key":
        case["k"][:] = case["k"][:1]
    device_cu = cu.cuda()
    slots = case["slot_mapping"].long()
    o, state = expected_prefill(case, cu, heads)
    saved = case["recurrent_state"].clone()
    theirs = rival_kda.prefill(case, device_cu)
    row: dict[str, Any] = {}
    if theirs is not None:
        got, final = theirs()
        row["rival_errors"] = [relative_error(got, o), relative_error(final, state)]
        case["recurrent_state"].copy_(saved)
    for segments in (0, 5):
        again = {**case, "recurrent_state": case["recurrent_state"].clone()}
        plan = kda_plan.plan_prefill(cu, heads, "cuda", segment_chunks=segments)
        out = torch.full_like(case["q"], math.nan)
        ours_prefill(again, device_cu, plan, out)()
        row[f"errors_segments_of_{segments}"] = [
            relative_error(out, o),
            relative_error(again["recurrent_state"][slots], state),
        ]
    return row


def layer_row(heads: int, lengths: Sequence[int]) -> dict[str, Any]:
    """From the projections to the gated norm."""
    case, cu = prefill_case(heads, lengths), boundaries(lengths)
    device_cu = cu.cuda()
    chosen, plans = engines(heads, cu)
    plan = plans[chosen]
    tokens = sum(lengths)
    mixed = torch.empty(3, tokens, heads * DIM, dtype=torch.bfloat16, device="cuda")
    o, y = torch.empty_like(case["q"]), torch.full_like(case["q"], math.nan)
    slots, first = case["slot_mapping"], case["has_initial_state"]
    case["q"], case["k"], case["v"] = mixed.view(3, tokens, heads, DIM).unbind(0)
    core = ours_prefill(case, device_cu, plan, o)

    def ours() -> torch.Tensor:
        kda_prefill.short_conv(
            case["qkv"], case["conv_weight"], case["conv_state"], slots, device_cu, first, out=mixed, plan=plan,
            parts=3,
        )  # fmt: skip
        core()
        return kda_prefill.gated_norm(o, case["gate"], case["o_norm_weight"], case["o_norm_eps"], out=y)

    old = torch.where(first.view(-1, 1, 1), case["conv_state"][slots.long()], torch.zeros((), device="cuda"))
    saved = case["recurrent_state"].clone()
    ours()
    case["recurrent_state"].copy_(saved)
    x, _ = contract.short_conv(case["qkv"].double(), case["conv_weight"].double(), old.double(), cu)
    require(relative_error(torch.cat(list(mixed), 1), x) < 3e-3, "short_conv")
    want, _ = expected_prefill(case, cu, 1)
    want = contract.output_norm(want, case["gate"][:, :1].double(), case["o_norm_weight"].double(), 1e-5)
    error = relative_error(y[:, :1], want)
    require(error < 1e-2, f"conv to norm: error {error}")
    theirs = rival_kda.prefill_layer(case, device_cu)
    sides = [ours] + ([theirs] if theirs else [])
    cold = time_pair_cold(sides, 10)
    row: dict[str, Any] = {"engine": chosen, "errors": [error], "cold_us": cold[0]}
    row |= {"graph_us": time_pair_graph([ours], 8)[0], "kernels": {"ours": named(f"layer {chosen}", ours)}}
    row["floor_bytes"] = tokens * heads * (DIM * 12 + 4) + len(lengths) * heads * DIM * DIM * 8
    if theirs is not None:
        row["kernels"]["theirs"] = named("layer rival", theirs)
        row |= {
            "rival_cold_us": cold[1],
            "cold_ratio": cold[0] / cold[1],
            "rival": "3 conv + gather + FlashKDA + scatter + norm (vLLM)",
        }
        try:
            row["rival_graph_us"] = time_pair_graph([theirs], 8)[0]
            row["graph_ratio"] = row["graph_us"] / row["rival_graph_us"]
        except Exception as error_graph:
            row["rival_graph_us"] = f"not capturable: {str(error_graph)[:120]}"
    return row


def step_case(heads: int, rows: int, spec: int, seed: int) -> dict[str, Any]:
    """Random inputs of a decode (spec 0) or verification step; conv state channel-contiguous (SD), slots shuffled."""
    torch.manual_seed(seed)
    count, columns = rows * (1 + spec), 3 + spec

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    slots = (torch.randperm(count, device="cuda") + 1).int()
    case: dict[str, Any] = dict(
        qkv=normal(count, 3 * heads * DIM).bfloat16(), z=normal(count, heads, DIM).bfloat16(),
        beta=torch.sigmoid(normal(count, heads)), gate=normal(count, heads, DIM).bfloat16(),
        conv_weight=normal(3 * heads * DIM, 4), a_log=normal(heads) * 0.3, dt_bias=normal(heads, DIM) - 2,
        lower_bound=BOUND, o_norm_weight=normal(DIM), o_norm_eps=1e-5,
        conv_state=normal(count + 1, columns, 3 * heads * DIM).bfloat16().transpose(1, 2),
        recurrent_state=normal(count + 1, heads, DIM, DIM), slot_mapping=slots if not spec else slots.view(rows, -1),
    )  # fmt: skip
    if spec:
        case["num_accepted"] = torch.randint(1, 2 + spec, (rows,), device="cuda", dtype=torch.int32)
        case["cu_seqlens"] = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * (1 + spec)
    return case


def check_step(heads: int, rows: int, spec: int) -> float:
    """Error of outputs and states against fp64; raises CheckFailed."""
    case = step_case(heads, rows, spec, 99)
    old_conv, old_state = case["conv_state"].double(), case["recurrent_state"].double()
    out = torch.full_like(case["z"], math.nan)
    (kda_step.kda_verify if spec else kda_step.kda_decode)(**case, out=out)
    slots, weight = case["slot_mapping"].long(), case["conv_weight"].double()
    count = case["z"].shape[0]
    cu = case["cu_seqlens"] if spec else torch.arange(count + 1)
    if spec:
        x, conv = contract.short_conv_verify(
            case["qkv"].double(), weight, old_conv[slots[:, 0]], case["num_accepted"], cu
        )
    else:
        x, conv = contract.short_conv(case["qkv"].double(), weight, old_conv[slots], cu)
    q, k, v = (y.reshape(count, heads, DIM) for y in x.bfloat16().double().chunk(3, -1))
    g = contract.gate(case["z"].double(), case["a_log"].double(), case["dt_bias"].double(), BOUND)
    beta = case["beta"].double()
    if spec:
        o, state = contract.verify(q, k, v, g, beta, old_state[slots], case["num_accepted"], cu)
        conv_slots = slots[:, 0]
    else:
        o, state = contract.recurrent(q, k, v, g, beta, old_state[slots], cu)
        conv_slots = slots
    want = contract.output_norm(o, case["gate"].double(), case["o_norm_weight"].double(), 1e-5)
    errors = (relative_error(out, want), relative_error(case["recurrent_state"][slots], state))
    require(errors[0] < 4e-3 and errors[1] < 1e-5, f"step {heads}x{rows} spec {spec}: errors {errors}")
    require(bool((case["conv_state"][conv_slots].double() == conv).all()), "conv state differs")
    return errors[0]


def step_row(heads: int, rows: int, spec: int) -> dict[str, Any]:
    error = check_step(heads, min(rows, 8), spec)
    traffic = rows * heads * DIM * DIM * 4 * (2 + spec)
    sets = [step_case(heads, rows, spec, n) for n in range(max(2, min(8, GRAPH_BYTES // traffic)))]
    kernel = kda_step.kda_verify if spec else kda_step.kda_decode
    outs = [torch.empty_like(c["z"]) for c in sets]
    sides: list[list[Any]] = [[lambda c=c, o=o: kernel(**c, out=o) for c, o in zip(sets, outs, strict=True)]]
    names: list[str] = []
    makers: list[Any] = [rival_kda.verify_parts] if spec else [rival_kda.decode_fused, rival_kda.decode_parts]
    for make in makers:
        calls = [make(c) for c in sets]
        if all(c is not None for c in calls):
            sides.append(calls)
            names.append(make.__name__)
    graph = time_pair_graph(sides, 12, repeat=1)
    row: dict[str, Any] = {"errors": [error], "graph_us": graph[0], "floor_bytes": traffic}
    row |= {"heads": heads, "rows": rows, "spec": spec}
    row["kernels"] = {"ours": named(f"step {bool(spec)}", sides[0][0])}
    for name, us, calls in zip(names, graph[1:], sides[1:], strict=True):
        row |= {f"{name}_us": us, f"{name}_ratio": graph[0] / us}
        row["kernels"][name] = named(name, calls[0])
    return row


def with_floor(row: dict[str, Any] | None, copy: dict[int, float]) -> dict[str, Any] | None:
    """Adds the time of a copy of the same size and the ratio to it."""
    if row and "floor_bytes" in row and "floor_us" not in row:
        size = 1 << max(20, min(32, math.ceil(math.log2(row["floor_bytes"]))))
        if size not in copy:
            copy[size] = copy_bandwidth(size)
        row["floor_us"] = row["floor_bytes"] / copy[size] * 1e6
        row["floor_ratio"] = row["graph_us"] / row["floor_us"]
    return row


def plan_rows() -> list[tuple[str, Any]]:
    """(key, measurement) of every row, the ones with targets first."""
    rows: list[tuple[str, Any]] = []
    rows += [(f"accuracy {k}", lambda k=k: accuracy_row(k)) for k in ("mixed", "bound", "long", "same key")]
    for heads, lengths in HEADLINES:
        rows.append((f"prefill h{heads} {lengths[0]}x1", lambda h=heads, s=lengths: prefill_row(h, s)))
    rows += [(f"decode h{h} n{n}", lambda h=h, n=n: step_row(h, n, 0)) for h, n in DECODE]
    rows += [(f"layer h{h} {s[0]}x{len(s)}", lambda h=h, s=s: layer_row(h, s)) for h, s in LAYER]
    rows += [(f"verify h{h} n{n} spec{s}", lambda h=h, n=n, s=s: step_row(h, n, s)) for h, n, s in VERIFY]
    for heads, lengths in SWEEP:
        same = len(set(lengths)) == 1
        label = f"{lengths[0]}x{len(lengths)}" if same else "ragged " + "+".join(map(str, lengths))
        rows.append((f"prefill h{heads} {label}", lambda h=heads, s=lengths: prefill_row(h, s)))
    return rows


def stale(row: dict[str, Any]) -> bool:
    """Whether a finished prefill row shows another implementation than tuning/kda_prefill.json chooses by now."""
    if "longest" not in row or row.get("engine") not in (kda_plan.CHUNKS, kda_plan.FLASH):
        return False
    chosen = tuning.prefill_engine(row["heads"], row["tokens"], row["longest"], torch.cuda.get_device_name())
    return chosen != row["engine"] and f"{chosen}_graph_us" in row


def run(out: Path, slices: Sequence[str]) -> None:
    """Measures what is missing in <out>/kda.json and prints a table."""
    results = Results(out / "kda.json")
    copy: dict[int, float] = {}
    shown: list[list[Any]] = []
    stop = time.monotonic() + float(os.environ.get("K3_BENCH_SECONDS", "inf"))
    for key, measure in plan_rows():
        if slices and not any(s in key for s in slices):
            continue
        redo = stale(results.rows.get(key, {}))
        if time.monotonic() > stop and (redo or key not in results.rows):
            print(f"{key}: not begun, K3_BENCH_SECONDS are over", flush=True)
            continue
        row = with_floor(results.row(key, measure, redo), copy)
        results.save()
        torch.cuda.empty_cache()
        if row is None or isinstance(row.get("error"), str):
            shown.append([key, (row or {}).get("error", "")[:150]])
        elif key.startswith("accuracy"):
            shown.append([key, " ".join(f"{k} {v}" for k, v in row.items() if k != "date")])
        else:
            ratios = {k.removesuffix("_ratio"): round(v, 3) for k, v in row.items() if k.endswith("_ratio")}
            shown.append([key, f"{row['graph_us']:.1f} us", " ".join(f"{k} {v}" for k, v in ratios.items())])
        print("  ".join(map(str, shown[-1])), flush=True)
    print(table([[*r, ""][:3] for r in shown], ["row", "graph", "ratios"]))
    results.notes = plots_kda.notes(results.rows)
    results.save()
    plots_kda.publish(out / "kda.json")
