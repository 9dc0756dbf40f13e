"""KDA prefill for CDNA, first kernel: everything inside a chunk of 64 tokens, all chunks and heads in parallel.

Per chunk and head (notation of k3_core.contracts.kda; G is the cumulative log decay, C = 64 tokens):

    -W   [C, K]   minus (I + M)^-1 diag(beta) (K . exp G)        bf16
    U^T  [V, C]   ((I + M)^-1 diag(beta) V) transposed           bf16
    Qg   [C, K]   Q . exp G                                       bf16
    Kg   [C, K]   K . exp(G_C - G)                                bf16
    A    [C, C]   sum_c q_i k_j exp(G_i - G_j), j <= i, else 0    bf16
    gamma [K]     exp(G_C)                                        fp32

One launch does norms, gates, cumulative sums and products: a cumulative sum over rows is a product with a triangle of
ones (g in three bfloat16 terms, 24 bits), which the matrix cores do in place of a scan over lanes or of a separate pass
through memory. Key channels are taken PART at a time, which is what two workgroups' registers on a compute unit allow.

The chunk is two halves of 32 rows. Inside a half with a bounded gate (g >= -5) the decays are split at half of the
half's total: exp(G_i - r) * exp(r - G_j) with r = G_32 / 2, so both exponents stay within 16 * 5 / ln 2 = 115
doublings, inside the exponent range of bf16 and fp32. Between the halves both factors are <= 1. Without a bound
(Kimi-Linear's softplus) the chunk is cut by halving: a pair (i, j) meets at the middle of one 2, 4, .. 64 block, where
both factors are <= 1; one masked product a level.

(I + M)^-1 by doubling: T <- T - between(T M T) for blocks of 2, 4, .. 64, where `between` keeps the block that joins
two neighbours. Every factor is a piece of an inverse, so nothing grows as it does in a power series of M. Operands
fp16: |M| <= 1. Rows past the end of a sequence are zeros throughout, so a sequence of one token is a chunk like any.

Sources: the WY form of Yang et al. (DeltaNet); the blocked triangular inverse is standard dense linear algebra.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

from k3_amd.kernels.device.math import dot, gate_log2

#: The one-product form exponentiates at most this many doublings: half of 32 tokens at the bound.
MAX_HALF_RANGE = 120.0
LOG2E = 1.4426950408889634


@triton.jit
def invert(M, UPCAST: tl.constexpr):
    """(I + M)^-1 for a strictly lower M [64, 64] fp32."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    m = M.to(tl.float16)
    zero = tl.zeros([64, 64], dtype=tl.float32)
    T = tl.where(i == j, 1.0, 0.0) - tl.where((i >> 1) == (j >> 1), M, 0.0)
    # A loop at run time: unrolled, the masks of all levels would be alive together, in scalar registers.
    for level in tl.range(2, 7):
        between = ((i ^ j) >> (level - 1)) == 1  # above the diagonal the product is zero anyway
        t = T.to(tl.float16)
        tm = dot(t, m, zero, UPCAST).to(tl.float16)
        T = T - tl.where(between, dot(tm, t, zero, UPCAST), 0.0)
    return T


@triton.jit
def sign(x):
    """1 where an int32 is negative, else 0. No comparison: a mask alive takes two scalar registers an element."""
    return x.to(tl.uint32, bitcast=True) >> 31


@triton.jit
def masked_sums(g, inside, UPCAST: tl.constexpr):
    """Row i: the sum of g's rows j with inside[i, j] = 1, not 0; g in three bfloat16 terms: 24 bits of any range."""
    ones = inside.to(tl.float32).to(tl.bfloat16)  # in two steps: the interpreter has no other way from integers
    first = g.to(tl.bfloat16)
    rest = g - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    zero = tl.zeros([64, g.shape[1]], dtype=tl.float32)
    return dot(ones, first, dot(ones, second, dot(ones, third, zero, UPCAST), UPCAST), UPCAST)


@triton.jit
def _rows(ptr, at, stride, col, mask):
    """Some columns of 64 rows in fp32; rows outside the sequence are zeros."""
    return tl.load(ptr + at[:, None] * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _reciprocal_norm(ptr, at, stride, col, mask):
    x = _rows(ptr, at, stride, col, mask)
    return tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _split_part(
    q_ptr, k_ptr, g, rq, rk, M, A, at, q_stride, k_stride, col, mask, qg_at, kg_at, gamma_at, UPCAST: tl.constexpr
):
    """Adds some key channels to M = K K^T and A = Q K^T with decays of a bounded gate, stores Qg, Kg and gamma of them.

    q is loaded where it is needed: its registers are those that k has left.
    """
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    upper = i >= 32
    middle1 = 0.5 * tl.sum(tl.where(upper, 0.0, g), axis=0)[None, :]
    middle2 = 0.5 * tl.sum(tl.where(upper, g, 0.0), axis=0)[None, :]
    # Columns of the row's half up to the row: 0 <= i - j <= i % 32.
    inside = 1 - sign((i - j) | (i % 32 - i + j))
    relative = masked_sums(g, inside, UPCAST) - tl.where(upper, middle2, middle1)
    half1 = tl.exp2(middle1)
    half2 = tl.exp2(middle2)
    k = _rows(k_ptr, at, k_stride, col, mask) * rk
    k_up = k * tl.exp2(-relative)
    # In this order no partial product leaves the exponent range while the whole one is in it.
    tl.store(kg_at, (k_up * tl.where(upper, half2, half1) * tl.where(upper, 1.0, half2 * half2)).to(tl.bfloat16))
    tl.store(gamma_at, half1 * half1 * half2 * half2)
    columns1 = tl.trans(tl.where(upper, 0.0, k_up).to(tl.bfloat16))
    columns2 = tl.trans(tl.where(upper, k_up, 0.0).to(tl.bfloat16))
    down = tl.exp2(relative)
    # One factor after the other: at the bound their product is below the range of fp32, what they scale is not.
    k_down = k * down
    M = dot(k_down.to(tl.bfloat16), columns2, M, UPCAST)
    k_down = tl.where(upper, k_down * half2 * half1, k_down)
    M = dot(k_down.to(tl.bfloat16), columns1, M, UPCAST)
    q_down = _rows(q_ptr, at, q_stride, col, mask) * rq * down
    A = dot(q_down.to(tl.bfloat16), columns2, A, UPCAST)
    q_down = tl.where(upper, q_down * half2 * half1, q_down)
    A = dot(q_down.to(tl.bfloat16), columns1, A, UPCAST)
    tl.store(qg_at, (q_down * half1).to(tl.bfloat16))
    return M, A


@triton.jit
def _halved_part(
    q_ptr, k_ptr, g, rq, rk, M, A, at, q_stride, k_stride, col, mask, qg_at, kg_at, gamma_at, UPCAST: tl.constexpr
):
    """As _split_part for any gate <= 0."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    zero = tl.zeros([64, 64], dtype=tl.float32)
    k = _rows(k_ptr, at, k_stride, col, mask) * rk
    q = _rows(q_ptr, at, q_stride, col, mask) * rq
    A += tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
    after = sign(i - j).to(tl.int32, bitcast=True)
    for level in tl.range(1, 7):
        # Rows of a second half decay from the middle (j <= i), rows of a first half to it (j > i): 2 apart + .. is 1.
        apart = (i ^ j) >> (level - 1)
        f = tl.exp2(masked_sums(g, sign(((2 * apart + (after ^ ((i >> (level - 1)) & 1))) ^ 1) - 1), UPCAST))
        kd = (k * f).to(tl.bfloat16)
        qd = (q * f).to(tl.bfloat16)
        # What this adds above the diagonal is cut off by the caller.
        M += tl.where(apart == 1, dot(kd, tl.trans(kd), zero, UPCAST), 0.0)
        A += tl.where(apart == 1, dot(qd, tl.trans(kd), zero, UPCAST), 0.0)
    tl.store(gamma_at, tl.exp2(tl.sum(g, axis=0)[None, :]))
    tl.store(qg_at, (q * tl.exp2(masked_sums(g, sign(j - i - 1), UPCAST))).to(tl.bfloat16))
    tl.store(kg_at, (k * tl.exp2(masked_sums(g, sign(i - j), UPCAST))).to(tl.bfloat16))
    return M, A


@triton.jit
def _gates(z_ptr, dt_bias_ptr, rate, lower_bound, at, z_stride, col, mask, BOUNDED: tl.constexpr):
    """Base-2 log decays of some channels; zero in rows outside the sequence."""
    z = _rows(z_ptr, at, z_stride, col, mask)
    return tl.where(mask, gate_log2(z, rate, tl.load(dt_bias_ptr + col)[None, :], lower_bound, BOUNDED), 0.0)


@triton.jit(do_not_specialize=["num_heads"], do_not_specialize_on_alignment=["beta_ptr"])
def kda_chunk_kernel(
    q_ptr, k_ptr, v_ptr, z_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, lower_bound, chunk_ptr,
    w_ptr, ut_ptr, qg_ptr, kg_ptr, a_ptr, gamma_ptr,
    q_stride, k_stride, v_stride, z_stride, beta_stride, num_heads,
    BOUNDED: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (heads, chunks); chunk_ptr int32 [chunks, 4]: first token, rows, sequence, index in its sequence."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    token = tl.load(chunk_ptr + chunk * 4)
    rows = tl.load(chunk_ptr + chunk * 4 + 1)
    i = tl.arange(0, 64)
    mask = (i < rows)[:, None]
    at = (token + i).to(tl.int64)
    place = chunk.to(tl.int64) * num_heads + head
    rate = tl.exp(tl.load(a_log_ptr + head))
    whole = head * D + tl.arange(0, D)
    rk = _reciprocal_norm(k_ptr, at, k_stride, whole, mask)
    rq = _reciprocal_norm(q_ptr, at, q_stride, whole, mask) * (D**-0.5)
    M = tl.zeros([64, 64], dtype=tl.float32)
    A = tl.zeros([64, 64], dtype=tl.float32)
    c = tl.arange(0, PART)
    for part in tl.range(0, D // PART):
        col = head * D + part * PART + c
        g = _gates(z_ptr, dt_bias_ptr, rate, lower_bound, at, z_stride, col, mask, BOUNDED)
        tile = place * (64 * D) + i[:, None] * D + part * PART + c[None, :]
        gamma_at = gamma_ptr + place * D + part * PART + c[None, :]
        if SPLIT:
            M, A = _split_part(
                q_ptr, k_ptr, g, rq, rk, M, A, at, q_stride, k_stride, col, mask, qg_ptr + tile, kg_ptr + tile,
                gamma_at, UPCAST,
            )  # fmt: skip
        else:
            M, A = _halved_part(
                q_ptr, k_ptr, g, rq, rk, M, A, at, q_stride, k_stride, col, mask, qg_ptr + tile, kg_ptr + tile,
                gamma_at, UPCAST,
            )  # fmt: skip
    A = tl.where(i[:, None] >= i[None, :], A, 0.0)
    tl.store(a_ptr + place * 4096 + i[:, None] * 64 + i[None, :], A.to(tl.bfloat16))

    beta = tl.load(beta_ptr + at * beta_stride + head, mask=i < rows, other=0.0)
    M = tl.where(i[:, None] > i[None, :], M * beta[:, None], 0.0)
    T = invert(M, UPCAST) * beta[None, :]
    # Rows of T cancel when keys repeat, so its own rounding would show: eleven bits for W, two terms for U, whose other
    # operand needs the range of bfloat16.
    t = T.to(tl.float16)
    hi = T.to(tl.bfloat16)
    lo = (T - hi.to(tl.float32)).to(tl.bfloat16)
    zero = tl.zeros([64, PART], dtype=tl.float32)
    for part in tl.range(0, D // PART):
        col = head * D + part * PART + c
        tile = place * (64 * D) + i[:, None] * D + part * PART + c[None, :]
        # K exp G once more: cheaper than keeping it through the inversion.
        g = _gates(z_ptr, dt_bias_ptr, rate, lower_bound, at, z_stride, col, mask, BOUNDED)
        start = tl.exp2(masked_sums(g, sign(i[None, :] - i[:, None] - 1), UPCAST))
        start = (_rows(k_ptr, at, k_stride, col, mask) * rk * start).to(tl.float16)
        tl.store(w_ptr + tile, (-dot(t, start, zero, UPCAST)).to(tl.bfloat16))
        v = _rows(v_ptr, at, v_stride, col, mask).to(tl.bfloat16)
        u = dot(hi, v, dot(lo, v, zero, UPCAST), UPCAST).to(tl.bfloat16)
        tl.store(ut_ptr + place * (64 * D) + (part * PART + c)[:, None] * 64 + i[None, :], tl.trans(u))
