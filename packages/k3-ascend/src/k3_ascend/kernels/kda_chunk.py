"""KDA prefill, everything inside a chunk of 64 tokens, all chunks and heads in parallel; then the pass over chunks.

Notation of `k3_core.contracts.kda`; G is the cumulative gate that `kda_gate` wrote, C = 64.

    operands   (vector)         reciprocal norms; Q exp G and K exp(G_C - G) in bf16, K exp G in fp32; gamma = exp(G_C)
    near, far  (vector, cube)   M = beta_i k_i k_j exp(G_i - G_j) below the diagonal, A = q_i k_j exp(G_i - G_j) on and
                                below it
    inverse    (vector)         T = (I + M)^-1 diag(beta), row by row
    corrected  (cube)           U = T V, W = T (K exp G)

Any gate is safe: only exponentials of differences <= 0 are formed. The chunk is cut by halving: a block of 32 x 32 and
two of 16 x 16 below the diagonal are products whose two factors meet at the last row of the left tile; the four blocks
of 16 x 16 on the diagonal go one column at a time, with the difference itself in the exponent. T and its operands stay
in fp32, because rows of T cancel when keys repeat.

Sources: the WY form of Yang et al. (DeltaNet); forward substitution row by row is textbook; references at tile
boundaries are flash-linear-attention's idea for gated linear attention.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["chunks"])
def operands_kernel(
    q_ptr, k_ptr, g_ptr, chunk_ptr, norm_ptr, qg_ptr, kend_ptr, kg_ptr, gamma_ptr,
    q_stride, k_stride, chunks, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Items (chunk, head, tile of ROWS rows). norm_ptr fp32 [chunks, N, 2, C]: q with D^-0.5, k."""
    TILES: tl.constexpr = C // ROWS
    d = tl.arange(0, D)
    i = tl.arange(0, ROWS)
    for item in range(tl.program_id(0), chunks * N * TILES, tl.num_programs(0)):
        part = (item % TILES) * ROWS
        head = (item // TILES) % N
        chunk = item // (TILES * N)
        token = tl.load(chunk_ptr + chunk * 4)
        rows = tl.load(chunk_ptr + chunk * 4 + 1)
        first = (token + part).to(tl.int64)
        mask = (i < rows - part)[:, None]
        place = chunk.to(tl.int64) * N + head
        at = i[:, None] * D + d[None, :]
        q = tl.load(q_ptr + first * q_stride + head * D + i[:, None] * q_stride + d[None, :], mask=mask, other=0.0)
        k = tl.load(k_ptr + first * k_stride + head * D + i[:, None] * k_stride + d[None, :], mask=mask, other=0.0)
        g_at = g_ptr + first * (N * D) + head * D + i[:, None] * (N * D) + d[None, :]
        G = tl.load(g_at, mask=mask, other=0.0)
        last = tl.load(g_ptr + (token + rows - 1).to(tl.int64) * (N * D) + head * D + d)
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        q_norm = D**-0.5 / tl.sqrt(tl.sum(q * q, axis=1) + 1e-6)
        k_norm = 1.0 / tl.sqrt(tl.sum(k * k, axis=1) + 1e-6)
        tl.store(norm_ptr + place * (2 * C) + part + i, q_norm)
        tl.store(norm_ptr + place * (2 * C) + C + part + i, k_norm)
        q = q * q_norm[:, None]
        k = k * k_norm[:, None]
        grown = tl.exp(G)
        tile = place * (C * D) + part * D
        tl.store(qg_ptr + tile + at, (q * grown).to(tl.bfloat16))
        tl.store(kg_ptr + tile + at, k * grown)
        tl.store(kend_ptr + tile + at, (k * tl.exp(tl.minimum(last[None, :] - G, 0.0))).to(tl.bfloat16))
        if part == 0:
            tl.store(gamma_ptr + place * D + d, tl.exp(last))


@triton.jit
def _rows(ptr, stride, first, count, ROWS: tl.constexpr, D: tl.constexpr):
    """fp32 rows first .. first + ROWS of one head, zeros from row count on."""
    i = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    at = ptr + first.to(tl.int64) * stride + i[:, None] * stride + d[None, :]
    return tl.load(at, mask=(i < count)[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["chunks"])
def far_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, chunk_ptr, norm_ptr, m_ptr, a_ptr,
    q_stride, k_stride, beta_stride, chunks, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Items (chunk, head, pair of neighbouring tiles of SIZE rows): the block of M and A where they meet.

    PART: channels a product, so that its operands fit beside each other.
    """
    PAIRS: tl.constexpr = C // (2 * SIZE)
    i = tl.arange(0, SIZE)
    d = tl.arange(0, PART)
    for item in range(tl.program_id(0), chunks * N * PAIRS, tl.num_programs(0)):
        left = (item % PAIRS) * (2 * SIZE)
        right = left + SIZE
        head = (item // PAIRS) % N
        chunk = item // (PAIRS * N)
        token = tl.load(chunk_ptr + chunk * 4)
        rows = tl.load(chunk_ptr + chunk * 4 + 1)
        place = chunk.to(tl.int64) * N + head
        # The last row of the left tile, where both factors meet; of a short chunk, its last row.
        meet = (token + tl.minimum(right, rows) - 1).to(tl.int64)
        M = tl.zeros([SIZE, SIZE], dtype=tl.float32)
        A = tl.zeros([SIZE, SIZE], dtype=tl.float32)
        for part in tl.static_range(0, D, PART):
            at = head * D + part
            middle = tl.load(g_ptr + meet * (N * D) + at + d)[None, :]
            keys = _rows(k_ptr + at, k_stride, token + left, rows - left, SIZE, PART)
            up = _rows(g_ptr + at, N * D, token + left, rows - left, SIZE, PART)
            keys = (keys * tl.exp(tl.minimum(middle - up, 0.0))).to(tl.bfloat16)
            down = _rows(g_ptr + at, N * D, token + right, rows - right, SIZE, PART)
            down = tl.exp(tl.minimum(down - middle, 0.0))
            k = _rows(k_ptr + at, k_stride, token + right, rows - right, SIZE, PART)
            q = _rows(q_ptr + at, q_stride, token + right, rows - right, SIZE, PART)
            M += tl.dot((k * down).to(tl.bfloat16), tl.trans(keys))
            A += tl.dot((q * down).to(tl.bfloat16), tl.trans(keys))
        norm_at = norm_ptr + place * (2 * C)
        columns = tl.load(norm_at + C + left + i)[None, :]
        q_norm = tl.load(norm_at + right + i)
        k_norm = tl.load(norm_at + C + right + i)
        beta_at = beta_ptr + (token + right).to(tl.int64) * beta_stride + head + i * beta_stride
        k_norm = k_norm * tl.load(beta_at, mask=i < rows - right, other=0.0)
        tile = place * (C * C) + right * C + left + i[:, None] * C + i[None, :]
        tl.store(m_ptr + tile, M * columns * k_norm[:, None])
        tl.store(a_ptr + tile, (A * columns * q_norm[:, None]).to(tl.bfloat16))


@triton.jit(do_not_specialize=["chunks"])
def near_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, chunk_ptr, norm_ptr, m_ptr, a_ptr,
    q_stride, k_stride, beta_stride, chunks, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Items (chunk, head, tile of SIZE rows): the blocks of M and A on the diagonal, one column at a time."""
    TILES: tl.constexpr = C // SIZE
    i = tl.arange(0, SIZE)
    d = tl.arange(0, D)
    for item in range(tl.program_id(0), chunks * N * TILES, tl.num_programs(0)):
        part = (item % TILES) * SIZE
        head = (item // TILES) % N
        chunk = item // (TILES * N)
        token = tl.load(chunk_ptr + chunk * 4)
        rows = tl.load(chunk_ptr + chunk * 4 + 1)
        place = chunk.to(tl.int64) * N + head
        q = _rows(q_ptr + head * D, q_stride, token + part, rows - part, SIZE, D)
        k = _rows(k_ptr + head * D, k_stride, token + part, rows - part, SIZE, D)
        G = _rows(g_ptr + head * D, N * D, token + part, rows - part, SIZE, D)
        M = tl.zeros([SIZE, SIZE], dtype=tl.float32)
        A = tl.zeros([SIZE, SIZE], dtype=tl.float32)
        for j in range(SIZE):
            row = (token + tl.minimum(part + j, rows - 1)).to(tl.int64)
            key = tl.load(k_ptr + row * k_stride + head * D + d).to(tl.float32)
            at = tl.load(g_ptr + row * (N * D) + head * D + d)
            key = key[None, :] * tl.exp(tl.minimum(G - at[None, :], 0.0))
            column = tl.where(i == j, 1.0, 0.0)[None, :]
            below = tl.where(i > j, 1.0, 0.0)
            M += (tl.sum(k * key, axis=1) * below)[:, None] * column
            A += (tl.sum(q * key, axis=1) * tl.where(i >= j, 1.0, 0.0))[:, None] * column
        norm_at = norm_ptr + place * (2 * C) + part
        columns = tl.load(norm_at + C + i)
        beta_at = beta_ptr + (token + part).to(tl.int64) * beta_stride + head + i * beta_stride
        k_norm = columns * tl.load(beta_at, mask=i < rows - part, other=0.0)
        q_norm = tl.load(norm_at + i)
        tile = place * (C * C) + part * C + part + i[:, None] * C + i[None, :]
        tl.store(m_ptr + tile, M * columns[None, :] * k_norm[:, None])
        tl.store(a_ptr + tile, (A * columns[None, :] * q_norm[:, None]).to(tl.bfloat16))


@triton.jit(do_not_specialize=["chunks"])
def inverse_kernel(m_ptr, beta_ptr, chunk_ptr, x_ptr, beta_stride, chunks, N: tl.constexpr, C: tl.constexpr):
    """Items (chunk, head): X = ((I + M)^-1 diag(beta))^T, fp32, by forward substitution.

    Column r of X is beta_r e_r - X m with m row r of M: a product summed over the last axis and a rank-one update, the
    shapes that the vector unit has instructions for (a row of weights down the first axis would be padded eightfold).
    """
    c = tl.arange(0, C)
    for item in range(tl.program_id(0), chunks * N, tl.num_programs(0)):
        head = item % N
        chunk = item // N
        token = tl.load(chunk_ptr + chunk * 4)
        rows = tl.load(chunk_ptr + chunk * 4 + 1)
        place = item.to(tl.int64) * (C * C)
        X = tl.zeros([C, C], dtype=tl.float32)
        for r in range(rows):
            m = tl.load(m_ptr + place + r * C + c)
            beta = tl.load(beta_ptr + (token + r).to(tl.int64) * beta_stride + head)
            unit = tl.where(c == r, 1.0, 0.0)
            column = unit * beta - tl.sum(X * m[None, :], axis=1)
            X += column[:, None] * unit[None, :]
        tl.store(x_ptr + place + c[:, None] * C + c[None, :], X)


@triton.jit(do_not_specialize=["chunks"])
def corrected_kernel(
    x_ptr, kg_ptr, v_ptr, chunk_ptr, u_ptr, w_ptr, v_stride, chunks, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr
):
    """Items (chunk, head): U = T V (fp32) and W = T (K exp G) (bf16), T = X^T."""
    c = tl.arange(0, C)
    d = tl.arange(0, D)
    for item in range(tl.program_id(0), chunks * N, tl.num_programs(0)):
        head = item % N
        chunk = item // N
        token = tl.load(chunk_ptr + chunk * 4).to(tl.int64)
        rows = tl.load(chunk_ptr + chunk * 4 + 1)
        tile = item.to(tl.int64) * (C * D) + c[:, None] * D + d[None, :]
        T = tl.trans(tl.load(x_ptr + item.to(tl.int64) * (C * C) + c[:, None] * C + c[None, :]))
        kg = tl.load(kg_ptr + tile)
        tl.store(w_ptr + tile, tl.dot(T, kg, input_precision="ieee").to(tl.bfloat16))
        v = tl.load(
            v_ptr + token * v_stride + head * D + c[:, None] * v_stride + d[None, :],
            mask=(c < rows)[:, None],
            other=0.0,
        )
        tl.store(u_ptr + tile, tl.dot(T, v.to(tl.float32), input_precision="ieee"))


@triton.jit(do_not_specialize=["slot_stride", "sequences"])
def states_kernel(
    u_ptr, w_ptr, qg_ptr, kend_ptr, a_ptr, gamma_ptr, chunk_ptr, sequence_ptr, state_ptr, slot_ptr, init_ptr, out_ptr,
    out_stride, state_stride, slot_stride, sequences, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Items (sequence, head, block of BV value columns): outputs of all chunks in turn, then the state.

    The state is kept K-major [D, BV] in fp32 while the chunks pass, and transposed where it meets the pool. Sequences
    without a slot store nothing: out holds zeros already.
    """
    PARTS: tl.constexpr = D // BV
    c = tl.arange(0, C)
    d = tl.arange(0, D)
    b = tl.arange(0, BV)
    for item in range(tl.program_id(0), sequences * N * PARTS, tl.num_programs(0)):
        part = (item % PARTS) * BV
        head = (item // PARTS) % N
        seq = item // (PARTS * N)
        chunk0 = tl.load(sequence_ptr + seq * 4)
        count = tl.load(sequence_ptr + seq * 4 + 1)
        slot = tl.load(slot_ptr + seq * slot_stride).to(tl.int64)
        live = slot > 0
        old = live & (tl.load(init_ptr + seq).to(tl.int32) != 0)
        # What is not there is masked away: a product would keep NaN of a former owner.
        limit = tl.where(old, BV, 0)
        state_at = state_ptr + slot * state_stride + head * (D * D) + part * D + b[:, None] * D + d[None, :]
        S = tl.trans(tl.load(state_at, mask=(b < limit)[:, None], other=0.0).to(tl.float32))
        for n in range(count):
            chunk = chunk0 + n
            place = chunk.to(tl.int64) * N + head
            tile = place * (C * D) + c[:, None] * D + d[None, :]
            s = S.to(tl.bfloat16)
            u = tl.load(u_ptr + place * (C * D) + part + c[:, None] * D + b[None, :])
            fresh = (u - tl.dot(tl.load(w_ptr + tile), s)).to(tl.bfloat16)
            o = tl.dot(tl.load(qg_ptr + tile), s)
            o += tl.dot(tl.load(a_ptr + place * (C * C) + c[:, None] * C + c[None, :]), fresh)
            gamma = tl.load(gamma_ptr + place * D + d)
            S = S * gamma[:, None] + tl.dot(tl.trans(tl.load(kend_ptr + tile)), fresh)
            token = tl.load(chunk_ptr + chunk * 4).to(tl.int64)
            rows = tl.where(live, tl.load(chunk_ptr + chunk * 4 + 1), 0)
            tl.store(
                out_ptr + token * out_stride + head * D + part + c[:, None] * out_stride + b[None, :],
                o.to(out_ptr.dtype.element_ty),
                mask=(c < rows)[:, None],
            )
        limit = tl.where(live & (count > 0), BV, 0)
        tl.store(state_at, tl.trans(S).to(state_ptr.dtype.element_ty), mask=(b < limit)[:, None])
