"""What the KDA kernels of this wheel accept: the checks that all vendors share, and the devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3_core.operators import CallSpec
from k3_core.operators.kda_args import (
    HEAD_DIMS,
    STATE_DTYPES,
    TAPS,
    TESTED_HEADS,
    check_conv_state,
    check_index,
    check_prefill,
    check_rows,
    check_state,
    check_step,
    check_vector,
    row_stride,
    supports_sizes,
)
from k3_core.operators.triton_host import interpreting as interpreted

__all__ = [
    "HEAD_DIMS",
    "STATE_DTYPES",
    "TAPS",
    "TESTED_HEADS",
    "check_conv_state",
    "check_index",
    "check_prefill",
    "check_rows",
    "check_state",
    "check_step",
    "check_vector",
    "interpreted",
    "row_stride",
    "supports",
]


def supports(spec: CallSpec, dtypes: Sequence[torch.dtype]) -> tuple[bool, str]:
    """Common part of every capability query: device, architecture, then sizes and dtypes."""
    name = spec.operator
    if spec.device != "cuda" and not (spec.device == "cpu" and interpreted()):
        return False, f"{name}: Triton kernels run on cuda tensors, not on {spec.device}"
    if spec.arch and (not spec.arch.startswith("sm_") or int("".join(filter(str.isdigit, spec.arch))) < 80):
        return False, f"{name}: needs sm_80 or newer (bfloat16 matrix units), this is {spec.arch}"
    return supports_sizes(spec, dtypes)
