// KDA decode or verification of one row and head, convolution to gated norm, by a cluster of SPLIT blocks that share the
// value rows. Formulas and safety: k3_nvidia/kernels/kda_step.py. bf16 activations, fp32 states of 128 x 128.
//
// A block owns BR = 128 / SPLIT value rows; eight lanes share a row, sixteen of its columns each (4 sub + 32 i + 0 .. 3),
// so a sum over a row is three exchanges and a warp's access four whole lines of 128 bytes. What does not depend on the
// state (convolution, gate, norms of q and k) is computed for all TOKENS tokens first, by every block for itself; then
// the block's rows of the state stay in registers from token to token. Blocks meet twice: when all have read the conv
// state, which they then move, and with their sums of squares for the norm.
//
// The state is asked for as soon as its slot is known, before the convolution's own operands are. BULK (one token only):
// it comes to shared memory, a piece a group of rows, asked for by one thread.

#ifndef TOKENS
#define TOKENS 1
#endif
#ifndef VERIFY
#define VERIFY 0
#endif
#ifndef SPLIT
#define SPLIT 4
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef BULK
#define BULK 0
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef BOUNDED
#define BOUNDED 1
#endif
#ifndef WIDE_SLOTS
#define WIDE_SLOTS 0
#endif
#ifndef NORM_BF16
#define NORM_BF16 0
#endif
#ifndef PDL
#define PDL 0
#endif

#ifndef ENTRY
#define ENTRY kda_step_cuda
#endif

#include "device.cuh"

struct Args {
    const u16 *qkv, *z;
    const float *beta;
    const u16 *gate;
    const float *weight, *a_log, *dt_bias;
    const void *norm;
    u16 *conv;
    float *state;
    const void *slot;
    u16 *out;
    const int *accepted, *bounds;  // verification only, as the four counts below
    i64 qkv_stride, z_stride, beta_stride, gate_stride, out_stride, conv_stride, channel_stride, column_stride;
    i64 state_stride, slot_stride, slot_column_stride;
    float bound, eps;
    int heads, rows, tokens;
};

enum { D = 128, THREADS = 32 * WARPS, BR = D / SPLIT, GROUPS = BR / (4 * WARPS), PARTIAL = SPLIT * WARPS,
       PAIRS = (2 * D + THREADS - 1) / THREADS, OUTS = (TOKENS * BR + THREADS - 1) / THREADS };
// Shared memory: q | k | v | decay a token; o of this block's rows; beta, rq, rk, k . q; sums of squares of all warps of
// the cluster; barriers; state.
enum { MIX = 0, OUT = TOKENS * 2048, SCALARS = OUT + TOKENS * 512, SUMS = SCALARS + TOKENS * 16,
       BARS = SUMS + TOKENS * 128, STATE = (BARS + 64 + 127) / 128 * 128, PIECE = 4 * WARPS * D * 4,
       SHARED_BYTES = STATE + BULK * BR * D * 4 };

#ifndef HOST_EMULATION
#define KERNEL extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, BLOCKS)
DEVICE u32 round_bf16(float x) { u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
DEVICE float natural_log(float x) { return logf(x); }
DEVICE int thread_index() { return threadIdx.x; }
DEVICE int rank() { return SPLIT == 1 ? 0 : blockIdx.x; }
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
DEVICE void tell(const char *shared, int at, int block, float x) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(shared) + at), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}
#endif

#define SCALE 0.08838834764831845f  // 128 to the -1/2

DEVICE float from_half(u16 x) { return as_float((u32)x << 16); }
// As kda_math.sigmoid, softplus and gate_log2.
DEVICE float sigmoid(float x) { float r = rsq(1.0f + ex2(x * -1.4426950408889634f)); return r * r; }
DEVICE float softplus(float x) {
    float e = ex2((x < 20.0f ? x : 20.0f) * 1.4426950408889634f);
    float small = e * (1.0f - e * (0.5f - e * (0.3333333333f - e * 0.25f)));
    // x that is NaN stays NaN.
    return x > 20.0f ? x : x < -4.0f ? small : x != x ? x : natural_log(1.0f + e);
}
DEVICE float decay_of(float x, float rate, float bound) {
    return ex2(BOUNDED ? bound * 1.4426950408889634f * sigmoid(rate * x) : rate * -1.4426950408889634f * softplus(x));
}
DEVICE float sum8(float x) {
    x += swap_lanes(x, 1);
    x += swap_lanes(x, 2);
    return x + swap_lanes(x, 4);
}
DEVICE float dot4(float4 a, float4 b, float c) { return a.w * b.w + (a.z * b.z + (a.y * b.y + (a.x * b.x + c))); }

DEVICE i64 slot_at(const Args &a, i64 at) { return WIDE_SLOTS ? ((const i64 *)a.slot)[at] : ((const int *)a.slot)[at]; }
DEVICE u32 pair_of(u16 a, u16 b) { return (u32)a | (u32)b << 16; }

KERNEL ENTRY(const Args a) {
    SHARED(shared, 128);
    float *mix = (float *)(shared + MIX), *o_rows = (float *)(shared + OUT), *scalars = (float *)(shared + SCALARS);
    const int t = thread_index(), lane = t % 32, warp = t / 32, sub = lane % 8, quad = lane / 8, block = rank();
    const int head = blockIdx.y, own = block * BR;
    const i64 row = blockIdx.z;
    const u32 bars = address(shared) + BARS;
    if (PDL) {
        grid_wait();
        grid_next();
    }
    const i64 slot = slot_at(a, row * a.slot_stride);
    // Two channels of q, k, v or z a pair.
    float4 w[PAIRS][2];
    UNROLL for (int i = 0; i < PAIRS; i++) {
        const int pair = t + i * THREADS, part = pair / 64, c = 2 * (pair % 64);
        const float4 none = {0.0f, 0.0f, 0.0f, 0.0f};
        w[i][0] = w[i][1] = none;
        if (part < 3) {
            const float4 *at = (const float4 *)(a.weight + ((i64)(part * a.heads + head) * D + c) * 4);
            w[i][0] = at[0];
            w[i][1] = at[1];
        } else if (part == 3) {
            w[i][0].x = a.dt_bias[head * D + c];
            w[i][1].x = a.dt_bias[head * D + c + 1];
        }
    }
    const float rate = ex2(a.a_log[head] * 1.4426950408889634f);
    i64 first = row, source = slot;
    int count = 1, column0 = 0;
    u16 *out = a.out + head * D + own;
    if (VERIFY) {
        first = a.bounds[row];
        count = a.bounds[row + 1] - (int)first;
        for (i64 n = a.bounds[a.rows] + row; n < a.tokens; n += a.rows)
            if (t < BR) out[n * a.out_stride + t] = 0;
    }
    if (slot <= 0) {
        for (int n = 0; n < count; n++)
            if (t < BR) out[(first + n) * a.out_stride + t] = 0;
        return;
    }
    if (VERIFY) {
        if (count <= 0) return;
        count = count < TOKENS ? count : TOKENS;
        column0 = a.accepted[row] - 1;
        source = slot_at(a, row * a.slot_stride + column0 * a.slot_column_stride);
    }
    const i64 tile = (i64)head * D * D + own * D;
    const float *from = a.state + source * a.state_stride + tile;
    float4 S[GROUPS][4];
    if (BULK) {
        if (t == 0) {
            for (int g = 0; g < GROUPS; g++) barrier_make(bars + 8 * g, 1);
            barriers_made();
            for (int g = 0; g < GROUPS; g++) {
                barrier_expect(bars + 8 * g, PIECE);
                bulk_copy(address(shared) + STATE + g * PIECE, from + g * (PIECE / 4), PIECE, bars + 8 * g);
            }
        }
    } else {
        UNROLL for (int g = 0; g < GROUPS; g++) UNROLL for (int i = 0; i < 4; i++)
            S[g][i] = *(const float4 *)(from + ((g * WARPS + warp) * 4 + quad) * D + 4 * sub + 32 * i);
    }
    u16 *conv = a.conv + slot * a.conv_stride;
    u32 h[PAIRS][3], x[PAIRS][TOKENS];
    UNROLL for (int i = 0; i < PAIRS; i++) {
        const int pair = t + i * THREADS, part = pair / 64, c = 2 * (pair % 64);
        const i64 channel = (part * a.heads + head) * D + c;
        if (part < 3) UNROLL for (int n = 0; n < 3; n++) {
            const u16 *at = conv + channel * a.channel_stride + (column0 + n) * a.column_stride;
            h[i][n] = pair_of(at[0], at[a.channel_stride]);
        }
        const u16 *at = part < 3 ? a.qkv + first * a.qkv_stride + channel : a.z + first * a.z_stride + head * D + c;
        UNROLL for (int n = 0; n < TOKENS; n++)
            if (n < count && part < 4) x[i][n] = *(const u32 *)(at + n * (part < 3 ? a.qkv_stride : a.z_stride));
    }
    float beta = 0.0f, weight[OUTS], gate[OUTS];
    if (t < count) beta = a.beta[(first + t) * a.beta_stride + head];
    UNROLL for (int i = 0; i < OUTS; i++) {
        const int at = t + i * THREADS, n = at / BR, r = own + at % BR;
        if (n < count) {
            gate[i] = from_half(a.gate[(first + n) * a.gate_stride + head * D + r]);
            weight[i] = NORM_BF16 ? from_half(((const u16 *)a.norm)[r]) : ((const float *)a.norm)[r];
        }
    }
    UNROLL for (int i = 0; i < PAIRS; i++) {
        const int pair = t + i * THREADS, part = pair / 64, c = 2 * (pair % 64);
        u32 h0 = h[i][0], h1 = h[i][1], h2 = h[i][2];
        UNROLL for (int n = 0; n < TOKENS; n++) {
            if (n >= count || part > 3) break;
            float y[2];
            if (part < 3) {
                y[0] = w[i][0].x * low(h0);
                y[1] = w[i][1].x * high(h0);
                y[0] += w[i][0].y * low(h1);
                y[1] += w[i][1].y * high(h1);
                y[0] += w[i][0].z * low(h2);
                y[1] += w[i][1].z * high(h2);
                y[0] += w[i][0].w * low(x[i][n]);
                y[1] += w[i][1].w * high(x[i][n]);
                // Rounded like the tensor that the separate convolution writes.
                y[0] = from_half(round_bf16(y[0] * sigmoid(y[0])));
                y[1] = from_half(round_bf16(y[1] * sigmoid(y[1])));
            } else {
                y[0] = decay_of(low(x[i][n]) + w[i][0].x, rate, a.bound);
                y[1] = decay_of(high(x[i][n]) + w[i][1].x, rate, a.bound);
            }
            h0 = h1;
            h1 = h2;
            h2 = x[i][n];
            mix[n * 4 * D + part * D + c] = y[0];
            mix[n * 4 * D + part * D + c + 1] = y[1];
        }
    }
    if (t < count) scalars[4 * t] = beta;
    if (SPLIT > 1) cluster_sync();
    else sync_all();
    if (TOKENS > 1) {
        for (int n = warp; n < count; n += WARPS) {
            const float4 q = *(const float4 *)(mix + n * 4 * D + 4 * lane);
            const float4 k = *(const float4 *)(mix + n * 4 * D + D + 4 * lane);
            float qq = dot4(q, q, 0.0f), kk = dot4(k, k, 0.0f), kq = dot4(k, q, 0.0f);
            UNROLL for (int m = 1; m < 32; m *= 2) {
                qq += swap_lanes(qq, m);
                kk += swap_lanes(kk, m);
                kq += swap_lanes(kq, m);
            }
            if (lane == 0) {
                scalars[4 * n + 1] = rsq(qq + 1e-6f) * SCALE;
                scalars[4 * n + 2] = rsq(kk + 1e-6f);
                scalars[4 * n + 3] = kq;
            }
        }
        sync_all();
    }
    // The conv state after `count` tokens; every block moves a share of it.
    UNROLL for (int i = 0; i < PAIRS; i++) {
        const int pair = t + i * THREADS, part = pair / 64;
        if (part > 2 || pair / 16 % SPLIT != block) continue;
        u16 *at = conv + ((i64)(part * a.heads + head) * D + 2 * (pair % 64)) * a.channel_stride;
        UNROLL for (int n = 0; n < TOKENS + 2; n++) {
            if (n >= count + 2) break;
            const u32 both = n < 2 ? h[i][n + 1] : x[i][n < 2 ? 0 : n - 2];
            at[n * a.column_stride] = (u16)(both & 0xffff);
            at[a.channel_stride + n * a.column_stride] = (u16)(both >> 16);
        }
    }
    for (int n = 0; n < count; n++) {
        const float *m = mix + n * 4 * D;
        float4 q[4], k[4], d[4];
        UNROLL for (int i = 0; i < 4; i++) {
            q[i] = *(const float4 *)(m + 4 * sub + 32 * i);
            k[i] = *(const float4 *)(m + D + 4 * sub + 32 * i);
            d[i] = *(const float4 *)(m + 3 * D + 4 * sub + 32 * i);
        }
        float4 scalar = *(const float4 *)(scalars + 4 * n);
        if (TOKENS == 1) {
            float qq = 0.0f, kk = 0.0f, kq = 0.0f;
            UNROLL for (int i = 0; i < 4; i++) {
                qq = dot4(q[i], q[i], qq);
                kk = dot4(k[i], k[i], kk);
                kq = dot4(k[i], q[i], kq);
            }
            scalar.y = rsq(sum8(qq) + 1e-6f) * SCALE;
            scalar.z = rsq(sum8(kk) + 1e-6f);
            scalar.w = sum8(kq);
        }
        const i64 target = VERIFY ? slot_at(a, row * a.slot_stride + n * a.slot_column_stride) : slot;
        float *to = a.state + target * a.state_stride + tile;
        float squares = 0.0f;
        UNROLL for (int g = 0; g < GROUPS; g++) {
            const int r = (g * WARPS + warp) * 4 + quad;
            float along_k = 0.0f, along_q = 0.0f;
            if (BULK) barrier_wait(bars + 8 * g, 0);
            UNROLL for (int i = 0; i < 4; i++) {
                float4 &s = S[g][i];
                if (BULK) s = *(const float4 *)(shared + STATE + (r * D + 4 * sub + 32 * i) * 4);
                s.x *= d[i].x;
                s.y *= d[i].y;
                s.z *= d[i].z;
                s.w *= d[i].w;
                along_k = dot4(s, k[i], along_k);
                along_q = dot4(s, q[i], along_q);
            }
            along_k = sum8(along_k);
            along_q = sum8(along_q);
            const float u = scalar.x * (m[2 * D + own + r] - scalar.z * along_k) * scalar.z;
            UNROLL for (int i = 0; i < 4; i++) {
                float4 &s = S[g][i];
                s.x += u * k[i].x;
                s.y += u * k[i].y;
                s.z += u * k[i].z;
                s.w += u * k[i].w;
                if (!VERIFY || target > 0) *(float4 *)(to + r * D + 4 * sub + 32 * i) = s;
            }
            const float o = scalar.y * (along_q + u * scalar.w);
            squares += o * o;
            if (sub == 0) o_rows[n * BR + r] = o;
        }
        squares += swap_lanes(squares, 8);
        squares += swap_lanes(squares, 16);
        const int at = SUMS + 4 * (n * PARTIAL + block * WARPS + warp);
        if (SPLIT > 1) {
            if (lane < SPLIT) tell(shared, at, lane, squares);
        } else if (lane == 0) *(float *)(shared + at) = squares;
    }
    if (SPLIT > 1) cluster_sync();
    else sync_all();
    UNROLL for (int i = 0; i < OUTS; i++) {
        const int at = t + i * THREADS, n = at / BR;
        if (n >= count) break;
        const float *sums = (const float *)(shared + SUMS) + n * PARTIAL;
        float total = 0.0f;
        UNROLL for (int m = 0; m < PARTIAL; m++) total += sums[m];
        const float y = o_rows[at] * rsq(total * (1.0f / D) + a.eps) * weight[i] * sigmoid(gate[i]);
        out[(first + n) * a.out_stride + at % BR] = (u16)round_bf16(y);
    }
}
