"""Operators: one table of names and signatures, and the choice of an implementation at run time."""

from k3_core.operators.registry import (
    CallSpec,
    Choice,
    ExpertWeights,
    Implementation,
    Registry,
    supports_everything,
)
from k3_core.operators.spec import Arg, Bound, Operator, Verdict, check_signature
from k3_core.operators.table import TABLE, markdown, operator

__all__ = [
    "TABLE",
    "Arg",
    "Bound",
    "CallSpec",
    "Choice",
    "ExpertWeights",
    "Implementation",
    "Operator",
    "Registry",
    "Verdict",
    "check_signature",
    "markdown",
    "operator",
    "supports_everything",
]
