"""Accelerators as data: what a plan needs to know about each, and how sure it is.

``memory`` is what the runtime reports as the total, in bytes. ``proof`` says where the number comes from: "measured"
was read on the device by this project; "nominal" is the vendor's data sheet and has not been seen here.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3_core.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator. ``per_node`` of them share a fast link; ``experts`` says how routed experts are computed."""

    name: str
    vendor: str
    arch: str
    memory: int
    per_node: int
    proof: str
    experts: str
    notes: tuple[str, ...] = ()


_WEIGHT_ONLY = "no FP4 matrix units: MXFP4 weights are unpacked inside the kernel, activations stay bfloat16"
_NATIVE = "MXFP4 matrix units"
_REQUANTISED = (
    "no FP4 matrix units: k3-ascend requantises routed experts, which loses accuracy and changes their bytes: to int4 "
    "(w4a8) where 256 divides a rank's expert width, else to int8, twice as large"
)

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("h100", "nvidia", "sm_90", int(79.1 * GIB), 8, "nominal", _WEIGHT_ONLY),
        Device("h200", "nvidia", "sm_90", 139 * GIB, 8, "measured", _WEIGHT_ONLY),
        Device("b200", "nvidia", "sm_100", int(178.3 * GIB), 8, "nominal", _NATIVE),
        Device("b300", "nvidia", "sm_103", int(267.7 * GIB), 8, "nominal", _NATIVE),
        Device("gb300", "nvidia", "sm_103", int(267.7 * GIB), 4, "nominal", _NATIVE,
               ("one NVLink domain spans up to 18 of these 4-GPU nodes: tensor parallelism may cross nodes at NVLink "
                "speed, which the ranking does not credit",)),
        Device("mi300x", "amd", "gfx942", 192 * GIB, 8, "nominal", _WEIGHT_ONLY),
        Device("mi325x", "amd", "gfx942", 256 * GIB, 8, "nominal", _WEIGHT_ONLY),
        Device("mi350x", "amd", "gfx950", 288 * GIB, 8, "nominal", _NATIVE),
        Device("mi355x", "amd", "gfx950", 288 * GIB, 8, "nominal", _NATIVE),
        Device("ascend-a2", "ascend", "ascend910b", 64 * GIB, 8, "nominal", _REQUANTISED),
        Device("ascend-a3", "ascend", "ascend910_93", 64 * GIB, 16, "nominal", _REQUANTISED,
               ("one 910C card holds two dies of 64 GiB, each its own device",)),
    )
}  # fmt: skip


def device(name: str, memory_gib: float | None = None, per_node: int | None = None) -> Device:
    """The device called ``name``, with the memory or the node size replaced where given.

    Raises ConfigError for an unknown name without ``memory_gib``; with it, any name is accepted.
    """
    known = DEVICES.get(name.lower())
    if known is None:
        if memory_gib is None:
            raise ConfigError(
                f"--gpu {name} is unknown: use one of {', '.join(DEVICES)}, or state --memory-gib (and "
                f"--gpus-per-node) for another device"
            )
        known = Device(name.lower(), "unknown", "", 0, 8, "stated by the caller", "not known for this device")
    if memory_gib is not None and not 0 < memory_gib < 2**20:
        raise ConfigError(f"--memory-gib {memory_gib}: expected the memory of one accelerator, above 0 and below a PiB")
    memory = known.memory if memory_gib is None else int(memory_gib * GIB)
    for option, value in (("--memory-gib", memory), ("--gpus-per-node", per_node or known.per_node)):
        if value <= 0:
            raise ConfigError(f"{option} must be positive")
    proof = known.proof if memory_gib is None else "stated by the caller"
    return Device(
        known.name, known.vendor, known.arch, memory, per_node or known.per_node, proof, known.experts, known.notes
    )
