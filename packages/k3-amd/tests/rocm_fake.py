"""vLLM on a faked ROCm platform, without a GPU: ``rocm_fake.py ARCH AITER`` prints what this wheel would do there.

ARCH: gfx942, gfx950 or another. AITER: ``with`` puts a package of that name with the few functions below on the path
and sets vLLM's switch; ``without`` does neither. Shows that gates choose the right branch, nothing about kernels. It
imports the vLLM that is found first: with the Python files of another release in front (``PYTHONPATH``), that one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

STAND_IN = """
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0,
                           dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False):
    raise RuntimeError("a stand-in computes nothing")
"""


def fake(arch: str, aiter: bool) -> None:
    """Make torch and vLLM believe in one GPU of ``arch``. Must run before either is imported."""
    amdsmi: Any = types.ModuleType("amdsmi")
    amdsmi.AmdSmiException = type("AmdSmiException", (Exception,), {})
    for name in ("amdsmi_init", "amdsmi_shut_down"):
        setattr(amdsmi, name, lambda *args: None)
    amdsmi.amdsmi_get_processor_handles = lambda: [0]
    amdsmi.amdsmi_get_gpu_asic_info = lambda handle: {
        "device_id": "0x0", "target_graphics_version": arch, "market_name": "a faked GPU",
    }  # fmt: skip
    amdsmi.amdsmi_topo_get_link_type = lambda *args: {"hops": 1, "type": 2}
    sys.modules["amdsmi"] = amdsmi
    # A CPU build's operators are not ROCm's, and may have instructions that this machine's processor lacks.
    sys.modules["vllm._C"] = types.ModuleType("vllm._C")
    if aiter:
        folder = Path(tempfile.mkdtemp())
        (folder / "aiter").mkdir()
        (folder / "aiter" / "__init__.py").write_text(STAND_IN)
        sys.path.insert(0, str(folder))
        os.environ["VLLM_ROCM_USE_AITER"] = "1"

    import torch

    class Properties:
        gcnArchName = f"{arch}:sramecc+:xnack-"  # noqa: N815
        multi_processor_count, total_memory, name, warp_size = 256, 192 << 30, "a faked GPU", 64

    torch.cuda.get_device_properties = lambda *args: Properties  # type: ignore[assignment]
    torch.cuda.device_count = lambda: 1
    torch.version.hip = "7.0.0"
    import vllm.platforms as platforms
    from vllm.platforms.rocm import RocmPlatform

    platforms._current_platform = platforms.current_platform = RocmPlatform()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and getattr(module, "current_platform", None) is not None:
            module.current_platform = platforms.current_platform  # type: ignore[attr-defined]


def report() -> dict[str, Any]:
    """Everything that depends on the platform."""
    import torch

    from k3_amd import aiter, dispatch, limits, mla, platform, plugin, vision
    from k3_core.errors import UnsupportedError
    from k3_core.operators import CallSpec
    from k3_core.vllm import registration

    calls: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
        "attn_res": ({"H": 7168, "M": 8}, {}),
        "short_conv": ({"N": 6, "D": 128, "W": 4, "C": 2304, "P": 3}, {}),
        "kda_prefill": ({"N": 6, "D": 128, "K": 128, "V": 128}, {"lower_bound": -5.0}),
        "gated_norm": ({"N": 6, "D": 128}, {}),
        "kda_decode": ({"N": 6, "D": 128, "W": 4, "K": 128, "V": 128, "P": 3, "C": 2304}, {}),
        "kda_verify": ({"N": 6, "D": 128, "W": 4, "K": 128, "V": 128, "P": 10, "C": 2304, "Q": 8}, {"num_spec": 7}),
        "route": ({"A": 896, "X": 16}, {"num_expert_group": 1, "topk_group": 1}),
        "experts": ({"L": 3584, "I": 192, "X": 16, "A": 896}, {"quantised": True, "hidden_act": "situ"}),
        "situ": ({"I": 384}, {}),
    }
    chosen = {}
    for name, (sizes, options) in calls.items():
        where, arch = dispatch.device()
        try:
            spec = CallSpec(name, where, torch.bfloat16, arch, sizes, options)
            chosen[name] = dispatch.registry().choose(spec).implementation.name
        except UnsupportedError as error:
            chosen[name] = str(error)
    plugin.register()  # CI's vLLM is older than the range
    refused = registration.active() is None
    plugin.VLLM = ">=0.32,<0.34"
    plugin.register()
    active = registration.active()
    return {
        "refused_older_vllm": refused,
        "acts": active is not None and active.name,
        "served": registration._state.served,
        "reasons": list(limits.AmdHook.device_reasons(None, None)),
        "forms": {
            form: list(
                limits.AmdHook.device_reasons(types.SimpleNamespace(additional_config={"k3_experts": form}), None)
            )
            for form in ("unpacked", "scaled", "mxfp8", "fp8")
        },
        "vendor": registration._platform(),
        "device": dispatch.device(),
        "refusal": platform.refusal(),
        "aiter": aiter.version(),
        "mla": {heads: mla.choose_heads(heads) for heads in (6, 12, 16, 24, 96)},
        "faults": {heads: mla.padding_fault(heads) for heads in (6, 12, 24)},
        "vision": vision.choose_attention()[1],
        "operators": chosen,
        "lines": aiter.report(),
    }


if __name__ == "__main__":
    fake(sys.argv[1], sys.argv[2] == "with")
    print(json.dumps(report()))
