"""The rule by which ``benchmarks/model_check.py`` calls a layer right: it must be able to say no."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LINE: dict[str, Any] = {"rows": 1313, "median": 0.005, "max": 0.19, "beyond": 70, "beyond_bf16_reference": 110}


@pytest.fixture(scope="module")
def layer_ok() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return __import__("model_check").layer_ok
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"beyond": 60, "beyond_bf16_reference": 0}, True),  # within 5 % of the rows: the golden data's own bound
        ({"beyond": 200, "beyond_bf16_reference": 110}, False),  # more rows off than chance explains
        ({"beyond": 140, "beyond_bf16_reference": 110}, True),
        ({"rows": 108, "beyond": 14, "beyond_bf16_reference": 0}, False),
        ({"median": 0.03}, False),  # a small error in every row
        ({"max": 1.0}, False),  # one row with a lost state
        ({"max": float("nan")}, False),
        ({"median": float("nan")}, False),
    ],
)
def test_layer_rule(layer_ok: Any, change: dict[str, Any], right: bool) -> None:
    assert layer_ok({**LINE, **change}, worst=0.5) is right
