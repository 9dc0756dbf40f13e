"""The conformance suite: any implementation of an operator, on any device, against the fp64 oracle and poison.

    report = conformance.run("kda_decode", implementation, "cuda", scales=("real",))
    report.raise_if_failed()

or one case a test:

    @conformance.parametrize("kda_decode", scales=("real",))
    def test_decode(case): conformance.assert_conforms(case, implementation, "cuda")

What a case checks, in order: the value of every result within the table's bound; that a given ``out`` is what comes
back; that no byte outside the described elements changed (guards, gaps, other slots, inputs); that a second run gives
the same bits; that without ``out`` a contiguous tensor of the right values comes back although fresh memory is NaN;
that one sequence alone gives the same result (bits, if the implementation claims batch invariance). A case that the
implementation does not support is recorded as refused, with its reason: never as passed.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from k3_core.operators import TABLE, Implementation, Verdict, operator
from k3_core.operators.spec import Bound
from k3_core.testing import cases_attn_res, cases_kda, cases_moe, cases_state, cases_step
from k3_core.testing.case import Case, Problem, Sizes, alone
from k3_core.testing.compare import Outcome, compare
from k3_core.testing.poison import bits, poisoned_empty

_CASES: dict[str, Callable[[torch.dtype, Sizes], Iterator[Case]]] = {
    "attn_res": cases_attn_res.cases,
    "short_conv": cases_kda.conv_cases,
    "kda_prefill": cases_kda.prefill_cases,
    "gated_norm": cases_kda.norm_cases,
    "kda_decode": cases_step.decode_cases,
    "kda_verify": cases_step.verify_cases,
    "route": cases_moe.route_cases,
    "experts": cases_moe.expert_cases,
    "situ": cases_moe.situ_cases,
    "state_gather": lambda dtype, scale: cases_state.cases("state_gather", dtype, scale),
    "state_scatter": lambda dtype, scale: cases_state.cases("state_scatter", dtype, scale),
}


@dataclass(frozen=True)
class Row:
    """The verdict on one case, as the support matrix stores it. worst: largest error as a fraction of its bound."""

    operator: str
    implementation: str
    case: str
    scale: str
    dtype: str
    device: str
    verdict: Literal["pass", "fail", "refused"]
    worst: float
    error: float
    tolerance: float
    reason: str
    seconds: float


@dataclass
class Report:
    """All rows of one or more runs."""

    rows: list[Row] = field(default_factory=list)

    @property
    def failures(self) -> list[Row]:
        """Rows that failed."""
        return [r for r in self.rows if r.verdict == "fail"]

    @property
    def ok(self) -> bool:
        """At least one case passed and none failed."""
        return not self.failures and any(r.verdict == "pass" for r in self.rows)

    def summary(self) -> str:
        """Counts, then one line a failure."""
        counts = {v: sum(r.verdict == v for r in self.rows) for v in ("pass", "fail", "refused")}
        lines = [", ".join(f"{n} {v}" for v, n in counts.items())]
        return "\n".join(lines + [f"{r.implementation} {r.case}: {r.reason}" for r in self.failures])

    def raise_if_failed(self) -> None:
        """AssertionError with the summary unless ok."""
        if not self.ok:
            raise AssertionError(self.summary())

    def to_json(self) -> list[dict[str, Any]]:
        """Rows as plain data; an infinite number becomes a string."""
        plain = [asdict(r) for r in self.rows]
        return [
            {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()} for r in plain
        ]

    def write(self, path: Path, device: str | torch.device = "cpu") -> None:
        """One JSON file: the environment, and the rows."""
        page = {"environment": environment(torch.device(device)), "rows": self.to_json()}
        path.write_text(json.dumps(page, indent=1) + "\n")


def environment(device: torch.device) -> dict[str, str]:
    """What a result depends on besides the code."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"device": device.type, "device_name": name, "torch": torch.__version__, "python": platform.python_version()}


def cases(
    op_name: str, scales: Sequence[Sizes] = ("small",), dtypes: Sequence[torch.dtype] | None = None
) -> list[Case]:
    """Cases of an operator. dtypes None: every dtype that has a derived tolerance."""
    op = operator(op_name)
    wanted = [getattr(torch, d) for d in op.bounds] if dtypes is None else list(dtypes)
    found = {c.id: c for scale in scales for dtype in wanted for c in _CASES[op_name](dtype, scale)}
    return list(found.values())


def run(
    op_name: str,
    implementation: Implementation | Callable[..., Any],
    device: str | torch.device = "cpu",
    *,
    scales: Sequence[Sizes] = ("small",),
    dtypes: Sequence[torch.dtype] | None = None,
    only: Callable[[Case], bool] | None = None,
    stop_at_first: bool = False,
) -> Report:
    """Every case of an operator. A bare function is taken as an implementation that supports everything.

    scales: "small" (any device, seconds), "real" (released sizes, for accelerators), "huge" (offsets beyond 2^31
    elements, up to about 60 GiB of device memory). Raises TypeError where the signature is not the table's.
    """
    impl = as_implementation(op_name, implementation)
    report = Report()
    for case in cases(op_name, scales, dtypes):
        if only is not None and not only(case):
            continue
        report.rows.append(run_case(case, impl, device))
        if stop_at_first and report.failures:
            break
    return report


def run_all(implementations: Iterable[Implementation], device: str | torch.device = "cpu", **options: Any) -> Report:
    """run() for several implementations, in one report."""
    report = Report()
    for implementation in implementations:
        report.rows += run(implementation.operator, implementation, device, **options).rows
    return report


def as_implementation(op_name: str, implementation: Implementation | Callable[..., Any]) -> Implementation:
    """The implementation itself, or a function wrapped into one."""
    if isinstance(implementation, Implementation):
        if implementation.operator != op_name:
            raise TypeError(f"{implementation.name} implements {implementation.operator}, not {op_name}")
        return implementation
    return Implementation(op_name, getattr(implementation, "__name__", "function"), implementation)


def run_case(case: Case, implementation: Implementation, device: str | torch.device = "cpu") -> Row:
    """One case; an exception of the implementation is a failure of the case."""
    where = torch.device(device)
    begin = time.perf_counter()

    def row(verdict: Literal["pass", "fail", "refused"], reason: str, outcomes: Sequence[Outcome] = ()) -> Row:
        worst = max(outcomes, key=lambda o: o.score, default=Outcome("", True, 0.0, 0.0, 0.0, ""))
        return Row(
            case.operator, implementation.name, case.id, case.scale, str(case.dtype).removeprefix("torch."), where.type,
            verdict, worst.score, worst.error, worst.limit, reason, round(time.perf_counter() - begin, 4),
        )  # fmt: skip

    verdict = Verdict(*implementation.supports(case.spec(where)))
    if not verdict.ok:
        return row("refused", verdict.reason)
    outcomes: list[Outcome] = []
    try:
        problems = _check(case, implementation, where, outcomes)
    except Exception as error:  # an implementation may raise anything; the report names it
        return row("fail", f"raised {type(error).__name__}: {error}", outcomes)
    return row("fail" if problems else "pass", "; ".join(problems[:4]), outcomes)


def _check(case: Case, implementation: Implementation, device: torch.device, outcomes: list[Outcome]) -> list[str]:
    inputs = case.inputs(device)
    problem = Problem.build(case, inputs, device, implementation)
    has_out = "out" in problem.arena.views
    first, problems = _launch(problem, implementation, has_out, outcomes)
    if has_out and not _same_memory(first["out"], problem.arena.views["out"]):
        problems.append("out was given, but something else was returned")
    returned = {n: first[n].clone() for n in problem.operator.returns}  # before the arena is reset under them
    problems += _repeat(problem, implementation, has_out, returned)
    if has_out:
        problem.arena.reset()
        fresh, more = _launch(problem, implementation, False, outcomes)
        problems += [f"without out: {p}" for p in more]
        if not fresh["out"].is_contiguous():
            problems.append(f"without out: the result has strides {fresh['out'].stride()}, must be contiguous")
    rows = next((t.shape[0] for t in inputs.tensors.values()), 0) if case.scale != "huge" else 0
    if not problems and rows:
        problems += _alone(problem, implementation, device, returned, outcomes)
    return problems


def _launch(
    problem: Problem, implementation: Implementation, with_out: bool, outcomes: list[Outcome]
) -> tuple[dict[str, Tensor], list[str]]:
    """Runs and judges once; results are copies."""
    with poisoned_empty():
        results = problem.call(implementation, with_out)
    if problem.arena.device.type == "cuda":
        torch.cuda.synchronize(problem.arena.device)
    case = problem.case
    if case.check is not None:
        judged = case.check(case, problem.inputs, results)
    else:
        judged = [compare(n, results[n], e, _bound(problem, n)) for n, e in problem.expected.items()]
    outcomes += judged
    problems = [o.message for o in judged if not o.ok]
    allowed = problem.allowed()
    if not with_out:
        allowed.pop("out", None)
    problems += problem.arena.violations(allowed)
    return results, problems


def _bound(problem: Problem, result: str) -> Bound:
    expected = problem.expected[result]
    return expected.bound or problem.operator.bound(expected.name or result, problem.case.dtype)


def _same_memory(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _repeat(problem: Problem, implementation: Implementation, has_out: bool, returned: dict[str, Tensor]) -> list[str]:
    """The same call from the same memory: every byte of the arena and of what was returned must agree."""
    before = problem.arena.snapshot()
    problem.arena.reset()
    with poisoned_empty():
        again = problem.call(implementation, has_out)
    problems = []
    for name, value in returned.items():
        if not torch.equal(bits(value.contiguous()), bits(again[name].contiguous())):
            problems.append(f"{name} differs between two runs of the same call")
    if not torch.equal(before, problem.arena.snapshot()):
        problems.append("memory differs between two runs of the same call")
    return problems


def _alone(
    problem: Problem,
    implementation: Implementation,
    device: torch.device,
    whole: dict[str, Tensor],
    outcomes: list[Outcome],
) -> list[str]:
    """The longest sequence (or the last row) without the others."""
    inputs, case = problem.inputs, problem.case
    if "cu_seqlens" in inputs.tensors:
        lengths = inputs.tensors["cu_seqlens"].diff()
        chosen = int(lengths.argmax()) if len(lengths) else -1
    else:
        per_row = {a.name for a in problem.operator.args if a.shape[:1] in (("T",), ("R",))}
        chosen = next(t.shape[0] for n, t in inputs.tensors.items() if n in per_row) - 1
    if chosen < 0:
        return []
    one, rows = alone(case, inputs, chosen)
    single = Problem.build(case, one, device, implementation)
    results, problems = _launch(single, implementation, "out" in single.arena.views, outcomes)
    problems = [f"sequence {chosen} alone: {p}" for p in problems]
    judged = one.free_rows is None or not bool(one.free_rows.any())
    if implementation.batch_invariant and judged:
        for name, value in whole.items():
            if not torch.equal(bits(value[rows].contiguous()), bits(results[name].contiguous())):
                problems.append(f"sequence {chosen} alone: {name} has other bits than in the batch (claims invariance)")
    return problems


def parametrize(op_name: str, scales: Sequence[Sizes] = ("small",), dtypes: Sequence[torch.dtype] | None = None) -> Any:
    """A pytest mark that parametrises ``case`` over the cases of an operator."""
    import pytest

    return pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in cases(op_name, scales, dtypes)])


def assert_conforms(
    case: Case, implementation: Implementation | Callable[..., Any], device: str | torch.device = "cpu"
) -> Row:
    """For tests: skips with the implementation's reason where it refuses, raises AssertionError where it fails."""
    import pytest

    row = run_case(case, as_implementation(case.operator, implementation), device)
    if row.verdict == "refused":
        pytest.skip(row.reason)
    if row.verdict == "fail":
        raise AssertionError(f"{row.implementation} {row.case} on {row.device}: {row.reason}")
    return row


def operators() -> tuple[str, ...]:
    """Every operator that has cases: all of the table, or the suite is incomplete."""
    missing = sorted(set(TABLE) - set(_CASES))
    if missing:
        raise AssertionError(f"operators without cases: {missing}")
    return tuple(TABLE)
