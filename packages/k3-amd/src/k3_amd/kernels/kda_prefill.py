"""kda_prefill, short_conv and gated_norm: launchers with the signatures of the operator table.

Prefill is two to four launches: chunks (device/kda_chunk.py), then, where the cost model cuts sequences into segments
because there are fewer heads than compute units, local and scan passes, then outputs (device/kda_segment.py). The
workspace holds 76 KiB a chunk and head plus 128 KiB a segment and head at D = 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3_amd import tuning
from k3_amd.kernels import launch
from k3_amd.kernels.device.kda_chunk import LOG2E, MAX_HALF_RANGE, kda_chunk_kernel
from k3_amd.kernels.device.kda_conv import gated_norm_kernel, short_conv_kernel
from k3_amd.kernels.device.kda_segment import kda_local_kernel, kda_output_kernel, kda_scan_kernel
from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec, kda_plan
from k3_core.operators import kda_args as checks
from k3_core.operators.kda_plan import CHUNK, PrefillPlan, check_plan

__all__ = ["PrefillPlan", "gated_norm", "kda_prefill", "plan_prefill", "short_conv", "supports", "warmup_profiles"]

_chunk = launch.Launcher(kda_chunk_kernel)
_local = launch.Launcher(kda_local_kernel)
_scan = launch.Launcher(kda_scan_kernel)
_output = launch.Launcher(kda_output_kernel)
_short_conv = launch.Launcher(short_conv_kernel)
_gated_norm = launch.Launcher(gated_norm_kernel)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """Any head count and gate form; kda_prefill takes bfloat16 (its products have bfloat16 operands), the other two
    float32 as well."""
    ok, why = launch.supports_device(spec)
    if not ok:
        return ok, why
    bound = spec.options.get("lower_bound")
    if spec.operator == "kda_prefill" and bound is not None and bound > 0:
        return False, f"kda_prefill: lower_bound must be negative or None, not {bound}"
    return checks.supports_sizes(spec, checks.BF16 if spec.operator == "kda_prefill" else checks.FLOATS)


def plan_prefill(
    cu_seqlens: Tensor | Sequence[int],
    heads: int,
    device: torch.device | str,
    *,
    dim: int = 128,
    segment_chunks: int | None = None,
) -> PrefillPlan:
    """Tables of one packed batch for kda_prefill and short_conv, built once a step for all layers.

    A CPU tensor or a list costs one asynchronous copy; a device tensor is read back first, which waits for the device.
    segment_chunks: chunks a segment (0: uncut); None asks the cost model. Raises ValueError for boundaries that do not
    start at 0 or decrease.
    """
    where = torch.device(device)

    def cost_model(chunks: list[int]) -> int:
        arch = launch.architecture(where)
        units = launch.compute_units(where) if where.type == "cuda" else tuning.COMPUTE_UNITS[arch]
        return segment_length(chunks, heads, dim, arch, units)

    return kda_plan.plan_prefill(cu_seqlens, device, cost_model if segment_chunks is None else segment_chunks)


def segment_length(chunks: Sequence[int], heads: int, dim: int, arch: str, units: int) -> int:
    """The shared cost model with this architecture's figures (assumed, not measured)."""
    table = tuning.table(arch)
    figures = table["segments"]
    costs = kda_plan.Costs(
        units=units,
        **figures["cost_us"],
        rows_local=2 * max(dim // table["local"]["BR"], 1),
        rows_output=max(dim // table["output"]["BR"], 1),
        concurrent_local=figures["concurrent"]["local"],
        concurrent_output=figures["concurrent"]["output"],
    )
    return kda_plan.segment_length(chunks, heads, costs)


def fits_split(lower_bound: float | None) -> bool:
    """Whether half of 32 decays at the bound stays inside the exponent range: the one-product form of the chunk."""
    return lower_bound is not None and 0 >= lower_bound * 16 * LOG2E >= -MAX_HALF_RANGE


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
    Raises ValueError for shapes and UnsupportedError for dtypes, strides or gates it has no code for.
    """
    out = checks.check_prefill(q, k, v, z, beta, a_log, dt_bias, recurrent_state, slot_mapping, has_initial_state, out)
    if lower_bound is not None and lower_bound > 0:
        raise UnsupportedError(f"kda_prefill: lower_bound must be negative or None, got {lower_bound}")
    tokens, heads, dim = q.shape
    if plan is None:
        plan = plan_prefill(cu_seqlens, heads, q.device, dim=dim)
    check_plan("kda_prefill", plan, slot_mapping.shape[0], tokens)
    if plan.end < tokens:
        out[plan.end :].zero_()
    if plan.num_chunks == 0 or heads == 0:
        return out
    places = plan.num_chunks * heads
    # Each [chunks, heads, 64, D] (U transposed: [.., D, 64]); four storages, as beyond 2 GiB AMD's compiler gives up
    # buffer instructions.
    w, ut, qg, kg = (torch.empty(places, CHUNK * dim, dtype=torch.bfloat16, device=q.device) for _ in range(4))
    a = torch.empty(places, CHUNK * CHUNK, dtype=torch.bfloat16, device=q.device)
    gamma = torch.empty(places, dim, dtype=torch.float32, device=q.device)
    upcast = launch.interpreting()
    split = fits_split(lower_bound)
    options = launch.options("chunk" if split else "chunk_softplus", q.device)
    options["PART"] = min(options["PART"], dim)
    _chunk(
        (heads, plan.num_chunks),
        q, k, v, z, beta, a_log, dt_bias, float(lower_bound or 0.0), plan.chunks, w, ut, qg, kg, a, gamma,
        *(checks.row_stride(x) for x in (q, k, v, z, beta)), heads,
        BOUNDED=lower_bound is not None, SPLIT=split, D=dim, UPCAST=upcast, **options,
    )  # fmt: skip
    start = gamma  # not read unless a sequence was cut
    if plan.order.numel():
        start = _cross_segments(w, ut, kg, gamma, recurrent_state, slot_mapping, has_initial_state, plan, heads, dim)
    options = _rows_that_fit("output", q.device, dim)
    _output(
        (dim // options["BR"], heads, plan.num_segments),
        w, ut, qg, kg, a, gamma, plan.chunks, plan.segments, start, out,
        recurrent_state, slot_mapping, has_initial_state,
        checks.row_stride(out), recurrent_state.stride(0), slot_mapping.stride(0), heads,
        D=dim, UPCAST=upcast, **options,
    )  # fmt: skip
    return out


def _rows_that_fit(kernel: str, device: torch.device, dim: int) -> dict[str, Any]:
    """Options of a pass over chunks with its rows cut to the head dimension (small ones are test checkpoints)."""
    options = launch.options(kernel, device)
    options["BR"] = min(options["BR"], dim)
    return options


def _cross_segments(
    w: Tensor, ut: Tensor, kg: Tensor, gamma: Tensor, recurrent_state: Tensor, slots: Tensor, init: Tensor,
    plan: PrefillPlan, heads: int, dim: int,
) -> Tensor:  # fmt: skip
    """States at the start of every segment, fp32 [segments, heads, D, D]."""
    upcast = launch.interpreting()
    size = (plan.num_segments, heads, dim * dim)
    start = torch.empty(size, dtype=torch.float32, device=w.device)
    hi = torch.empty(size, dtype=torch.bfloat16, device=w.device)
    lo = torch.empty(size, dtype=torch.bfloat16, device=w.device)
    options = _rows_that_fit("local", w.device, dim)
    _local(
        (2 * dim // options["BR"], heads, plan.order.numel()),
        w, ut, kg, gamma, plan.segments, plan.order, start, hi, lo,
        recurrent_state, slots, init, recurrent_state.stride(0), slots.stride(0), heads,
        D=dim, UPCAST=upcast, **options,
    )  # fmt: skip
    if plan.scans.numel():
        options = _rows_that_fit("scan", w.device, dim)
        grid = (dim // options["BR"], heads, plan.scans.shape[0])
        _scan(grid, start, hi, lo, plan.scans, heads, D=dim, UPCAST=upcast, **options)
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
) -> Tensor:
    """Operator short_conv of the table; plan as in kda_prefill (the same one serves both)."""
    op = "short_conv"
    tokens, channels = x.shape
    checks.check_rows(op, "x", x, (tokens, channels), checks.FLOATS)
    checks.check_vector(op, "weight", weight, (channels, checks.TAPS), torch.float32)
    checks.check_conv_state(op, conv_state, channels, checks.TAPS - 1, x.dtype)
    checks.check_index(op, "slot_mapping", slot_mapping, (cu_seqlens.shape[0] - 1,))
    checks.check_vector(op, "has_initial_state", has_initial_state, tuple(slot_mapping.shape), torch.bool)
    if out is None:
        out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    checks.check_rows(op, "out", out, (tokens, channels), (x.dtype,))
    if plan is None:
        plan = kda_plan.plan_prefill(cu_seqlens, x.device, 0)
    check_plan(op, plan, slot_mapping.shape[0], tokens)
    if plan.end < tokens:
        out[plan.end :].zero_()
    if plan.num_chunks == 0:
        return out
    options = launch.options("conv", x.device)
    _short_conv(
        (-(-channels // options["BC"]), plan.num_chunks),
        x, weight, conv_state, out, plan.chunks, cu_seqlens, slot_mapping, has_initial_state,
        checks.row_stride(x), checks.row_stride(out), *conv_state.stride(), slot_mapping.stride(0), channels, **options,
    )  # fmt: skip
    return out


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Operator gated_norm of the table."""
    op = "gated_norm"
    tokens, heads, dim = o.shape
    if dim not in checks.HEAD_DIMS:
        raise UnsupportedError(f"{op}: head dimension must be one of {checks.HEAD_DIMS}, got {dim}")
    checks.check_rows(op, "o", o, (tokens, heads, dim), checks.FLOATS)
    checks.check_rows(op, "gate", gate, (tokens, heads, dim), checks.FLOATS)
    checks.check_vector(op, "weight", weight, (dim,), None)
    if out is None:
        out = torch.empty(tokens, heads, dim, dtype=o.dtype, device=o.device)
    checks.check_rows(op, "out", out, (tokens, heads, dim), checks.FLOATS)
    if tokens * heads == 0:
        return out
    options = launch.options("norm", o.device)
    _gated_norm(
        (-(-tokens * heads // options["ROWS"]),),
        o, gate, weight, out, checks.row_stride(o), checks.row_stride(gate), checks.row_stride(out), eps, tokens, heads,
        D=dim, **options,
    )  # fmt: skip
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """Batches that together reach every variant: an uncut sequence and one cut into several segments.

    lengths: tokens of each sequence; segment_chunks: the argument of plan_prefill. Sizes add no variant.
    """
    return [
        {"lengths": (1, 65), "segment_chunks": 0},
        {"lengths": (5 * CHUNK,), "segment_chunks": 1},
    ]
