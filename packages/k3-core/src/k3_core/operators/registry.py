"""Which implementation of an operator runs, and why: capability queries without a silent fallback.

A vendor package registers what it has; a model asks once, before weights load, with the sizes it will use; the answer
carries the reasons of every implementation that was passed over, so that a log, `k3 doctor` and the support matrix
print the same sentences. (Capability query shared by dispatch, tests and docs: the idea is flashinfer's; verifiers that
return a reason: flash-linear-attention's.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from k3_core.errors import UnsupportedError
from k3_core.operators.spec import Operator, Verdict, check_signature
from k3_core.operators.table import operator


class ExpertWeights(NamedTuple):
    """Routed-expert weights of one layer in the released layout, as `experts` implementations receive them.

    MXFP4: w13 uint8 [E, 2*I, L/2] (two codes a byte, low nibble first; gate rows w1, then up rows w3), w13_scale uint8
    [E, 2*I, L/32] (e8m0), w2 uint8 [E, L, I/2], w2_scale uint8 [E, L, I/32].
    Unquantised: w13 [E, 2*I, L], w2 [E, L, I] in the activation dtype, both scales None.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None


@dataclass(frozen=True)
class CallSpec:
    """What is known about a call before it is made; the argument of every capability query.

    device: torch device type ("cpu", "cuda", "npu"). arch: "sm_90", "gfx942", "ascend950", or "" where it does not
    matter. dtype: activation dtype. sizes: symbols of the table to numbers, as far as known ({"N": 6, "D": 128}).
    options: anything else that decides (state_dtype, lower_bound, hidden_act, num_spec, strides).
    """

    operator: str
    device: str
    dtype: torch.dtype
    arch: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def supports_everything(spec: CallSpec) -> Verdict:
    """Capability of an implementation without limits (the contracts)."""
    return Verdict(True, f"{spec.operator}: no limits")


def _same(weights: Any) -> Any:
    return weights


@dataclass(frozen=True)
class Implementation:
    """One way to run an operator.

    operator: name in the table. name: unique per operator ("contract", "triton", "cute"). function: the launcher; its
    signature is checked here. supports: CallSpec -> (ok, reason); it must not launch, allocate or raise. priority:
    larger is tried first. prepare: `experts` only, ExpertWeights -> the object the launcher takes. batch_invariant:
    claims that a row's bits don't depend on the other rows; the conformance suite then checks bits, else tolerance.
    warmup_profiles: (config, limits) -> every variant that serving can meet; None where nothing is compiled late.
    """

    operator: str
    name: str
    function: Callable[..., Any]
    supports: Callable[[CallSpec], tuple[bool, str]] = supports_everything
    priority: int = 0
    prepare: Callable[[ExpertWeights], Any] = _same
    batch_invariant: bool = False
    warmup_profiles: Callable[[Any, Any], Iterable[Any]] | None = None

    def __post_init__(self) -> None:
        verdict = check_signature(operator(self.operator), self.function)
        if not verdict.ok:
            raise TypeError(f"implementation {self.name!r}: {verdict.reason}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the launcher."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Choice:
    """The chosen implementation and what was said about each candidate, in the order they were asked."""

    implementation: Implementation
    reasons: tuple[tuple[str, Verdict], ...]

    def explain(self) -> str:
        """One line: what runs and why not the others."""
        said = "; ".join(f"{name}: {'yes' if v.ok else 'no'} ({v.reason})" for name, v in self.reasons)
        return f"{self.implementation.operator} -> {self.implementation.name} [{said}]"


class Registry:
    """Implementations by operator. A vendor package owns one; nothing is registered at import time of k3_core."""

    def __init__(self) -> None:
        self._by_operator: dict[str, list[Implementation]] = {}

    def register(self, implementation: Implementation) -> Implementation:
        """Adds an implementation. Adding it again changes nothing; another one of that name raises."""
        known = self._by_operator.setdefault(implementation.operator, [])
        for other in known:
            if other.name == implementation.name:
                if other == implementation:
                    return implementation
                raise ValueError(f"{implementation.operator} already has an implementation {implementation.name!r}")
        known.append(implementation)
        known.sort(key=lambda i: -i.priority)
        return implementation

    def implementations(self, name: str) -> tuple[Implementation, ...]:
        """All implementations of an operator, best first."""
        operator(name)
        return tuple(self._by_operator.get(name, ()))

    def choose(self, spec: CallSpec, want: str | None = None) -> Choice:
        """The first implementation that supports the call; with want, that one or nothing.

        Raises UnsupportedError that lists every refusal. A capability query that raises is a defect and propagates.
        """
        candidates = [i for i in self.implementations(spec.operator) if want is None or i.name == want]
        reasons: list[tuple[str, Verdict]] = []
        for implementation in candidates:
            verdict = Verdict(*implementation.supports(spec))
            reasons.append((implementation.name, verdict))
            if verdict.ok:
                return Choice(implementation, tuple(reasons))
        known = ", ".join(i.name for i in self.implementations(spec.operator)) or "none registered"
        asked = f" (asked for {want!r})" if want else ""
        said = "; ".join(f"{name}: {v.reason}" for name, v in reasons) or f"known: {known}"
        raise UnsupportedError(
            f"no implementation of {spec.operator}{asked} for device {spec.device} {spec.arch} {spec.dtype} "
            f"{dict(spec.sizes)} {dict(spec.options)}: {said}"
        )


def check(name: str, function: Callable[..., Any]) -> Verdict:
    """check_signature by operator name."""
    op: Operator = operator(name)
    return check_signature(op, function)
