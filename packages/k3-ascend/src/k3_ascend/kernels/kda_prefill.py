"""kda_prefill: eight launches, from the cumulative gate over the stages of a chunk to the pass over chunks.

Workspace: per chunk and head, at D = 128, 32 KiB of cumulative gates, 128 KiB of operands and 40 KiB of pair matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_ascend.kernels import checks, warmup
from k3_ascend.kernels.kda_chunk import (
    corrected_kernel,
    far_kernel,
    inverse_kernel,
    near_kernel,
    operands_kernel,
    states_kernel,
)
from k3_ascend.kernels.kda_gate import kda_cumulative_gate
from k3_ascend.kernels.kda_plan import CHUNK, PrefillPlan, check_plan, plan_prefill
from k3_ascend.kernels.launch import launch, programs_for
from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec

#: Rows of a tile inside a chunk for elementwise operands.
OPERAND_ROWS = 16
#: Rows of the blocks of pairs on the diagonal; rows of those below it and channels a product.
NEAR = 16
FAR = ((32, 64), (16, 128))
#: Value columns a program of the pass over chunks.
BLOCK = 32


def supports(spec: CallSpec) -> tuple[bool, str]:
    """bfloat16 activations (the matrix unit's operands), any head count and gate form."""
    return checks.supports_heads(spec, checks.BF16)


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
    """Operator ``kda_prefill`` of the table; see there for shapes and rules.

    plan: `plan_prefill` of the same boundaries; without one it is built here, which reads a device cu_seqlens back.
    Raises ValueError for shapes and UnsupportedError for dtypes or strides it has no code for.
    """
    out = _check(q, k, v, z, beta, a_log, dt_bias, lower_bound, recurrent_state, slot_mapping, has_initial_state, out)
    tokens, heads, dim = q.shape
    if plan is None:
        plan = plan_prefill(cu_seqlens, q.device)
    check_plan("kda_prefill", plan, slot_mapping.shape[0], tokens)
    out.zero_()  # rows of no sequence, and of sequences without a slot
    if plan.num_chunks == 0 or heads == 0:
        return out
    g = kda_cumulative_gate(z, a_log, dt_bias, lower_bound, plan)
    norm, qg, kend, kg, gamma = _operands(q, k, g, plan)
    x, a = _pairs(q, k, g, beta, norm, plan)
    u = torch.empty(kg.shape, dtype=torch.float32, device=q.device)
    w = torch.empty(kg.shape, dtype=torch.bfloat16, device=q.device)
    places = plan.num_chunks * heads
    launch(
        corrected_kernel, programs_for(places, q.device),
        x, kg, v, plan.chunks, u, w, checks.row_stride(v), plan.num_chunks, N=heads, D=dim, C=CHUNK,
    )  # fmt: skip
    block = min(BLOCK, dim)
    launch(
        states_kernel, programs_for(plan.num_seqs * heads * (dim // block), q.device),
        u, w, qg, kend, a, gamma, plan.chunks, plan.sequences, recurrent_state, slot_mapping,
        has_initial_state.view(torch.uint8), out, checks.row_stride(out), recurrent_state.stride(0),
        slot_mapping.stride(0), plan.num_seqs, N=heads, D=dim, C=CHUNK, BV=block,
    )  # fmt: skip
    return out


def _operands(q: Tensor, k: Tensor, g: Tensor, plan: PrefillPlan) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(norms [places, 2, C], Q exp G, K exp(G_C - G), K exp G [places, C, D], gamma [places, D])."""
    _, heads, dim = q.shape
    places = plan.num_chunks * heads
    norm = torch.empty(places, 2, CHUNK, dtype=torch.float32, device=q.device)
    qg = torch.empty(places, CHUNK, dim, dtype=torch.bfloat16, device=q.device)
    kend = torch.empty(places, CHUNK, dim, dtype=torch.bfloat16, device=q.device)
    kg = torch.empty(places, CHUNK, dim, dtype=torch.float32, device=q.device)
    gamma = torch.empty(places, dim, dtype=torch.float32, device=q.device)
    launch(
        operands_kernel, programs_for(places * (CHUNK // OPERAND_ROWS), q.device),
        q, k, g, plan.chunks, norm, qg, kend, kg, gamma, checks.row_stride(q), checks.row_stride(k), plan.num_chunks,
        N=heads, D=dim, C=CHUNK, ROWS=OPERAND_ROWS,
    )  # fmt: skip
    return norm, qg, kend, kg, gamma


def _pairs(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, norm: Tensor, plan: PrefillPlan) -> tuple[Tensor, Tensor]:
    """(((I + M)^-1 diag(beta))^T fp32, A bf16), both [places, C, C]."""
    _, heads, dim = q.shape
    places = plan.num_chunks * heads
    m = torch.zeros(places, CHUNK, CHUNK, dtype=torch.float32, device=q.device)
    a = torch.zeros(places, CHUNK, CHUNK, dtype=torch.bfloat16, device=q.device)
    strides = [checks.row_stride(x) for x in (q, k, beta)]
    shape = {"N": heads, "D": dim, "C": CHUNK}
    args = (q, k, g, beta, plan.chunks, norm, m, a, *strides, plan.num_chunks)
    launch(near_kernel, programs_for(places * (CHUNK // NEAR), q.device), *args, **shape, SIZE=NEAR)
    for size, part in FAR:
        programs = programs_for(places * (CHUNK // (2 * size)), q.device)
        launch(far_kernel, programs, *args, **shape, SIZE=size, PART=min(part, dim))
    x = torch.empty_like(m)
    programs = programs_for(places, q.device)
    launch(inverse_kernel, programs, m, beta, plan.chunks, x, strides[2], plan.num_chunks, N=heads, C=CHUNK)
    return x, a


def _check(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, state: Tensor, slots: Tensor, init: Tensor, out: Tensor | None,
) -> Tensor:  # fmt: skip
    op = "kda_prefill"
    if q.dim() != 3:
        raise ValueError(f"{op}: q must be [T, N, D], got {tuple(q.shape)}")
    tokens, heads, dim = q.shape
    checks.check_head_dim(op, dim)
    if lower_bound is not None and lower_bound > 0:
        raise UnsupportedError(f"{op}: lower_bound must be negative or None, got {lower_bound}")
    for name, x in (("q", q), ("k", k), ("v", v), ("z", z)):
        checks.check_rows(op, name, x, (tokens, heads, dim), checks.BF16)
    checks.check_rows(op, "beta", beta, (tokens, heads), checks.F32)
    checks.check_vector(op, "a_log", a_log, (heads,), torch.float32)
    checks.check_vector(op, "dt_bias", dt_bias, (heads, dim), torch.float32)
    checks.check_state(op, state, heads, dim)
    checks.check_index(op, "slot_mapping", slots, (slots.shape[0],))
    checks.check_vector(op, "has_initial_state", init, tuple(slots.shape), torch.bool)
    return checks.result(op, out, (tokens, heads, dim), q)


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """A batch of two sequences, for both types of indices. Lengths are no variant."""
    shape = warmup.gate(config, limits)
    return [{"operator": "kda_prefill", "index": i, **shape} for i in (torch.int32, torch.int64)]
