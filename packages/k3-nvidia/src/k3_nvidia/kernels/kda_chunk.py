"""KDA prefill, first two kernels: everything inside a chunk of 64 tokens, all chunks and heads in parallel.

Per chunk and head (notation of k3_core.contracts.kda; G is the cumulative log decay, C = 64 tokens):

    -W   [C, K]   minus (I + M)^-1 diag(beta) (K . exp G)        bf16
    U^T  [V, C]   ((I + M)^-1 diag(beta) V) transposed           bf16
    Qg   [C, K]   Q . exp G                                       bf16
    Kg   [C, K]   K . exp(G_C - G)                                bf16
    A    [C, C]   sum_c q_i k_j exp(G_i - G_j), j <= i, else 0    bf16
    gamma [K]     exp(G_C)                                        fp32

The chunk is two halves of 32 rows. Inside a half with a bounded gate (g >= -5) the decays are split at half of the
half's total: exp(G_i - r) * exp(r - G_j) with r = G_32 / 2, so both exponents stay within 16 * 5 / ln 2 = 115
doublings, inside the exponent range of bf16 and fp32: no sub-tiles. Between the halves both factors are <= 1.
The same two exponentials serve everything else, multiplied by exp(r), one vector a half.
Without a bound (Kimi-Linear's softplus) the chunk is cut by halving: a pair (i, j) meets at the middle of one 2, 4, ..
64 block, where both factors are <= 1; one masked product a level.

(I + M)^-1 by doubling: T <- T - between(T M T) for blocks of 2, 4, .. 64, where `between` keeps the block that joins
two neighbours. Every factor is a piece of an inverse, so nothing grows as it does in a power series of M (equal keys
with long memory would overflow that). Operands fp16: |M| <= 1, and eleven bits are what tf32 has, at twice its speed.

Sources: the WY form of Yang et al. (DeltaNet); the blocked triangular inverse is standard dense linear algebra.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

from k3_core.operators.kda_plan import CHUNK
from k3_nvidia.kernels.kda_math import gate_log2
from k3_nvidia.kernels.triton_math import dot

__all__ = ["CHUNK", "kda_chunk_kernel", "kda_prepare_kernel"]


@triton.jit
def _invert(M, UPCAST: tl.constexpr):
    """(I + M)^-1 for a strictly lower M [64, 64] fp32."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    m = M.to(tl.float16)
    zero = tl.zeros([64, 64], dtype=tl.float32)
    T = tl.where(i == j, 1.0, 0.0) - tl.where((i >> 1) == (j >> 1), M, 0.0)
    for level in tl.static_range(2, 7):
        between = ((i >> level) == (j >> level)) & ((i >> (level - 1)) > (j >> (level - 1)))
        t = T.to(tl.float16)
        tm = dot(t, m, zero, UPCAST).to(tl.float16)
        T = T - tl.where(between, dot(tm, t, zero, UPCAST), 0.0)
    return T


@triton.jit
def _level(g, SIZE: tl.constexpr, UPCAST: tl.constexpr):
    """Decay factors <= 1 of one halving level: rows of a second half from the middle, rows of a first half to it.

    The sums are products with 0 and 1, g in three bfloat16 terms (24 bits, any range).
    """
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    inside = ((i // SIZE) == (j // SIZE)) & tl.where((i // SIZE) % 2 == 1, j <= i, j > i)
    ones = tl.where(inside, 1.0, 0.0).to(tl.bfloat16)
    first = g.to(tl.bfloat16)
    rest = g - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    zero = tl.zeros([64, g.shape[1]], dtype=tl.float32)
    return tl.exp2(dot(ones, first, dot(ones, second, dot(ones, third, zero, UPCAST), UPCAST), UPCAST))


@triton.jit
def _pairs_unbounded(q, k, g, D: tl.constexpr, UPCAST: tl.constexpr):
    """(K K^T, Q K^T) with decays for any gate <= 0, zero above the diagonal (K K^T also on it)."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    zero = tl.zeros([64, 64], dtype=tl.float32)
    M = zero
    A = tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
    for level in tl.static_range(1, 7):
        f = _level(g, 2 ** (level - 1), UPCAST)
        kd = (k * f).to(tl.bfloat16)
        qd = (q * f).to(tl.bfloat16)
        between = ((i >> level) == (j >> level)) & ((i >> (level - 1)) > (j >> (level - 1)))
        M += tl.where(between, dot(kd, tl.trans(kd), zero, UPCAST), 0.0)
        A += tl.where(between, dot(qd, tl.trans(kd), zero, UPCAST), 0.0)
    return M, A


@triton.jit
def _rows(ptr, at, stride, col, mask, WIDTH: tl.constexpr):
    """Rows [64, WIDTH] from column col, zeros where masked."""
    return tl.load(ptr + at[:, None] * stride + col + tl.arange(0, WIDTH)[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_heads"])
def kda_prepare_kernel(
    q_ptr, k_ptr, z_ptr, a_log_ptr, dt_bias_ptr, lower_bound, chunk_ptr, scale_ptr, g_ptr, middle_ptr,
    q_stride, k_stride, z_stride, num_heads,
    BOUNDED: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (heads, 2 chunks), one warp each: reciprocal norms, and with SPLIT cumulative decays, of half a chunk.

    scale_ptr fp32 [chunks, N, 2, 64] (q with D^-0.5, k), g_ptr fp32 [chunks, N, 64, D] base-2 G of the half, middle_ptr
    fp32 [chunks, N, 2, D] half of its total. A thread owns its channels and walks the rows, so that the sum needs no
    exchange: inside kda_chunk_kernel a scan over rows was a quarter of the instructions. Reading q and k here also
    leaves them in the L2.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1) // 2
    half = tl.program_id(1) % 2
    token = tl.load(chunk_ptr + chunk * 4)
    rows = tl.load(chunk_ptr + chunk * 4 + 1)
    c = tl.arange(0, D)
    rate = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head * D + c)
    place = chunk.to(tl.int64) * num_heads + head
    r = tl.arange(0, GROUP)
    for group in tl.static_range(0, 32 // GROUP):
        row = half * 32 + group * GROUP + r
        at = (token + row).to(tl.int64)
        mask = (row < rows)[:, None]
        q = tl.load(q_ptr + at[:, None] * q_stride + head * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + at[:, None] * k_stride + head * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        scale_at = scale_ptr + place * 128 + row
        tl.store(scale_at, tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6) * (D**-0.5))
        tl.store(scale_at + 64, tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6))
    if SPLIT:
        z_at = z_ptr + (token + half * 32).to(tl.int64) * z_stride + head * D + c
        g_at = g_ptr + place * (64 * D) + half * (32 * D) + c
        G = tl.zeros([D], dtype=tl.float32)
        for group in tl.static_range(0, 32 // GROUP):
            loaded = ()
            for n in tl.static_range(0, GROUP):
                here = half * 32 + group * GROUP + n < rows
                loaded = loaded + (
                    tl.load(z_at + (group * GROUP + n) * z_stride, mask=c < tl.where(here, D, 0), other=0.0),
                )
            for n in tl.static_range(0, GROUP):
                here = half * 32 + group * GROUP + n < rows
                g = gate_log2(loaded[n].to(tl.float32), rate, bias, lower_bound, BOUNDED)
                G += tl.where(here, g, 0.0)
                tl.store(g_at + (group * GROUP + n) * D, G)
        tl.store(middle_ptr + (place * 2 + half) * D + c, 0.5 * G)


@triton.jit
def _split_part(
    q, k, G, middle1, middle2, M, A, i, qg_at, kg_at, gamma_at, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds some key channels to M and A, stores Qg, Kg and gamma of them; returns (M, A, K exp G)."""
    upper = (i >= 32)[:, None]
    relative = G - tl.where(upper, middle2, middle1)
    half1 = tl.exp2(middle1)
    half2 = tl.exp2(middle2)
    k_up = k * tl.exp2(-relative)
    columns1 = tl.trans(tl.where(upper, 0.0, k_up).to(tl.bfloat16))
    columns2 = tl.trans(tl.where(upper, k_up, 0.0).to(tl.bfloat16))
    # In this order no partial product leaves the exponent range while the whole one is in it.
    k_end = k_up * tl.where(upper, half2, half1) * tl.where(upper, 1.0, half2 * half2)
    tl.store(kg_at, k_end.to(tl.bfloat16))
    tl.store(gamma_at, half1 * half1 * half2 * half2)
    down = tl.exp2(relative)
    k_down = k * down
    M = dot(k_down.to(tl.bfloat16), columns2, M, UPCAST)
    k_down = tl.where(upper, k_down * half2 * half1, k_down)
    M = dot(k_down.to(tl.bfloat16), columns1, M, UPCAST)
    q_down = q * down
    A = dot(q_down.to(tl.bfloat16), columns2, A, UPCAST)
    q_down = tl.where(upper, q_down * half2 * half1, q_down)
    A = dot(q_down.to(tl.bfloat16), columns1, A, UPCAST)
    tl.store(qg_at, (q_down * half1).to(tl.bfloat16))
    return M, A, (k_down * half1).to(tl.float16)


@triton.jit
def _halved_part(
    q, k, g, M, A, i, qg_at, kg_at, gamma_at, W: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """As _split_part for any gate <= 0."""
    M_in, A_in = _pairs_unbounded(q, k, g, W, UPCAST)
    G = tl.cumsum(g, axis=0)
    total = tl.sum(g, axis=0)[None, :]
    start = tl.exp2(G)
    tl.store(gamma_at, tl.exp2(total))
    tl.store(qg_at, (q * start).to(tl.bfloat16))
    tl.store(kg_at, (k * tl.exp2(total - G)).to(tl.bfloat16))
    return M + M_in, A + A_in, (k * start).to(tl.float16)


@triton.jit(do_not_specialize=["num_heads"], do_not_specialize_on_alignment=["beta_ptr"])
def kda_chunk_kernel(
    q_ptr, k_ptr, v_ptr, z_ptr, scale_ptr, g_ptr, middle_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, lower_bound,
    chunk_ptr, w_ptr, ut_ptr, qg_ptr, kg_ptr, a_ptr, gamma_ptr,
    q_stride, k_stride, v_stride, z_stride, beta_stride, num_heads,
    BOUNDED: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (heads, chunks); chunk_ptr int32 [chunks, 4]: first token, rows, sequence, index in its sequence.

    Norms, and with SPLIT G and its middles, come from kda_prepare_kernel; otherwise z is read here.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    token = tl.load(chunk_ptr + chunk * 4)
    rows = tl.load(chunk_ptr + chunk * 4 + 1)
    i = tl.arange(0, 64)
    valid = i < rows
    mask = valid[:, None]
    at = (token + i).to(tl.int64)
    place = chunk.to(tl.int64) * num_heads + head
    rate = tl.exp(tl.load(a_log_ptr + head))
    q_scale = tl.load(scale_ptr + place * 128 + i)[:, None]
    k_scale = tl.load(scale_ptr + place * 128 + 64 + i)[:, None]
    M = tl.zeros([64, 64], dtype=tl.float32)
    A = tl.zeros([64, 64], dtype=tl.float32)
    c = tl.arange(0, PART)
    starts = ()
    for part in tl.static_range(0, D // PART):
        col = head * D + part * PART
        k = _rows(k_ptr, at, k_stride, col, mask, PART).to(tl.float32) * k_scale
        q = _rows(q_ptr, at, q_stride, col, mask, PART).to(tl.float32) * q_scale
        tile = place * (64 * D) + i[:, None] * D + part * PART + c[None, :]
        gamma_at = gamma_ptr + place * D + part * PART + c[None, :]
        if SPLIT:
            G = tl.load(g_ptr + tile)
            middle_at = middle_ptr + place * (2 * D) + part * PART + c[None, :]
            M, A, start = _split_part(
                q, k, G, tl.load(middle_at), tl.load(middle_at + D), M, A, i, qg_ptr + tile, kg_ptr + tile, gamma_at,
                UPCAST,
            )  # fmt: skip
        else:
            bias = tl.load(dt_bias_ptr + col + c)[None, :]
            z = _rows(z_ptr, at, z_stride, col, mask, PART).to(tl.float32)
            g = tl.where(mask, gate_log2(z, rate, bias, lower_bound, BOUNDED), 0.0)
            M, A, start = _halved_part(q, k, g, M, A, i, qg_ptr + tile, kg_ptr + tile, gamma_at, PART, UPCAST)
        starts = starts + (start,)
    A = tl.where(i[:, None] >= i[None, :], A, 0.0)
    tl.store(a_ptr + place * 4096 + i[:, None] * 64 + i[None, :], A.to(tl.bfloat16))

    beta = tl.load(beta_ptr + at * beta_stride + head, mask=valid, other=0.0)
    M = tl.where(i[:, None] > i[None, :], M * beta[:, None], 0.0)
    T = _invert(M, UPCAST) * beta[None, :]
    # Rows of T cancel when keys repeat, so its own rounding would show: eleven bits for W, two terms for U, whose other
    # operand needs the range of bfloat16.
    t = T.to(tl.float16)
    hi = T.to(tl.bfloat16)
    lo = (T - hi.to(tl.float32)).to(tl.bfloat16)
    zero = tl.zeros([64, PART], dtype=tl.float32)
    for part in tl.static_range(0, D // PART):
        tile = place * (64 * D) + i[:, None] * D + part * PART + c[None, :]
        tl.store(w_ptr + tile, (-dot(t, starts[part], zero, UPCAST)).to(tl.bfloat16))
        v = _rows(v_ptr, at, v_stride, head * D + part * PART, mask, PART).to(tl.bfloat16)
        u = dot(hi, v, dot(lo, v, zero, UPCAST), UPCAST).to(tl.bfloat16)
        tl.store(ut_ptr + place * (64 * D) + (part * PART + c)[:, None] * 64 + i[None, :], tl.trans(u))
