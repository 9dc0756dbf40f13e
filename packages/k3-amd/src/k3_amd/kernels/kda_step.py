"""KDA decode and verification: launchers of ``device/kda_step.py``; operators kda_decode and kda_verify."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_amd.kernels import launch
from k3_amd.kernels.device.kda_step import kda_decode_kernel, kda_verify_kernel
from k3_core.operators import CallSpec
from k3_core.operators import kda_args as checks

_decode = launch.Launcher(kda_decode_kernel)
_verify = launch.Launcher(kda_verify_kernel)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """kda_decode and kda_verify: any head count, both conv layouts, fp32 or bf16 state."""
    ok, why = launch.supports_device(spec)
    return checks.supports_sizes(spec, checks.FLOATS) if ok else (ok, why)


def kda_decode(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    o_norm_weight: Tensor,
    o_norm_eps: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Operator kda_decode of the table. One launch, no host wait: safe inside a captured graph.

    Raises ValueError for shapes and UnsupportedError for dtypes or strides it has no code for.
    """
    out = checks.check_step(
        "kda_decode",
        qkv,
        z,
        beta,
        gate,
        conv_weight,
        a_log,
        dt_bias,
        o_norm_weight,
        conv_state,
        recurrent_state,
        3,
        out,
    )
    checks.check_index("kda_decode", "slot_mapping", slot_mapping, (qkv.shape[0],))
    rows, heads, dim = z.shape
    if rows * heads == 0:
        return out
    _decode(
        (heads, rows),
        qkv, z, beta, gate, conv_weight, a_log, dt_bias, o_norm_weight, conv_state, recurrent_state,
        slot_mapping, out, float(lower_bound or 0.0), o_norm_eps,
        *(checks.row_stride(x) for x in (qkv, z, beta, gate, out)),
        *conv_state.stride(), recurrent_state.stride(0), slot_mapping.stride(0), heads,
        BOUNDED=lower_bound is not None, D=dim, **launch.options("decode", qkv.device),
    )  # fmt: skip
    return out


def kda_verify(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    o_norm_weight: Tensor,
    o_norm_eps: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    num_accepted: Tensor,
    cu_seqlens: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Operator kda_verify of the table. One launch, no host wait: safe inside a captured graph.

    Raises ValueError for shapes and UnsupportedError for dtypes or strides it has no code for.
    """
    op = "kda_verify"
    rows, columns = slot_mapping.shape
    out = checks.check_step(
        op,
        qkv,
        z,
        beta,
        gate,
        conv_weight,
        a_log,
        dt_bias,
        o_norm_weight,
        conv_state,
        recurrent_state,
        columns + 2,
        out,
    )
    checks.check_index(op, "slot_mapping", slot_mapping, (rows, columns))
    checks.check_vector(op, "num_accepted", num_accepted, (rows,), torch.int32)
    checks.check_vector(op, "cu_seqlens", cu_seqlens, (rows + 1,), torch.int32)
    tokens, heads, dim = z.shape
    if tokens * heads == 0:
        return out
    if rows == 0:
        return out.zero_()
    _verify(
        (heads, rows),
        qkv, z, beta, gate, conv_weight, a_log, dt_bias, o_norm_weight, conv_state, recurrent_state,
        slot_mapping, num_accepted, cu_seqlens, out, float(lower_bound or 0.0), o_norm_eps,
        *(checks.row_stride(x) for x in (qkv, z, beta, gate, out)),
        *conv_state.stride(), recurrent_state.stride(0), *slot_mapping.stride(), tokens, rows, heads,
        BOUNDED=lower_bound is not None, D=dim, **launch.options("verify", qkv.device),
    )  # fmt: skip
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """Row counts: heads and rows are run-time numbers of one variant, so one is enough."""
    return [{"rows": 1}]
