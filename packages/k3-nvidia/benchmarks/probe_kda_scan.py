"""Forms of the scan of kda_passes_cuda on one GPU: each against fp64 and the others, then all in CUDA graphs.

``python probe_kda_scan.py [--parts check,times,cuts,conform] [--rival 0]``: a line a measurement. A form that fails a
check is not timed, and the exit status is 1. conform, which is not in the default: the operator's shared cases through
the chunk kernel, the passes and the scan 16x3 with overlapped launches, whatever tuning/kda.json says.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from itertools import accumulate
from typing import Any

import torch
from harness import relative_error, time_pair_graph
from probe_kda_chunk import BOUND, DIM, REAL, SHAPES, conform, report, serving_case
from torch import Tensor

from k3_core.contracts import kda as contract
from k3_nvidia.kernels import kda_chunk_cuda, kda_flash, kda_prefill
from k3_nvidia.kernels import kda_passes_cuda as passes
from k3_nvidia.kernels.kda_passes_cuda import REGISTERS, ScanForm
from k3_nvidia.kernels.kda_plan import plan_prefill
from k3_nvidia.tuning import kda as tuning

kda_chunk_cuda.kernel = REAL
#: Form of the scan, whether launches overlap.
FORMS: dict[str, tuple[ScanForm, bool]] = {
    "registers": (REGISTERS, False),
    "16x3": (ScanForm(16, 3), False),
    "registers overlap": (REGISTERS, True),
    "16x3 overlap": (ScanForm(16, 3), True),
    "16x2 overlap": (ScanForm(16, 2), True),
    "32x2 overlap": (ScanForm(32, 2), True),
    "32x3 overlap": (ScanForm(32, 3), True),
    "16x3 two terms overlap": (ScanForm(16, 3, 2), True),
}
#: Cuts into segments, and groups of the local and output passes, by heads and tokens; the first is the cost model's.
CUTS: dict[tuple[int, int], list[tuple[int, int, int]]] = {
    (6, 8192): [(12, 2, 1), (10, 2, 1), (16, 2, 1), (6, 2, 2)],
    (12, 8192): [(26, 2, 1), (22, 2, 2), (12, 2, 2)],
    (6, 32768): [(47, 2, 1), (24, 2, 2)],
    (12, 32768): [(103, 2, 1), (47, 2, 2), (94, 2, 2)],
}


class Case:
    """A prefill through the CUDA kernels with its workspace; what nobody writes is NaN."""

    def __init__(self, heads: int, lengths: list[int], cut: int, groups: tuple[int, int], kind: str = "mixed") -> None:
        self.heads, self.groups = heads, groups
        self.x, self.state, self.slots, self.init = serving_case(heads, lengths, kind)
        self.bounds = [0, *accumulate(lengths)]
        self.plan = plan_prefill(self.bounds, heads, "cuda", segment_chunks=cut)
        places, segments = self.plan.num_chunks * heads, self.plan.num_segments
        nan = {"fill_value": float("nan"), "device": "cuda"}
        big = [torch.full((places, 64 * DIM), dtype=torch.bfloat16, **nan) for _ in range(4)]
        inside = (*big, torch.full((places, 4096), dtype=torch.bfloat16, **nan), torch.full((places, DIM), **nan))
        pieces = [torch.full((segments, heads, DIM, DIM), dtype=torch.bfloat16, **nan) for _ in range(2)]
        self.start = torch.full((segments, heads, DIM, DIM), **nan)
        self.out = torch.full((self.bounds[-1], heads, DIM), dtype=torch.bfloat16, **nan)
        tables = (self.plan.chunks, self.plan.segments, self.plan.order)
        self.tensors = passes.Tensors(
            *inside, *tables, self.start, *pieces, self.out, self.state, self.slots, self.init
        )

    def poison(self) -> None:
        """NaN in everything that a run writes but the state, which is zero."""
        for name in ("w", "u", "qg", "kg", "a", "gamma", "start", "hi", "lo", "out"):
            getattr(self.tensors, name).fill_(float("nan"))
        self.state.zero_()

    def run(self, form: ScanForm, overlap: bool, parts: str = "clso") -> None:
        """The kernels named by parts: chunk, local, scan, output."""
        t = self.tensors
        if "c" in parts:
            inside = (t.w, t.u, t.qg, t.kg, t.a, t.gamma)
            kda_chunk_cuda.chunk(*self.x, BOUND, self.plan.chunks, *inside, blocks=3, tiled=True)
        if "l" in parts and self.plan.order.numel():
            passes.local(t, self.heads, self.groups[0], 4, form, overlap)
        if "s" in parts and self.plan.scans.numel():
            passes.scan(t, self.plan.scans, self.heads, form, overlap)
        if "o" in parts:
            passes.output(t, self.heads, self.groups[1], 3, overlap and self.plan.order.numel() > 0)


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """Outputs and states of the contract in fp64."""
    q, k, v, z, beta, a_log, dt_bias = case.x
    gate = contract.gate(z.double(), a_log, dt_bias, BOUND)
    return contract.chunked(q.double(), k.double(), v.double(), gate, beta.double(), None, case.bounds)


def check(names: list[str]) -> list[str]:
    """The forms that are right. Outputs and states within 8e-3 of fp64 (equal keys: 4e-2, whose cancellation no form
    changes), starts of three-term forms within 2^-16 a step of the registers form's, the same bits four times over."""
    good = dict.fromkeys(names, True)
    for kind, lengths, cut in (("long", [4096, 100], 12), ("mixed", [4096, 1], 6), ("equal", [2048, 300, 65], 3)):
        case = Case(6, lengths, cut, (2, 1), kind)
        want, after = exact(case)
        base = None
        for name in names:
            form, overlap = FORMS[name]
            try:
                runs = []
                for _ in range(4):
                    case.poison()
                    torch.cuda.synchronize()
                    case.run(form, overlap)
                    torch.cuda.synchronize()
                    # A segment that no scan leads to has no start: there the poison stays.
                    runs.append((case.out.clone(), case.state.clone(), case.start.nan_to_num(nan=0.0)))
                same = all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
                base = runs[0][2] if base is None else base
                errors = [relative_error(runs[0][0], want), relative_error(runs[0][1][1:], after)]
                apart = relative_error(runs[0][2], base)
                most = 4e-2 if kind == "equal" else 8e-3
                close = apart < case.plan.num_segments * 2.0**-16 or form.terms == 2
                right = same and max(errors) < most and close
                report(check=name, kind=kind, segments=case.plan.num_segments, right=right, same_bits=same,
                       out=f"{errors[0]:.2e}", state=f"{errors[1]:.2e}", apart=f"{apart:.2e}")  # fmt: skip
            except Exception:
                traceback.print_exc()
                right = False
            good[name] &= right
    return [name for name in names if good[name]]


def flash(case: Case) -> Any:
    """A call of vLLM's FlashKDA operator with its gather and scatter, or None."""
    if kda_flash.operator()[0] is None:
        return None
    plan = plan_prefill(case.bounds, case.heads, "cuda", engine="flash")
    cu = torch.tensor(case.bounds, device="cuda").int()
    return lambda: kda_prefill.kda_prefill(*case.x, BOUND, case.state, case.slots, cu, case.init, plan=plan)


def timed(calls: dict[str, Any], iters: int = 15) -> dict[str, float]:
    return dict(zip(calls, (round(us, 2) for us in time_pair_graph(list(calls.values()), iters=iters)), strict=True))


def times(heads: int, tokens: int, names: list[str], rival: bool) -> None:
    """Every form, whole and its scan alone, beside FlashKDA in one alternation; the other kernels by themselves."""
    cut, local, output = CUTS[heads, tokens][0]
    case = Case(heads, [tokens], cut, (local, output))
    calls: dict[str, Any] = {name: lambda n=name: case.run(*FORMS[n]) for name in names}
    other = flash(case) if rival else None
    us = timed(calls | ({"flash": other} if other else {}))
    ratio = {name: round(us[name] / us["flash"], 4) for name in names} if other else None
    report(part="whole", heads=heads, tokens=tokens, segments=case.plan.num_segments, us=us, ratio=ratio)
    us = timed({name: lambda n=name: case.run(FORMS[n][0], False, "s") for name in names})
    report(part="scan", heads=heads, tokens=tokens, steps=case.plan.num_segments - 2, us=us)
    parts: dict[str, Any] = {p: lambda p=p: case.run(REGISTERS, False, p) for p in "clo"}
    parts["l tiles"] = lambda: case.run(ScanForm(16, 3), False, "l")
    report(part="others", heads=heads, tokens=tokens, us=timed(parts))


def cuts(heads: int, tokens: int, names: list[str]) -> None:
    """Whole prefills by segment length: what the cost model should choose with each form."""
    some = [n for n in ("registers", "16x3 overlap", "32x2 overlap") if n in names]
    for cut, local, output in CUTS[heads, tokens]:
        case = Case(heads, [tokens], cut, (local, output))
        us = timed({name: lambda n=name, case=case: case.run(*FORMS[n]) for name in some}, iters=10)
        report(part="cuts", heads=heads, tokens=tokens, cut=cut, segments=case.plan.num_segments,
               groups=(local, output), us=us)  # fmt: skip


def everything_on() -> None:
    """What tuning/kda.json would say if all CUDA kernels of prefill were chosen."""
    tuning.table()["chunk_cuda"] = {"blocks": 3, "deep": 1}
    tuning.table()["passes_cuda"] = {
        "local": {"groups": 2, "stages": 4}, "output": {"groups": 1, "stages": 3}, "scan": {"rows": 16, "stages": 3},
        "overlap": True, "cost_us": {"local": 1.18, "scan": 0.7, "output": 1.9, "cut": 4.0, "wave": 3.0},
        "concurrent": {"local": 1, "output": 1},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="check,times,cuts")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rival", type=int, default=1, help="0: without vLLM's operator, whose import takes seconds")
    args = parser.parse_args()
    names = args.forms.split(",")
    began = time.time()
    report(device=torch.cuda.get_device_name(), torch=torch.__version__)
    good = check(names) if "check" in args.parts else names
    report(right=good, wrong=[n for n in names if n not in good], seconds=round(time.time() - began, 1))
    for heads, tokens in SHAPES:
        if "times" in args.parts:
            times(heads, tokens, good, bool(args.rival))
        if "cuts" in args.parts:
            cuts(heads, tokens, good)
    if "conform" in args.parts:
        conform(everything_on)
    report(seconds=round(time.time() - began, 1))
    return int(good != names)


if __name__ == "__main__":
    sys.exit(main())
