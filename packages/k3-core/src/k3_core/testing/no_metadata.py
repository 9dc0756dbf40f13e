"""Layers without metadata: profiling and warm-up call a layer before any request exists.

The metadata of a step may be None, an empty dictionary, or a dictionary without this layer; each must give zeros and
never memory that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3_core.testing.poison import poisoned_empty


def check_no_metadata(forward: Callable[[Any], Tensor]) -> list[str]:
    """Problems of a layer, one sentence each; empty if it behaves.

    forward: takes the step's metadata as vLLM's forward context would hold it and returns the layer's output. A layer
    that writes into a given buffer returns that buffer, which the caller fills with NaN first.
    """
    problems = []
    for label, metadata in (
        ("None", None),
        ("an empty dict", {}),
        ("a dict without the layer", {"another.layer": object()}),
    ):
        try:
            with poisoned_empty():
                out = forward(metadata)
        except Exception as error:  # any exception is the finding
            problems.append(f"metadata is {label}: raised {type(error).__name__}: {error}")
            continue
        if not bool((out == 0).all()):
            count = int((out != 0).sum())
            kind = "NaN among them" if bool(torch.isnan(out).any()) else "finite"
            problems.append(f"metadata is {label}: {count} of {out.numel()} values are not zero ({kind})")
    return problems


def assert_zeros_without_metadata(forward: Callable[[Any], Tensor]) -> None:
    """AssertionError with every problem of check_no_metadata."""
    problems = check_no_metadata(forward)
    if problems:
        raise AssertionError("; ".join(problems))
