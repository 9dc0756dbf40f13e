"""Device generations that this wheel knows: A2 (910B), A3 (910_93) and 950.

A generation is recognised in three ways: by the SoC name that CANN gives, by torch_npu's SoC number, and by what
vllm-ascend was built for. The last one decides at run time (vllm-ascend itself refuses a device that it was not built
for); the others serve checks and messages.
"""

from __future__ import annotations

import re
from enum import Enum

from k3_core.errors import UnsupportedError


class Generation(Enum):
    """A device generation; the value is what users read."""

    A2 = "A2"
    A3 = "A3"
    A950 = "950"

    @property
    def arch(self) -> str:
        """CANN's name of the architecture, which `CallSpec.arch` carries."""
        return {"A2": "ascend910b", "A3": "ascend910_93", "950": "ascend950"}[self.value]


#: SoC names as ``aclrtGetSocName`` gives them.
_NAMES = (
    (re.compile(r"^ascend910b\d", re.IGNORECASE), Generation.A2),
    (re.compile(r"^ascend910_93\d\d", re.IGNORECASE), Generation.A3),
    (re.compile(r"^ascend950", re.IGNORECASE), Generation.A950),
)
#: torch_npu's numbers (``torch_npu.npu.get_soc_version``): first, last, generation.
_NUMBERS = ((220, 225, Generation.A2), (250, 255, Generation.A3), (260, 260, Generation.A950))
#: Names of vllm-ascend's ``AscendDeviceType``.
_DEVICE_TYPES = {"A2": Generation.A2, "A3": Generation.A3, "A5": Generation.A950}


def of_name(soc: str) -> Generation:
    """The generation of a SoC name ("Ascend910B3"). Raises UnsupportedError for others."""
    for pattern, generation in _NAMES:
        if pattern.match(soc):
            return generation
    raise UnsupportedError(f"SoC {soc!r} is not supported: Kimi K3 needs an Ascend 910B (A2), 910_93 (A3) or 950")


def of_number(soc: int) -> Generation:
    """The generation of torch_npu's SoC number. Raises UnsupportedError for others."""
    for first, last, generation in _NUMBERS:
        if first <= soc <= last:
            return generation
    raise UnsupportedError(f"SoC number {soc} is not supported: known are 220-225 (A2), 250-255 (A3) and 260 (950)")


def of_build() -> Generation:
    """The generation that the installed vllm-ascend was built for. Raises UnsupportedError for others (310P)."""
    from vllm_ascend.utils import get_ascend_device_type

    name = get_ascend_device_type().name
    if name not in _DEVICE_TYPES:
        raise UnsupportedError(f"this vllm-ascend was built for {name}; Kimi K3 needs a build for A2, A3 or 950")
    return _DEVICE_TYPES[name]
