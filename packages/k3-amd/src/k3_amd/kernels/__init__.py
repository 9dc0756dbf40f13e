"""Triton kernels for CDNA (gfx942, gfx950): launchers take tensors, never layers; signatures are the operator table's.

Every module below exports the operators it implements under the table's names and, beside them,

    supports(spec: k3_core.operators.CallSpec) -> (ok, reason)        launches and allocates nothing
    warmup_profiles(config, limits) -> list[dict]                     sizes that together meet every compiled variant

| module         | operators                           | besides                                                      |
|----------------|-------------------------------------|--------------------------------------------------------------|
| attn_res       | attn_res                            | 0..15 blocks                                                 |
| kda_prefill    | short_conv, kda_prefill, gated_norm | plan_prefill(cu_seqlens, heads, device, *, dim=128,          |
|                |                                     | segment_chunks=None) -> PrefillPlan; short_conv and          |
|                |                                     | kda_prefill take it as keyword `plan`                        |
| kda_step       | kda_decode, kda_verify              |                                                              |
| router         | route                               | no expert groups                                             |
| experts        | experts                             | prepare(ExpertWeights) -> PackedExperts; see experts_layout  |
| experts_layout |                                     | empty_packed(num_experts, width, latent, device, form=None), |
|                |                                     | pack_expert_(dst, index, gate, up, down), supports_shape;    |
|                |                                     | (packed, scale) pairs as in the checkpoint, cut to the rank  |
| situ           | situ                                |                                                              |
| state_copy     | state_gather, state_scatter         |                                                              |
| build          |                                     | build(variant, arch) -> Binary(code, metadata, arguments);   |
| catalogue      |                                     | variants(arch) -> {name: Variant}; both need Triton, neither |
|                |                                     | torch nor a GPU                                              |

``implementations()`` gives all of them as ``k3_core.operators.Implementation`` named "triton", ready to register.

The device functions are in ``k3_amd.kernels.device`` and import Triton only; launch choices are data in
``k3_amd.tuning``. Options that only AMD's compiler knows (waves_per_eu, matrix_instr_nonkdim) are passed on HIP only,
so the same source runs on other devices, which is how its results can be checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3_core.operators import Implementation


def implementations() -> dict[str, Implementation]:
    """This wheel's kernels by operator. Raises ImportError where Triton is not installed."""
    from k3_amd.kernels.table import IMPLEMENTATIONS

    return dict(IMPLEMENTATIONS)
