"""Which implementation of each operator runs here, and why: this wheel's registry.

How it is asked and when contracts stand in for kernels: :mod:`k3_core.vllm.serving.dispatch`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from k3_core.operators import CallSpec, Implementation, Registry
from k3_core.vllm.serving import library
from k3_core.vllm.serving.dispatch import Dispatch

logger = logging.getLogger("vllm.plugins.k3")

KERNEL = "triton"
LIBRARY = library.LIBRARY


def registry() -> Registry:
    """All implementations of this wheel. Kernels whose compiler is not installed are left out."""
    return _dispatch.registry


@functools.cache
def device() -> tuple[str, str]:
    """(device type, architecture) of this process: ("cuda", "sm_90") or ("cpu", "")."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "cpu", ""
    capability = current_platform.get_device_capability()
    return "cuda", "" if capability is None else f"sm_{capability.to_int()}"


def choose(
    name: str,
    dtype: torch.dtype,
    sizes: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
    want: str | None = None,
) -> Implementation:
    """The implementation of ``name`` on this device; see :meth:`k3_core.vllm.serving.dispatch.Dispatch.choose`."""
    return _dispatch.choose(name, dtype, sizes, options, want)


def report() -> list[str]:
    """What was chosen in this process so far, one line an operator."""
    return _dispatch.report()


def warmup_profiles(config: Any, limits: Any) -> dict[str, list[Any]]:
    """Every kernel variant that serving can meet, by ``operator/implementation``."""
    return _dispatch.warmup_profiles(config, limits)


# ------------------------------------------------------------------------------------------------------ this wheel's


def _kernels() -> Iterable[Implementation]:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        logger.info("Kimi K3: no Triton kernels (%s)", error)
        return
    from k3_nvidia.kernels import attn_res, experts, kda_prefill, kda_step, router, situ
    from k3_nvidia.kernels import kda_prefill as prefill

    def kernel(
        name: str, module: Any, function: Callable[..., Any], supports: Callable[[CallSpec], tuple[bool, str]]
    ) -> Implementation:
        def on_gpu(spec: CallSpec) -> tuple[bool, str]:
            # Also where Triton interprets: its interpreter is for the kernels' own tests, not for a model.
            ok, why = _on_gpu(spec)
            return supports(spec) if ok else (ok, why)

        profiles = getattr(module, "warmup_profiles", None)
        return Implementation(name, KERNEL, function, on_gpu, priority=10, warmup_profiles=profiles)

    yield kernel("attn_res", attn_res, attn_res.attn_res, _attn_res_supports)
    yield kernel("short_conv", kda_prefill, prefill.short_conv, prefill.supports_short_conv)
    yield kernel("kda_prefill", kda_prefill, prefill.kda_prefill, prefill.supports_prefill)
    yield kernel("gated_norm", kda_prefill, prefill.gated_norm, prefill.supports_gated_norm)
    for name in ("kda_decode", "kda_verify"):
        yield kernel(name, kda_step, getattr(kda_step, name), kda_step.supports_step)
    yield kernel("route", router, router.route, _route_supports)
    yield kernel("situ", situ, situ.situ_and_mul, _situ_supports)
    yield Implementation(
        "experts",
        KERNEL,
        experts.experts,
        _experts_supports,
        priority=10,
        prepare=experts.prepare,
        warmup_profiles=experts.warmup_profiles,
    )
    yield library.EXPERTS


def _on_gpu(spec: CallSpec) -> tuple[bool, str]:
    if spec.device == "cuda":
        return True, f"{spec.operator}: Triton on {spec.arch or 'cuda'}"
    return False, f"{spec.operator}: Triton kernels run on cuda tensors, not on {spec.device}"


def _attn_res_supports(spec: CallSpec) -> tuple[bool, str]:
    hidden = spec.sizes.get("H", 8)
    if hidden % 8:
        return False, f"attn_res: hidden size {hidden} is not a multiple of 8"
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False, f"attn_res: dtype {spec.dtype} is not bfloat16, float16 or float32"
    return True, f"attn_res: Triton, hidden size {hidden}"


def _route_supports(spec: CallSpec) -> tuple[bool, str]:
    from k3_nvidia.kernels import router

    options = spec.options
    return router.supports(
        spec.sizes["A"], spec.sizes["X"], options.get("num_expert_group", 1), options.get("topk_group", 1)
    )


def _situ_supports(spec: CallSpec) -> tuple[bool, str]:
    from k3_nvidia.kernels import situ

    return situ.supports(spec.dtype)


def _experts_supports(spec: CallSpec) -> tuple[bool, str]:
    from k3_nvidia.kernels import experts

    capability = int(spec.arch.removeprefix("sm_") or 90)
    ok, why = experts.supports(
        spec.sizes["I"], spec.sizes["L"], spec.dtype, capability, bool(spec.options.get("quantised"))
    )
    on_gpu, where = _on_gpu(spec)
    return (ok, why) if on_gpu else (on_gpu, where)


_dispatch = Dispatch(_kernels, lambda: device())
