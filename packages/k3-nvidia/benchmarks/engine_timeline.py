"""Where a step's device time goes: a trace's kernels swept into times by name and by part of the model.

``exposures`` and ``gather`` run in the engine's own process (``engine_worker.stop_profile``, by ``engine_steps``), the
rest in the process that writes the result file; nothing here needs torch. Times are microseconds.

*Sum* is the sum of a kernel's spans. *Exposed* is what of the step's wall clock it accounts for: an instant that
several spans cover belongs to the one that started first and still runs. A kernel launched programmatically dependent
starts early and waits for the one before, so the earlier one is what that instant is spent on; on a second stream a
kernel is exposed only where the first has nothing. Exposed times and the gaps (the device idle for less than
``engine_steps.PAUSE_US`` within a step) add up to ``device_ms``, exactly: the sum of parts is the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: (name, stream, start, end) of one launch.
Span = tuple[str, int, float, float]

HEAD = "head, sampling"
REST = "vLLM's own, the rest"
GAPS = "gaps"

# Products of every library on both sides, by the names of kernels. What distinguishes them is their shape, which a name
# does not tell: those of attention, shared experts and the latent are one part.
PRODUCT = (
    r"^nvjet|(?i:gemm|gemv)|cublas|splitKreduce|^vector_kernel|^dot_kernel"
    r"|cutlass_kernel_ptrbf16|cutlass_kernel_\w*linear"
)
SAMPLED = r"ArgMax|argmax|(?i:sampl)|gumbel|topk_topp|penalt|_temperature|log_softmax|logprob"
CHOICE = r"^route_kernel|group_topk|topkGating|topk_softmax|topk_sigmoid"


@dataclass(frozen=True)
class Rule:
    """A kernel whose full name has ``pattern`` belongs to ``part``, if its neighbour on its stream is as said."""

    part: str
    pattern: str
    after: str = ""
    before: str = ""


#: Tried in their order, for both sides; what none names is vLLM's own.
RULES = (
    Rule(HEAD, SAMPLED),
    Rule("experts", PRODUCT, before=CHOICE),  # the router's logits
    Rule("experts", r"^nvjet_\w+_tss_|^logits_kernel|" + CHOICE),  # tss: bf16 operands, fp32 result, only the router's
    Rule("projections", PRODUCT),
    Rule("AttnRes", r"attn_res|^kernel_cutlass_kernel_+\d"),
    Rule("KDA", r"(?i:kda)|conv1d|short_conv|_?fused_recurrent|gated_norm|layer_norm_gated|gather_initial_states"),
    Rule("KDA", r"chunk_g|recompute_w_u|^flash_(before|after)_kernel|^sigmoid_fp32_kernel|l2norm_fwd"),
    Rule(
        "MLA",
        r"(?i:flash|fmha|mla)|latent_check|_fwd_grouped_kernel|_fwd_kernel_stage|concat_and_cache|merge_attn|cp_gather",
    ),
    Rule("experts", r"^(w13|w2|combine|few|small|mark|count|place)_(\w+_)?kernel|^experts_|(?i:moe)|marlin|humming"),
    Rule("experts", r"process_input_kernel|preprocessTopk|computeExpert|finalizeMoe|radix_sort"),
    Rule("experts", r"situ_and_mul", after="marlin|humming"),
    Rule("shared experts, dense", r"situ"),
    Rule("norms, glue", r"(?i:rms_?norm|layer_?norm)|^low_rank_norms|^sigmoid_mul|_norm_kernel"),
)
PARTS = (*dict.fromkeys(rule.part for rule in RULES[1:]), HEAD, REST)


def part_of(name: str, before: str = "", after: str = "") -> str:
    """The part of a kernel by its full name and the full names of the kernels before and after it on its stream."""
    for rule in RULES:
        neighbours = ((rule.after, before), (rule.before, after))
        if re.search(rule.pattern, name) and all(not p or re.search(p, other) for p, other in neighbours):
            return rule.part
    return REST


def shortened(name: str) -> str:
    """At most 40 characters that still tell kernels apart: without namespaces, return type and most arguments."""
    if mangled := re.match(r"_Z(\d+)", name):
        return name[mangled.end() :][: min(int(mangled[1]), 40)]
    if cute := re.match(r"kernel_cutlass_kernel_(?:vllm\w*?cute_?dsl_?)?(\w*)", name):
        return f"cute:{cute[1]}"[:40]
    if shape := re.search(r"humming<.*?Shape<0u, (\d+)u, (\d+)u>", name):
        return f"humming {shape[1]}x{shape[2]}"
    functor = re.search(r"(\w+(?:Functor|Ops|Impl)|\w+_kernel_cuda)\b", name.partition("<")[2])
    base = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "")
    base = re.split(r"[<(]", base)[0].rpartition("::")[2] if "flash::" not in base else "flash " + base[-20:]
    base = base.replace("nvjet_sm90_", "nvjet_")
    return (f"{base}:{functor[1]}" if functor and functor[1] != base else base)[:40]


def labels(spans: Sequence[Span]) -> list[tuple[str, str]]:
    """(short name, part) of each of ``spans``, which come in the order of their starts.

    The head is a product like others; it is the last one before the first kernel of sampling, with the launch that adds
    its cuts of K.
    """
    streams: dict[int, list[int]] = {}
    for i, (_, stream, _, _) in enumerate(spans):
        streams.setdefault(stream, []).append(i)
    found: list[tuple[str, str]] = [("", "")] * len(spans)
    for order in streams.values():
        names = ["", *(spans[i][0] for i in order), ""]
        product: list[int] = []
        for at, i in enumerate(order, 1):
            part = part_of(names[at], names[at - 1], names[at + 1])
            found[i] = (shortened(names[at]), part)
            if part == "projections":
                product = [*(product if "splitKreduce" in names[at] else []), i]
            elif part == HEAD:
                for j in product:
                    found[j] = (f"{found[j][0][:33]} (head)", HEAD)
                product = []
    return found


@dataclass(frozen=True)
class Launch:
    """One launch of a trace: what it is, its span, and what of the wall clock it accounts for (microseconds).

    exposed: what lies behind the furthest end of the launches that started before; gap: how long the device idled
    right before it, 0 where that was a wait for the host.
    """

    label: tuple[str, str]
    span: Span
    exposed: float
    gap: float


def exposures(spans: Sequence[Span], pause: float) -> list[Launch]:
    """The launches of a trace in the order of their starts.

    An instant covered by several spans is the earliest-started one's: in the order of starts each span has what lies
    behind the furthest end so far. A stretch without a kernel is a gap below ``pause``, beyond a wait for the host.
    The exposed times and the gaps of any partition of the launches add up to those of the whole.
    """
    spans = sorted(spans, key=lambda span: (span[2], span[3]))
    found, frontier = [], spans[0][2] if spans else 0.0
    for label, span in zip(labels(spans), spans, strict=True):
        _, _, start, end = span
        gap = start - frontier if 0 < start - frontier <= pause else 0.0
        found.append(Launch(label, span, max(0.0, end - max(start, frontier)), gap))
        frontier = max(frontier, end)
    return found


def gather(launches: Sequence[Launch]) -> dict[str, Any]:
    """``rows``: [short name, part, launches, sum, exposed] in the order of first starts; ``gaps``."""
    rows: dict[tuple[str, str], list[float]] = {}
    for launch in launches:
        entry = rows.setdefault(launch.label, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += launch.span[3] - launch.span[2]
        entry[2] += launch.exposed
    return {"rows": [[*label, *entry] for label, entry in rows.items()], "gaps": sum(x.gap for x in launches)}


def sweep(spans: Sequence[Span], pause: float) -> dict[str, Any]:
    """:func:`gather` of a whole trace."""
    return gather(exposures(spans, pause))


def line(who: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]], limit: int = 5800) -> dict[str, Any]:
    """The record of an engine: every case by part, and by kernel as long as it has less than ``limit`` bytes.

    ``kernels``: [name, part's number]; ``cases``: ``parts`` (exposed us, in the order of ``parts``), ``sum`` of spans,
    ``launches``, ``gaps``, ``us`` (the whole) and ``rows`` [kernel's number, launches, sum, exposed]. The smallest
    rows go first where they are too many; they stay in the parts.
    """
    result: dict[str, Any] = {"part": "timeline", **who, "parts": list(PARTS), "kernels": [], "cases": {}}
    numbers: dict[tuple[str, str], int] = {}
    smallest = 0.05
    while True:
        numbers.clear()
        for case, step in cases.items():
            shown = [r for r in step["rows"] if max(abs(r[3]), abs(r[4])) >= smallest]
            result["cases"][case] = {
                "us": round(sum(r[4] for r in step["rows"]) + step["gaps"], 1),
                "sum": round(sum(r[3] for r in step["rows"]), 1),
                "gaps": round(step["gaps"], 1),
                "launches": round(sum(r[2] for r in step["rows"]), 1),
                "parts": [round(sum(r[4] for r in step["rows"] if r[1] == part), 1) for part in PARTS],
                "rows": [
                    [numbers.setdefault((r[0], r[1]), len(numbers)), *(round(x, 1) for x in r[2:])] for r in shown
                ],
            }
        result["kernels"] = [[name, PARTS.index(part)] for name, part in numbers]
        if len(json.dumps(result)) <= limit or smallest > 1e9:
            return result
        smallest *= 1.5


def tables(found: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """title -> rows for the page: microseconds a step by part, ours and theirs, a table a shape; {} without timelines.

    Theirs is the rival whose step takes less device time; of an engine that was traced twice the later trace counts.
    """
    sides: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in found:
        if record.get("part") == "timeline":
            side = "ours" if record["impl"] == "ours" else record["experts"]
            sides.setdefault(record["shape"], {})[side] = record
    result = {}
    for shape, engines in sides.items():
        columns: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        for case in dict.fromkeys(case for engine in engines.values() for case in engine["cases"]):
            having = {side: engine for side, engine in engines.items() if case in engine["cases"]}
            rivals = [engine for side, engine in having.items() if side != "ours"]
            faster = min(rivals, key=lambda engine, case=case: engine["cases"][case]["us"], default=None)
            for who, engine in {"ours": having.get("ours"), "theirs": faster}.items():
                if engine is not None:
                    columns[f"{case} {who}"] = (engine, engine["cases"][case])
        result[f"{shape}: where a step's device time goes, microseconds"] = _table(columns)
    return result


def _table(columns: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row a part, then what they add up to. Numbers of parts are the record's own."""

    def part(engine: Mapping[str, Any], step: Mapping[str, Any], name: str) -> float:
        return step["parts"][engine["parts"].index(name)] if name in engine["parts"] else 0.0

    names = dict.fromkeys(name for engine, _ in columns.values() for name in engine["parts"])
    rows = [{"part": n, **{c: part(*where, n) for c, where in columns.items()}} for n in names]
    totals = {
        "sum of parts": lambda step: round(sum(step["parts"]), 1),
        GAPS: lambda step: step["gaps"],
        "whole": lambda step: step["us"],
        "sum of spans": lambda step: step["sum"],
        "launches": lambda step: step["launches"],
    }
    return [*rows, *({"part": n, **{c: f(step) for c, (_, step) in columns.items()}} for n, f in totals.items())]
