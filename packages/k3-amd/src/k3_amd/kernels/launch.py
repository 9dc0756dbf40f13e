"""How this wheel's kernels are launched: the device's table, threads for warps, AMD's own options on HIP only."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from k3_amd import tuning
from k3_core.operators import CallSpec
from k3_core.operators.triton_host import Launcher, interpreting

__all__ = ["HIP", "Launcher", "architecture", "compute_units", "interpreting", "options", "supports_device"]

HIP = torch.version.hip is not None
#: Lanes that execute together: 64 on CDNA, 32 where the same source runs on another vendor's device.
WAVE = 64 if HIP else 32
#: Options that only AMD's compiler accepts.
HIP_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
#: Which table a device that is not AMD's uses (tests run both): gfx942 or gfx950.
TABLE = "K3_AMD_TABLE"


def architecture(device: torch.device) -> str:
    """gfx942 or gfx950: the device's own on HIP (another gfx takes gfx942's table), else what K3_AMD_TABLE says."""
    if HIP and device.type == "cuda":
        name = _gcn_arch(device.index or 0)
        return name if name in tuning.ARCHITECTURES else "gfx942"
    return os.environ.get(TABLE, "gfx942")


@cache
def _gcn_arch(index: int) -> str:
    properties: Any = torch.cuda.get_device_properties(index)
    return str(properties.gcnArchName).split(":")[0]


@cache
def _units(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def compute_units(device: torch.device) -> int:
    """Compute units (multiprocessors) of the device; 2 for the interpreter, so that loops over work are walked."""
    return _units(device.index or 0) if device.type == "cuda" else 2


def options(kernel: str, device: torch.device, **changes: Any) -> dict[str, Any]:
    """Launch keywords of one kernel on this device, with changes; see `prepare`."""
    return prepare({**tuning.launch(kernel, architecture(device)), **changes})


def prepare(entry: dict[str, Any]) -> dict[str, Any]:
    """A table entry as Triton takes it: `threads` as num_warps, HIP-only options left out elsewhere."""
    result = {k: v for k, v in entry.items() if HIP or k not in HIP_ONLY}
    if "threads" in result:
        result["num_warps"] = max(result.pop("threads") // WAVE, 1)
    return result


def supports_device(spec: CallSpec) -> tuple[bool, str]:
    """Whether Triton runs these kernels on the spec's device: CDNA 3 and 4, or any device that is not AMD's (tests)."""
    name = spec.operator
    if spec.device != "cuda" and not (spec.device == "cpu" and interpreting()):
        return False, f"{name}: Triton kernels run on cuda (HIP) tensors, not on {spec.device}"
    if spec.arch.startswith("gfx") and spec.arch not in tuning.ARCHITECTURES:
        return False, f"{name}: tuned and compiled for {', '.join(tuning.ARCHITECTURES)}, this is {spec.arch}"
    return True, f"{name}: Triton on {spec.arch or spec.device}"
