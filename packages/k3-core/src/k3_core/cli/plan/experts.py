"""How the routed experts lie on a device: the form of the wheel that serves there, its padding, its bytes.

Written down here, because planning needs no vendor's wheel; a test of each wheel holds this page to what its loader
allocates.

    mxfp4   the released codes, 4 bits a value and 8 a group of 32 (17/32 byte), columns rounded up to ``unit``
    w4a8    int4, an int64 a group of 256 inputs and output, an fp32 bias an output (k3-ascend; lossy)
    int8    8 bits a value, a bfloat16 scale an output (k3-ascend; lossy)
    plain   16 bits a value (Kimi-Linear)
"""

from __future__ import annotations

from dataclasses import dataclass

from k3_core.cli.plan.devices import Device
from k3_core.config import K3Config
from k3_core.contracts.mxfp4 import GROUP_SIZE

#: vLLM's own model pads cut experts to at least this width.
VLLM_FLOOR = 256
#: Wheels whose layout rounds the width of packed experts up to a multiple, in place of vLLM's floor.
UNIT = {"nvidia": 64, "amd": 64}
#: Generations on which k3-ascend requantises, to w4a8 where this group divides latent and expert width, else to int8.
REQUANTISES = ("ascend910b", "ascend910_93")
INT4_GROUP = 256


@dataclass(frozen=True)
class ExpertForm:
    """One rank's experts. ``width`` columns of an expert are computed with, ``padded`` are stored; bytes of one."""

    name: str
    width: int
    padded: int
    nbytes: int


def expert_form(config: K3Config, device: Device, ranks: int, *, upstream: bool, floor: int | None) -> ExpertForm:
    """The form of one rank's experts.

    Args:
        config: the model.
        device: where it is served.
        ranks: how many ranks cut the width of an expert (1 with expert parallelism).
        upstream: vLLM's own model serves (data parallelism).
        floor: the caller's least width of cut experts, which also means the released codes; None for the wheel's own.
    """
    width = config.text.moe_intermediate_size // ranks
    latent = config.text.expert_hidden_size
    if floor is None and not upstream and config.quantization is not None:
        if device.arch in REQUANTISES:
            name = "int8" if latent % INT4_GROUP or width % INT4_GROUP else "w4a8"
            return ExpertForm(name, width, width, _requantised(name, width, latent))
        unit = UNIT.get(device.vendor)
        if unit is not None:
            padded = -(-width // unit) * unit
            return ExpertForm("mxfp4", width, padded, _mxfp4(padded, latent))
    padded = max(width, VLLM_FLOOR if floor is None else floor) if ranks > 1 else width
    if config.quantization is None:
        return ExpertForm("plain", width, padded, 6 * padded * latent)
    return ExpertForm("mxfp4", width, padded, _mxfp4(padded, latent))


def _mxfp4(width: int, latent: int) -> int:
    values = 3 * width * latent
    return values // 2 + values // GROUP_SIZE


def _requantised(name: str, width: int, latent: int) -> int:
    """Three matrices: gate and up [latent, 2 width], down [width, latent]; layouts of k3-ascend."""
    outputs = 2 * width + latent
    if name == "int8":
        return 3 * width * latent + 2 * outputs
    scales = latent // INT4_GROUP * 2 * width + width // INT4_GROUP * latent
    return 3 * width * latent // 2 + 8 * scales + 4 * outputs
