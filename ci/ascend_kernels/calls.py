"""One call of every launcher at released sizes, to see which kernel variants serving launches. Nothing is computed.

Sizes: K3 on 8 ranks (12 heads), every optional argument given, both gate forms, both types of indices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ascend_kernels.lower import Variant, variant_of
from k3_ascend.kernels import launch, warmup

#: Released sizes; Kimi-Linear's gate has no bound.
K3 = SimpleNamespace(
    hidden_size=7168,
    attn_res_block_size=12,
    hidden_act="situ",
    intermediate_size=33792,
    moe_intermediate_size=3072,
    num_shared_experts=2,
    linear_attn=SimpleNamespace(num_heads=96, head_dim=128, gate_lower_bound=-5.0),
)
UNBOUNDED = SimpleNamespace(
    **{**vars(K3), "attn_res_block_size": None, "hidden_act": "silu"},
)
UNBOUNDED.linear_attn = SimpleNamespace(num_heads=96, head_dim=128, gate_lower_bound=None)
LIMITS = SimpleNamespace(tensor_parallel_size=8, num_spec=3, max_num_batched_tokens=8192, max_num_seqs=256)
MODULES = ("attn_res", "situ", "gated_norm", "mxfp4", "kda_gate", "short_conv", "kda_step", "kda_prefill")


def variants() -> list[tuple[Any, Variant]]:
    """(kernel, variant) of every launch that the warm-up profiles make, each once, in a fixed order."""
    found: dict[tuple[str, Variant], Any] = {}

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        found.setdefault((kernel.__name__, variant_of(kernel, args, constants)), kernel)

    with launch.executing_with(record):
        for profile in profiles():
            warmup.run_profile(**profile, device="cpu")
    return [(kernel, variant) for (_, variant), kernel in sorted(found.items(), key=lambda x: (x[0][0], repr(x[0][1])))]


def profiles() -> Iterator[dict[str, Any]]:
    """The warm-up profiles of all modules for both models."""
    seen: list[dict[str, Any]] = []
    for name in MODULES:
        module = warmup._module(name)
        for config in (K3, UNBOUNDED):
            for profile in module.warmup_profiles(config, LIMITS):
                if profile not in seen:
                    seen.append(profile)
                    yield profile


def kernels() -> set[str]:
    """Names of every ``@triton.jit`` function that a launcher can start: those named ..._kernel."""
    folder = Path(sys.modules["k3_ascend.kernels"].__file__ or "").parent
    names = set()
    for name in (*MODULES, "kda_chunk"):
        text = (folder / f"{name}.py").read_text()
        names |= {line.split("(")[0].removeprefix("def ") for line in text.splitlines() if line.startswith("def ")}
    return {name for name in names if name.endswith("_kernel")}
