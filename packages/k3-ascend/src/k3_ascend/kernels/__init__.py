"""Triton kernels for Ascend, written at the language level of triton-ascend 3.2; launchers take tensors, never layers.

Importing this package imports no Triton: :func:`available` says whether there is one, :func:`implementations` gives the
launchers as :class:`k3_core.operators.Implementation` called "triton". The same sources run on triton-ascend 3.2.0 and
on ordinary Triton 3.6 (an NVIDIA GPU), which is how their semantics are seen on a second device.

Operators of the table (`k3_core.operators.table`; names, order, rules and tolerances are the table's; extra keywords
have defaults and change speed only):

    attn_res.attn_res(prefix, delta, bank, norm_weight, proj_weight, eps, num_blocks, *, write_block=None,
        output_norm_weight=None, output_norm_eps=None, out=None, folded=None)
    short_conv.short_conv(x, weight, conv_state, slot_mapping, cu_seqlens, has_initial_state, *, out=None,
        plan=None, taps=None)
    kda_prefill.kda_prefill(q, k, v, z, beta, a_log, dt_bias, lower_bound, recurrent_state, slot_mapping, cu_seqlens,
        has_initial_state, *, out=None, plan=None)
    kda_step.kda_decode(qkv, z, beta, gate, conv_weight, a_log, dt_bias, lower_bound, o_norm_weight, o_norm_eps,
        conv_state, recurrent_state, slot_mapping, *, out=None, taps=None)
    kda_step.kda_verify(qkv, z, beta, gate, conv_weight, a_log, dt_bias, lower_bound, o_norm_weight, o_norm_eps,
        conv_state, recurrent_state, slot_mapping, num_accepted, cu_seqlens, *, out=None, taps=None)
    gated_norm.gated_norm(o, gate, weight, eps, *, out=None)
    situ.situ(x, beta, linear_beta, *, out=None)

Beside the table:

    kda_gate.kda_gate(z, a_log, dt_bias, lower_bound, *, out=None) -> [T, N, D] fp32
        natural-log decay (what ``gk`` of a recurrent delta-rule operator wants); contract `kda.gate`
    kda_gate.kda_cumulative_gate(z, a_log, dt_bias, lower_bound, plan, *, out=None) -> [T, N, D] fp32
        inclusive sum of the decay inside each chunk of 64 tokens of its sequence; rows of no sequence are zeros
    mxfp4.unpack_mxfp4(packed, scale, *, out=None) -> bfloat16 [..., K]
        packed uint8 [..., K/2], scale uint8 [..., K/32]; bit for bit the contract `mxfp4.unpack`
    attn_res.fold(norm_weight, proj_weight) -> [H] fp32
        their product, which the kernel reads; give it as ``folded`` or it is made in every call
    short_conv.tap_major(weight) -> [W, C] fp32
        the layout that the convolution kernels read; give it as ``taps`` or it is made in every call
    kda_plan.plan_prefill(cu_seqlens, device) -> PrefillPlan
        the chunks of a packed batch, built once a step from a CPU tensor or list (no wait for the device), shared by
        short_conv, kda_cumulative_gate and kda_prefill of all layers

Beside each launcher in its module: ``supports(spec) -> (ok, reason)`` and ``warmup_profiles(config, limits)``, keyword
arguments of :func:`k3_ascend.kernels.warmup.run_profile` that together compile every variant serving can meet.

What all launchers share: a convolution state must have the SD layout (channels contiguous, vLLM's default; DS is
refused with a reason); head dimension 128, or a power of two from 16 for tiny checkpoints; programs are persistent, one
for each vector core; padding rows and null slots are written with zeros; no launcher waits for the device if a plan is
given.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3_core.operators import Implementation

#: Name of every implementation of this package in a registry.
NAME = "triton"


def available() -> tuple[bool, str]:
    """Whether Triton can be imported here, and why not."""
    if importlib.util.find_spec("triton") is None:
        return False, "no triton package is installed (vllm-ascend brings triton-ascend)"
    return True, "triton is installed"


def implementations() -> dict[str, Implementation]:
    """The launchers by operator name. Raises ImportError where :func:`available` says no."""
    from k3_ascend.kernels import catalogue

    return dict(catalogue.IMPLEMENTATIONS)
