"""Which AMD GPU this is, asked of vLLM's ROCm platform, which finds it without starting the HIP runtime."""

from __future__ import annotations

import functools

#: Architectures that this wheel's kernels are built for, and the products that have them.
SUPPORTED = {"gfx942": "MI300X, MI325X", "gfx950": "MI350X, MI355X"}


@functools.cache
def on_rocm() -> bool:
    """Whether vLLM runs on ROCm."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


@functools.cache
def architecture() -> str:
    """``gfx942``, ``gfx950``; another GPU's name as far as vLLM says it; empty outside ROCm."""
    if not on_rocm():
        return ""
    from vllm.platforms import rocm

    if rocm.on_gfx942():
        return "gfx942"
    if rocm.on_gfx950():
        return "gfx950"
    name = str(getattr(rocm, "_GCN_ARCH", ""))
    return name.split(":")[0] or "unknown"


def refusal() -> str | None:
    """Why this wheel's model cannot run on this device, in one sentence; None where it can (a CPU included)."""
    from vllm.platforms import current_platform

    made_for = "; ".join(f"{arch} ({products})" for arch, products in SUPPORTED.items())
    if current_platform.is_cpu():
        return None
    if not on_rocm():
        name = getattr(current_platform, "device_name", type(current_platform).__name__)
        return f"vLLM's platform is {name}, not ROCm; unset K3_IMPL to leave the choice to the platform"
    if architecture() not in SUPPORTED:
        return (
            f"this GPU is {architecture()}; kernels are made for {made_for}. "
            "K3_IMPL=upstream leaves the model to vLLM's own implementation"
        )
    return None
