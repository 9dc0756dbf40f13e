"""kda_prefill, short_conv and gated_norm: launchers with the signatures of the operator table.

Two implementations: vLLM's FlashKDA operator (kda_flash) where it was measured to be faster and can take the call, and
this wheel's kernels everywhere else. Ours are three to five launches: norms and cumulative gates, chunks (kda_chunk),
then, where the cost model cuts sequences into segments, local and scan passes, then outputs (kda_segment). Their
workspace holds 108 KiB a chunk and head plus 128 KiB a segment and head at D = 128.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec
from k3_core.operators.triton_host import Launcher
from k3_nvidia.kernels import kda_checks as checks
from k3_nvidia.kernels import kda_chunk_cuda, kda_flash, kda_passes_cuda
from k3_nvidia.kernels.glue import launch_options, pdl
from k3_nvidia.kernels.kda_chunk import CHUNK, kda_chunk_kernel, kda_prepare_kernel
from k3_nvidia.kernels.kda_conv import gated_norm_kernel, short_conv_kernel
from k3_nvidia.kernels.kda_math import LOG2E, MAX_HALF_RANGE
from k3_nvidia.kernels.kda_plan import FLASH, PrefillPlan, check_plan, plan_prefill
from k3_nvidia.kernels.kda_segment import kda_local_kernel, kda_output_kernel, kda_scan_kernel
from k3_nvidia.tuning import kda as tuning

_gated_norm = Launcher(gated_norm_kernel)
_chunk = Launcher(kda_chunk_kernel)
_local = Launcher(kda_local_kernel)
_output = Launcher(kda_output_kernel)
_prepare = Launcher(kda_prepare_kernel)
_scan = Launcher(kda_scan_kernel)
_short_conv = Launcher(short_conv_kernel)
_BF16 = (torch.bfloat16,)
_FLOATS = (torch.bfloat16, torch.float32)
#: Compiled by Triton 3.6 for sm_90a the chunk kernels give wrong results with 16 channels (an H200, 2026-11-30; right
#: in the interpreter, and right on the H200 from 32 on). K3 and Kimi-Linear have 128.
LEAST_COMPILED_DIM = 32


def supports_prefill(spec: CallSpec) -> tuple[bool, str]:
    """kda_prefill: bfloat16 activations (its matrix products have bfloat16 operands), any head count and gate form."""
    dim = spec.sizes.get("K", 128)
    if dim < LEAST_COMPILED_DIM and spec.device != "cpu":
        return (
            False,
            f"kda_prefill: head dimension {dim} is below {LEAST_COMPILED_DIM}, the smallest that compiles right",
        )
    bound = spec.options.get("lower_bound")
    if bound is not None and bound > 0:
        return False, f"kda_prefill: lower_bound must be negative or None, not {bound}"
    ok, why = checks.supports(spec, _BF16)
    if ok and spec.device == "cuda":
        flash, reason = kda_flash.supports(spec)
        why += f"; {reason.partition(': ')[2]}{' where it was measured to be faster' if flash else ''}"
    return ok, why


def supports_short_conv(spec: CallSpec) -> tuple[bool, str]:
    """short_conv: four taps, both conv layouts."""
    return checks.supports(spec, _FLOATS)


def supports_gated_norm(spec: CallSpec) -> tuple[bool, str]:
    """gated_norm: any head count."""
    return checks.supports(spec, _FLOATS)


def fits_split(lower_bound: float | None) -> bool:
    """Whether half of 32 decays at the bound stays inside the exponent range: the one-product form of kda_chunk."""
    return lower_bound is not None and 0 >= lower_bound * 16 * LOG2E >= -MAX_HALF_RANGE


def runs_flash(
    plan: PrefillPlan, q: Tensor, k: Tensor, v: Tensor, z: Tensor, state_dtype: torch.dtype, lower_bound: float | None
) -> bool:
    """Whether a call with this plan goes to vLLM's FlashKDA operator.

    A plan that chose it by measurement gives way where the operator is not here or refuses, and where q, k, v or z are
    not dense, since it was measured without copies; a plan that the caller forced does not.
    """
    if getattr(plan, "engine", "") != FLASH:
        return False
    if getattr(plan, "forced", False):
        return True
    dense = all(x.is_contiguous() for x in (q, k, v, z))
    return dense and not kda_flash.refusal(q.shape[2], q.dtype, state_dtype, lower_bound)


def _shared(device: torch.device) -> int | None:
    return tuning.shared_limit(device.index or 0) if device.type == "cuda" else None


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor,
    *,
    out: Tensor | None = None,
    plan: PrefillPlan | None = None,
) -> Tensor:
    """Operator kda_prefill of the table; see there for shapes and rules.

    plan: `plan_prefill` of the same boundaries; without one it is built here, which reads a device cu_seqlens back.
    Raises ValueError for shapes and UnsupportedError for dtypes or strides it has no code for.
    """
    out = checks.check_prefill(q, k, v, z, beta, a_log, dt_bias, recurrent_state, slot_mapping, has_initial_state, out)
    tokens, heads, dim = q.shape
    if plan is None:
        plan = plan_prefill(cu_seqlens, heads, q.device, dim=dim)
    check_plan("kda_prefill", plan, slot_mapping.shape[0], tokens)
    if plan.end < tokens:
        out[plan.end :].zero_()
    if plan.num_chunks == 0 or heads == 0:
        return out
    if not fits_split(lower_bound) and lower_bound is not None and lower_bound > 0:
        raise UnsupportedError(f"kda_prefill: lower_bound must be negative or None, got {lower_bound}")
    if runs_flash(plan, q, k, v, z, recurrent_state.dtype, lower_bound):
        kda_flash.prefill(
            q, k, v, z, beta, a_log, dt_bias, float(lower_bound or 0.0), recurrent_state, slot_mapping, cu_seqlens,
            has_initial_state, out,
        )  # fmt: skip
        return out
    # Each [chunks, heads, 64, D] (U transposed: [.., D, 64]).
    w, ut, qg, kg = torch.empty(4, plan.num_chunks * heads, CHUNK * dim, dtype=torch.bfloat16, device=q.device).unbind(
        0
    )
    a = torch.empty(plan.num_chunks * heads, CHUNK * CHUNK, dtype=torch.bfloat16, device=q.device)
    gamma = torch.empty(plan.num_chunks * heads, dim, dtype=torch.float32, device=q.device)
    inside = (w, ut, qg, kg, a, gamma)
    form = tuning.chunk_cuda()
    explicit = bool(form) and not kda_chunk_cuda.refusal(q, k, v, z, beta, fits_split(lower_bound))
    passes = tuning.passes() if explicit else {}
    tiled = bool(passes) and not kda_passes_cuda.refusal(out, recurrent_state, slot_mapping)
    if explicit:
        kda_chunk_cuda.chunk(
            q,
            k,
            v,
            z,
            beta,
            a_log,
            dt_bias,
            float(lower_bound or 0.0),
            plan.chunks,
            *inside,
            tiled=tiled,
            **form,
        )
    else:
        _inside_chunks(q, k, v, z, beta, a_log, dt_bias, lower_bound, plan, inside)
    run = _explicit_passes if tiled else _passes
    run(inside, recurrent_state, slot_mapping, has_initial_state, plan, heads, out)
    return out


def _explicit_passes(
    inside: tuple[Tensor, ...], state: Tensor, slots: Tensor, init: Tensor, plan: PrefillPlan, heads: int, out: Tensor
) -> None:
    """Outputs and states through kda_passes_cuda."""
    start = hi = lo = inside[-1]  # not read unless a sequence was cut
    if plan.order.numel():
        start, hi, lo = _segment_matrices(plan, heads, out)
    w, ut, qg, kg, a, gamma = inside
    tensors = kda_passes_cuda.Tensors(
        w, ut, qg, kg, a, gamma, plan.chunks, plan.segments, plan.order, start, hi, lo, out, state, slots, init
    )
    options = tuning.passes()
    overlap = bool(options["overlap"]) and plan.order.numel() > 0  # an uncut output pass follows the chunk kernel
    if plan.order.numel():
        kda_passes_cuda.local(tensors, heads, **options["local"], overlap=overlap)
        if plan.scans.numel():
            kda_passes_cuda.scan(tensors, plan.scans, heads, **options["scan"], overlap=overlap)
    kda_passes_cuda.output(tensors, heads, **options["output"], overlap=overlap)


def _passes(
    inside: tuple[Tensor, ...], state: Tensor, slots: Tensor, init: Tensor, plan: PrefillPlan, heads: int, out: Tensor
) -> None:
    """Outputs and states through the Triton kernels of kda_segment."""
    w, ut, qg, kg, a, gamma = inside
    dim = out.shape[2]
    start = gamma  # not read unless a sequence was cut
    if plan.order.numel():
        start = _cross_segments(w, ut, kg, gamma, state, slots, init, plan, heads, out)
    options = tuning.launch("output", _shared(out.device))
    options["BR"] = min(options["BR"], dim)
    _output(
        (dim // options["BR"], heads, plan.num_segments),
        w, ut, qg, kg, a, gamma, plan.chunks, plan.segments, start, out,
        state, slots, init,
        checks.row_stride(out), state.stride(0), slots.stride(0), heads,
        D=dim, UPCAST=checks.interpreted(), **options,
    )  # fmt: skip


def _inside_chunks(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, plan: PrefillPlan, outputs: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Fills (w, ut, qg, kg, a, gamma) of every chunk through the Triton kernels of kda_chunk."""
    heads, dim = q.shape[1:]
    bound, split = float(lower_bound or 0.0), fits_split(lower_bound)
    w, ut, qg, kg, a, gamma = outputs
    places = plan.num_chunks * heads
    scale = torch.empty(places, 2 * CHUNK, dtype=torch.float32, device=q.device)
    g, middle = gamma, gamma  # not read unless the gate is bounded
    if split:
        g = torch.empty(places, CHUNK * dim, dtype=torch.float32, device=q.device)
        middle = torch.empty(places, 2 * dim, dtype=torch.float32, device=q.device)
    _prepare(
        (heads, 2 * plan.num_chunks),
        q, k, z, a_log, dt_bias, bound, plan.chunks, scale, g, middle,
        *(checks.row_stride(x) for x in (q, k, z)), heads,
        BOUNDED=lower_bound is not None, SPLIT=split, D=dim, **tuning.launch("prepare"),
    )  # fmt: skip
    options = tuning.launch("chunk")
    options["PART"] = min(options["PART"], dim)
    _chunk(
        (heads, plan.num_chunks),
        q, k, v, z, scale, g, middle, beta, a_log, dt_bias, bound,
        plan.chunks, w, ut, qg, kg, a, gamma,
        *(checks.row_stride(x) for x in (q, k, v, z, beta)), heads,
        BOUNDED=lower_bound is not None, SPLIT=split, D=dim, UPCAST=checks.interpreted(), **options,
    )  # fmt: skip


def _segment_matrices(plan: PrefillPlan, heads: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty [segments, N, V, K]: start fp32, transitions in two bfloat16 terms."""
    size = (plan.num_segments, heads, like.shape[2], like.shape[2])
    start = torch.empty(size, dtype=torch.float32, device=like.device)
    hi, lo = (torch.empty(size, dtype=torch.bfloat16, device=like.device) for _ in range(2))
    return start, hi, lo


def _cross_segments(
    w: Tensor, ut: Tensor, kg: Tensor, gamma: Tensor, recurrent_state: Tensor, slots: Tensor, init: Tensor,
    plan: PrefillPlan, heads: int, out: Tensor,
) -> Tensor:  # fmt: skip
    """Start states of all segments of cut sequences, fp32 [segments, N, V, K]."""
    dim = out.shape[2]
    start, hi, lo = _segment_matrices(plan, heads, out)
    options = tuning.launch("local", _shared(w.device))
    options["BR"] = min(options["BR"], dim)
    _local(
        (2 * dim // options["BR"], heads, plan.order.numel()),
        w, ut, kg, gamma, plan.segments, plan.order, start, hi, lo,
        recurrent_state, slots, init, recurrent_state.stride(0), slots.stride(0), heads,
        D=dim, UPCAST=checks.interpreted(), **options,
    )  # fmt: skip
    if plan.scans.numel():
        options = tuning.launch("scan", _shared(w.device))
        _scan(
            (dim // options["BR"], heads, plan.scans.shape[0]),
            start, hi, lo, plan.scans, heads, D=dim, UPCAST=checks.interpreted(), **options,
        )  # fmt: skip
    return start


def short_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor,
    *,
    out: Tensor | None = None,
    plan: PrefillPlan | None = None,
    parts: int = 1,
) -> Tensor:
    """Operator short_conv of the table; plan as in kda_prefill (the same one serves both).

    parts: 3 writes q, k and v as three dense tensors, out [3, T, C / 3]: what vLLM's FlashKDA operator reads without
    copies. 1, the table's form, writes [T, C].
    """
    op = "short_conv"
    tokens, channels = x.shape
    if channels % parts:
        raise ValueError(f"{op}: {channels} channels are not {parts} equal parts")
    checks.check_rows(op, "x", x, (tokens, channels), _FLOATS)
    checks.check_vector(op, "weight", weight, (channels, checks.TAPS), torch.float32)
    checks.check_conv_state(op, conv_state, channels, checks.TAPS - 1, x.dtype)
    checks.check_index(op, "slot_mapping", slot_mapping, (cu_seqlens.shape[0] - 1,))
    checks.check_vector(op, "has_initial_state", has_initial_state, tuple(slot_mapping.shape), torch.bool)
    width = channels // parts
    if out is None:
        out = torch.empty((parts, tokens, width) if parts > 1 else (tokens, width), dtype=x.dtype, device=x.device)
    if parts > 1:
        checks.check_vector(op, "out", out, (parts, tokens, width), x.dtype)
        out_stride, part_stride = width, tokens * width
    else:
        checks.check_rows(op, "out", out, (tokens, channels), (x.dtype,))
        out_stride = part_stride = checks.row_stride(out)
    if plan is None:
        plan = plan_prefill(cu_seqlens, 1, x.device)
    check_plan(op, plan, slot_mapping.shape[0], tokens)
    if plan.end < tokens:
        out[..., plan.end :, :].zero_()
    if plan.num_chunks == 0:
        return out
    options = tuning.launch("conv")
    _short_conv(
        (-(-channels // options["BC"]), plan.num_chunks, options["PARTS"]),
        x, weight, conv_state, out, plan.chunks, cu_seqlens, slot_mapping, has_initial_state,
        checks.row_stride(x), out_stride, weight.stride(0), *conv_state.stride(), slot_mapping.stride(0),
        channels, width, part_stride, **options,
    )  # fmt: skip
    return out


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Operator gated_norm of the table."""
    op = "gated_norm"
    tokens, heads, dim = o.shape
    if dim not in checks.HEAD_DIMS:
        raise UnsupportedError(f"{op}: head dimension must be one of {checks.HEAD_DIMS}, got {dim}")
    checks.check_rows(op, "o", o, (tokens, heads, dim), _FLOATS)
    checks.check_rows(op, "gate", gate, (tokens, heads, dim), _FLOATS)
    checks.check_vector(op, "weight", weight, (dim,), None)
    if out is None:
        out = torch.empty(tokens, heads, dim, dtype=o.dtype, device=o.device)
    checks.check_rows(op, "out", out, (tokens, heads, dim), _FLOATS)
    if tokens * heads == 0:
        return out
    options = tuning.launch("norm")
    _gated_norm(
        (-(-tokens * heads // options["ROWS"]),),
        o, gate, weight, out, checks.row_stride(o), checks.row_stride(gate), checks.row_stride(out), eps, tokens, heads,
        D=dim, **options, **launch_options(pdl(o)),
    )  # fmt: skip
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """Batches that together reach every variant: an uncut sequence, one cut into several segments, a ragged one.

    lengths: tokens of each sequence; segment_chunks: the argument of plan_prefill. Sizes add no variant.
    """
    return [
        {"lengths": (1, 65), "segment_chunks": 0},
        {"lengths": (5 * CHUNK,), "segment_chunks": 1},
    ]
