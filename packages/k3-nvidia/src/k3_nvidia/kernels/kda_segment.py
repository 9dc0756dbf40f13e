"""KDA prefill, the passes over chunks: parallel along the sequence as well as over heads and value rows.

A sequence is cut into segments of several chunks. The state after a segment is affine in the state before it,
S_out = S_in P + B, because each row of S (V-major) moves by itself: s <- s (diag gamma - W^T Kg) + u Kg.

    local   every segment but a sequence's last: rows of B start from zero (from the true state in the first segment),
            rows of P from the identity; 256 rows a segment and head
    scan    S_{i+1} = S_i P_i + B_i over the few segments of a sequence, P in two bf16 terms, S in two bf16 terms
    output  every segment from its true start: U - W S^T, outputs, state

A sequence of one segment needs only the output pass. Rows are the M side of the matrix products and the state is their
A operand straight from registers: accumulators [rows, K] become bf16 operands without going through shared memory.

Sources: chunkwise delta rule as in kda_chunk; scanning affine maps over segments is the classical two-level scan.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

from k3_nvidia.kernels.triton_math import dot


@triton.jit
def _initial(state_ptr, init_ptr, slot, seq, state_stride, head, rows, cols, D: tl.constexpr):
    """The sequence's state rows, or zeros for a new sequence and for the null slot, whatever memory holds."""
    use = (slot > 0) & (tl.load(init_ptr + seq).to(tl.int32) != 0)
    at = state_ptr + slot.to(tl.int64) * state_stride + head * (D * D) + rows[:, None] * D + cols[None, :]
    return tl.load(at, mask=rows[:, None] < tl.where(use, D, 0), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_heads", "slot_stride"], do_not_specialize_on_alignment=["slot_ptr", "init_ptr"])
def kda_local_kernel(
    w_ptr, ut_ptr, kg_ptr, gamma_ptr, segment_ptr, order_ptr, start_ptr, hi_ptr, lo_ptr,
    state_ptr, slot_ptr, init_ptr, state_stride, slot_stride, num_heads,
    BR: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (2 D / BR row blocks, heads, segments that have a successor).

    segment_ptr int32 [segments, 4]: first chunk, chunks, sequence, flags (1 first, 2 last, 4 one of several).
    start_ptr fp32 [segments, N, V, K]: entry of a first segment gets the initial state, entry i + 1 gets B_i.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    segment = tl.load(order_ptr + tl.program_id(2))
    chunk0 = tl.load(segment_ptr + segment * 4)
    chunks = tl.load(segment_ptr + segment * 4 + 1)
    seq = tl.load(segment_ptr + segment * 4 + 2)
    flags = tl.load(segment_ptr + segment * 4 + 3)
    values = block < D // BR
    is_first = (flags & 1) != 0
    if values | (is_first == 0):
        rows = (block % (D // BR)) * BR + tl.arange(0, BR)
        cols = tl.arange(0, D)
        tile = rows[:, None] * D + cols[None, :]
        entry = (segment.to(tl.int64) * num_heads + head) * (D * D)
        slot = tl.load(slot_ptr + seq.to(tl.int64) * slot_stride)
        S = tl.where(rows[:, None] == cols[None, :] + tl.where(values, D, 0), 1.0, 0.0)
        if values & is_first:
            S = _initial(state_ptr, init_ptr, slot, seq, state_stride, head, rows, cols, D)
            tl.store(start_ptr + entry + tile, S)
        c = tl.arange(0, 64)
        place = (chunk0.to(tl.int64) * num_heads + head) * (64 * D)
        step = num_heads.to(tl.int64) * (64 * D)
        w_at = w_ptr + place + c[None, :] * D + cols[:, None]
        kg_at = kg_ptr + place + c[:, None] * D + cols[None, :]
        ut_at = ut_ptr + place + rows[:, None] * 64 + c[None, :]
        g_at = gamma_ptr + (chunk0.to(tl.int64) * num_heads + head) * D + cols
        g_step = num_heads.to(tl.int64) * D
        some = rows[:, None] < tl.where(values, D, 0)
        for _ in tl.range(0, chunks, num_stages=STAGES):
            u = tl.load(ut_at, mask=some, other=0.0)
            w = tl.load(w_at)
            kg = tl.load(kg_at)
            gamma = tl.load(g_at)
            fresh = dot(S.to(tl.bfloat16), w, u.to(tl.float32), UPCAST)
            S = dot(fresh.to(tl.bfloat16), kg, S * gamma[None, :], UPCAST)
            w_at += step
            kg_at += step
            ut_at += step
            g_at += g_step
        if values:
            tl.store(start_ptr + entry + num_heads.to(tl.int64) * (D * D) + tile, S)
        else:
            hi = S.to(tl.bfloat16)
            tl.store(hi_ptr + entry + tile, hi)
            tl.store(lo_ptr + entry + tile, (S - hi.to(tl.float32)).to(tl.bfloat16))


@triton.jit(do_not_specialize=["num_heads"])
def kda_scan_kernel(
    start_ptr, hi_ptr, lo_ptr, scan_ptr, num_heads,
    BR: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (D / BR, heads, cut sequences); scan_ptr int32 [sequences, 2]: first segment, segments. Start in place."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    head = tl.program_id(1)
    first = tl.load(scan_ptr + tl.program_id(2) * 2)
    segments = tl.load(scan_ptr + tl.program_id(2) * 2 + 1)
    cols = tl.arange(0, D)
    step = num_heads.to(tl.int64) * (D * D)
    entry = (first.to(tl.int64) + 1) * step + head * (D * D)
    tile = rows[:, None] * D + cols[None, :]
    whole = cols[:, None] * D + cols[None, :]
    S = tl.load(start_ptr + entry + tile)
    for _ in tl.range(2, segments, num_stages=STAGES):
        hi = tl.load(hi_ptr + entry + whole)
        lo = tl.load(lo_ptr + entry + whole)
        entry += step
        B = tl.load(start_ptr + entry + tile)
        s_hi = S.to(tl.bfloat16)
        s_lo = (S - s_hi.to(tl.float32)).to(tl.bfloat16)
        S = dot(s_hi, lo, B, UPCAST)
        S = dot(s_lo, hi, S, UPCAST)
        S = dot(s_hi, hi, S, UPCAST)
        tl.store(start_ptr + entry + tile, S)


@triton.jit(do_not_specialize=["num_heads", "slot_stride"], do_not_specialize_on_alignment=["slot_ptr", "init_ptr"])
def kda_output_kernel(
    w_ptr, ut_ptr, qg_ptr, kg_ptr, a_ptr, gamma_ptr, chunk_ptr, segment_ptr, start_ptr, out_ptr,
    state_ptr, slot_ptr, init_ptr, out_stride, state_stride, slot_stride, num_heads,
    BR: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (D / BR, heads, segments): out [T, N, D] and, from the last segment of a sequence, its state."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    head = tl.program_id(1)
    segment = tl.program_id(2)
    chunk0 = tl.load(segment_ptr + segment * 4)
    chunks = tl.load(segment_ptr + segment * 4 + 1)
    seq = tl.load(segment_ptr + segment * 4 + 2)
    flags = tl.load(segment_ptr + segment * 4 + 3)
    slot = tl.load(slot_ptr + seq.to(tl.int64) * slot_stride)
    cols = tl.arange(0, D)
    tile = rows[:, None] * D + cols[None, :]
    if (flags & 4) != 0:
        S = tl.load(start_ptr + (segment.to(tl.int64) * num_heads + head) * (D * D) + tile)
    else:
        S = _initial(state_ptr, init_ptr, slot, seq, state_stride, head, rows, cols, D)
    c = tl.arange(0, 64)
    place = chunk0.to(tl.int64) * num_heads + head
    step = num_heads.to(tl.int64)
    down = c[None, :] * D + cols[:, None]
    w_at = w_ptr + place * (64 * D) + down
    qg_at = qg_ptr + place * (64 * D) + down
    kg_at = kg_ptr + place * (64 * D) + c[:, None] * D + cols[None, :]
    ut_at = ut_ptr + place * (64 * D) + rows[:, None] * 64 + c[None, :]
    a_at = a_ptr + place * 4096 + c[None, :] * 64 + c[:, None]
    g_at = gamma_ptr + place * D + cols
    for n in tl.range(0, chunks, num_stages=STAGES):
        u = tl.load(ut_at)
        w = tl.load(w_at)
        qg = tl.load(qg_at)
        kg = tl.load(kg_at)
        a = tl.load(a_at)
        gamma = tl.load(g_at)
        token = tl.load(chunk_ptr + (chunk0 + n) * 4)
        valid = tl.load(chunk_ptr + (chunk0 + n) * 4 + 1)
        s = S.to(tl.bfloat16)
        fresh = dot(s, w, u.to(tl.float32), UPCAST).to(tl.bfloat16)
        o = dot(s, qg, tl.zeros([BR, 64], dtype=tl.float32), UPCAST)
        S = dot(fresh, kg, S * gamma[None, :], UPCAST)
        o = dot(fresh, a, o, UPCAST)
        o = tl.where(slot > 0, o, 0.0)
        o_at = out_ptr + (token + c).to(tl.int64)[None, :] * out_stride + head * D + rows[:, None]
        tl.store(o_at, o.to(out_ptr.dtype.element_ty), mask=(c < valid)[None, :])
        w_at += step * (64 * D)
        qg_at += step * (64 * D)
        kg_at += step * (64 * D)
        ut_at += step * (64 * D)
        a_at += step * 4096
        g_at += step * D
    if ((flags & 2) != 0) & (slot > 0):
        at = state_ptr + slot.to(tl.int64) * state_stride + head * (D * D) + tile
        tl.store(at, S.to(state_ptr.dtype.element_ty))
