"""The operator table as tests see it.

The table itself lives in :mod:`k3_core.operators`, because models need it at run time and must not import the test
suite; this module is the address that the design names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3_core.operators import (
    TABLE,
    Arg,
    Bound,
    CallSpec,
    ExpertWeights,
    Implementation,
    Operator,
    Verdict,
    markdown,
    operator,
)
from k3_core.operators import check_signature as _check

__all__ = [
    "TABLE",
    "Arg",
    "Bound",
    "CallSpec",
    "ExpertWeights",
    "Implementation",
    "Operator",
    "Verdict",
    "check_signature",
    "markdown",
    "operator",
]


def check_signature(op_name: str, function: Callable[..., Any]) -> Verdict:
    """(ok, reason): whether a launcher has the parameters that the table fixes for op_name."""
    return _check(operator(op_name), function)
