"""state_gather and state_scatter of the operator table, by a layer's published plan."""

from __future__ import annotations

from torch import Tensor

from k3_ascend.state_copy.plan import StateCopy
from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec, Implementation


def state_gather(
    cache: Tensor,
    indices: Tensor,
    has_initial_state: Tensor | None,
    *,
    out: Tensor | None = None,
    plan: StateCopy | None = None,
) -> Tensor:
    """See the table of operators. plan: the layer's; UnsupportedError without one (nothing is compiled on demand)."""
    return _required(plan, "state_gather").gather(cache, indices, has_initial_state, out=out)


def state_scatter(cache: Tensor, indices: Tensor, packed: Tensor, *, plan: StateCopy | None = None) -> None:
    """See the table of operators. plan: the layer's; UnsupportedError without one (nothing is compiled on demand)."""
    _required(plan, "state_scatter").scatter(cache, indices, packed)


def _required(plan: StateCopy | None, operator: str) -> StateCopy:
    if plan is None:
        raise UnsupportedError(
            f"{operator}: pass plan=state_copy.of(layer); a plan is prepared when the worker starts, never on demand"
        )
    return plan


def _supports(spec: CallSpec) -> tuple[bool, str]:
    return spec.device in ("npu", "cpu"), f"{spec.operator}: by the plan published for the layer's cache"


#: The two implementations, for the package's registry.
IMPLEMENTATIONS = (
    Implementation("state_gather", "state-copy", state_gather, _supports),
    Implementation("state_scatter", "state-copy", state_scatter, _supports),
)
