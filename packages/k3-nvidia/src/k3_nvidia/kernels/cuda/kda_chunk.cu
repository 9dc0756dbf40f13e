// KDA prefill, everything inside a chunk of 64 tokens; one block of four warps a chunk and head, bounded gate, D = 128.
// Formulas, names and output formats: k3_nvidia/kernels/kda_chunk.py. This file is the same arithmetic with the layouts
// of mma.sync.m16n8k16 chosen by hand, so that no value changes lanes except where a sum over rows needs it.
//
// Notation: lane = 4 g + t. A warp owns 16 tokens; row g of a fragment is token 2g, row g + 8 is token 2g + 1, and the
// columns of a pair of eight-column tiles e = 0, 1 are tokens 2n + e. A lane so owns two neighbouring tokens, and
// four neighbouring columns 4t .. 4t + 3 of a 16 x 16 block. Channels: of each 32 (index p) a lane holds 8t .. 8t + 7, four
// words of two; the contraction over channels takes words 2s, 2s + 1 in step s, whatever the order.
//
// Shared memory: KUP holds k_up as B fragments [tile][p][lane][16 bytes]; KST (fp16) and V hold rows of 256 bytes whose
// 16-byte pieces are permuted by `swizzle`, KST with channels 8t + 2j + i at piece 4p + j, word t, so that a lane's
// results of W are eight neighbouring channels. Every access is free of bank conflicts.

#ifndef BLOCKS
#define BLOCKS 3
#endif
// Where results go: the plain formats of kda_chunk.py, or (TILED) the bytes that kda_passes.cu reads.
#ifndef TILED
#define TILED 0
#endif

#include "device.cuh"

struct Args {
    const u16 *q, *k, *v, *z;
    const float *beta, *a_log, *dt_bias;
    const int *chunk;
    u16 *w, *ut, *qg, *kg, *a;
    float *gamma;
    i64 q_stride, k_stride, v_stride, z_stride, beta_stride;
    float bound;
    int heads;
};

#ifndef HOST_EMULATION
struct Frag { u32 x[4]; };

DEVICE float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE u32 pack_f16(float a, float b) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a)); return y; }
DEVICE uint4 load16(const void *p, bool inside) {
    uint4 y = make_uint4(0, 0, 0, 0);
    if (inside) y = *(const uint4 *)p;
    return y;
}
DEVICE void copy16(char *shared, int at, const void *p, bool inside) {
    u32 to = address(shared) + at;
    int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(p), "r"(bytes) : "memory");
}
DEVICE void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE float shift_rows(float x, int lanes) { return __shfl_up_sync(0xffffffffu, x, lanes); }
DEVICE void arrive(int barrier, int threads) {
    __threadfence_block();
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void await(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
#define MMA(name, kind)                                                                                            \
    DEVICE void name(float *c, const u32 *a, u32 b0, u32 b1) {                                                     \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." kind "." kind ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "  \
            "{%0,%1,%2,%3};"                                                                                       \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                       \
    }
MMA(mma_bf16, "bf16")
MMA(mma_f16, "f16")
// Four transposed 8 x 8 matrices; lanes 8i .. 8i + 7 give the addresses of the rows of matrix i.
DEVICE Frag load_transposed(const char *shared, int at) {
    Frag y;
    u32 from = address(shared) + at;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(y.x[0]), "=r"(y.x[1]), "=r"(y.x[2]), "=r"(y.x[3])
                 : "r"(from)
                 : "memory");
    return y;
}
#endif

#define ROLLED _Pragma("unroll 1")

// SUMS: own-lane slots, first k and q, then S, then V as rows; KST: first z in own-lane slots.
enum { SUMS = 0, VAL = 0, KST = 32768, KUP = 49152, TOTAL = 57344, OFFSET = 59392, HALF1 = 61440, HALF2 = 61952,
       END = 62464, BIAS = 62976, BETA = 63488, EXCHANGE = 63744, SHARED_BYTES = 66816 };

DEVICE int swizzle(int token) { int g = token >> 1 & 7; return (g & 1) << 2 | g >> 1; }
// Where a lane's eight channels of row r of W, Qg or Kg go. Tiled: [2][64][64], halves of the channels, rows in fragment
// order (16 w + 8 r + g), their 16-byte pieces permuted by the row's number.
DEVICE int result(int w, int r, int p, int lane) {
    const int g = lane >> 2, t = lane & 3;
    if (TILED) return p / 2 * 4096 + (16 * w + 8 * r + g) * 64 + ((4 * (p % 2) + t) ^ g) * 8;
    return (16 * w + 2 * g + r) * 128 + 32 * p + 8 * t;
}
// A lane's own place in shared memory, `pieces` pieces of 16 bytes for each of four p, 512 bytes apart.
DEVICE int own(int w, int p, int lane, int pieces) { return (w * 4 + p) * pieces * 512 + lane * 16; }
DEVICE void words(uint4 x, u32 *y) { y[0] = x.x; y[1] = x.y; y[2] = x.z; y[3] = x.w; }
DEVICE uint4 whole(const u32 *x) { uint4 y; y.x = x[0]; y.y = x[1]; y.z = x[2]; y.w = x[3]; return y; }
DEVICE void eight(const char *table, int channel, float *y) {
    const float4 a = *(const float4 *)(table + channel * 4), b = *(const float4 *)(table + channel * 4 + 16);
    y[0] = a.x; y[1] = a.y; y[2] = a.z; y[3] = a.w; y[4] = b.x; y[5] = b.y; y[6] = b.z; y[7] = b.w;
}
DEVICE void four(const char *table, int channel, float *y) {
    const float4 a = *(const float4 *)(table + channel * 4);
    y[0] = a.x; y[1] = a.y; y[2] = a.z; y[3] = a.w;
}
// A block of 16 x 16 as two accumulator tiles -> A fragment, fp16.
DEVICE Frag operand(float (*c)[4]) {
    Frag y;
    y.x[0] = pack_f16(c[0][0], c[0][1]);
    y.x[1] = pack_f16(c[0][2], c[0][3]);
    y.x[2] = pack_f16(c[1][0], c[1][1]);
    y.x[3] = pack_f16(c[1][2], c[1][3]);
    return y;
}
// A fragment of a block -> its B fragments, two words a tile.
DEVICE Frag turned(Frag a) {
    UNROLL for (int i = 0; i < 4; i++) a.x[i] = transpose8(a.x[i]);
    return a;
}
// c += a b for blocks of 16 x 16.
DEVICE void product(float (*c)[4], const Frag &a, const Frag &b) {
    mma_f16(c[0], a.x, b.x[0], b.x[1]);
    mma_f16(c[1], a.x, b.x[2], b.x[3]);
}
DEVICE void negative(float (*c)[4], const Frag &a, const Frag &b) {
    product(c, a, b);
    UNROLL for (int i = 0; i < 8; i++) c[i / 4][i % 4] = -c[i / 4][i % 4];
}
DEVICE void zero(float (*c)[4], int tiles) {
    UNROLL for (int i = 0; i < 4 * tiles; i++) c[i / 4][i % 4] = 0.0f;
}
DEVICE void put(char *shared, int slot, int lane, const Frag &x) {
    *(uint4 *)(shared + EXCHANGE + slot * 512 + lane * 16) = whole(x.x);
}
DEVICE Frag get(const char *shared, int slot, int lane) {
    Frag y;
    words(*(const uint4 *)(shared + EXCHANGE + slot * 512 + lane * 16), y.x);
    return y;
}

// (I + M)^-1 of a strictly lower block of 16 x 16 in accumulator layout: T <- T - between(T M T), blocks of 2, 4, 8, 16.
DEVICE void invert16(float (*m)[4], float (*inverse)[4], int g, int t) {
    UNROLL for (int e = 0; e < 2; e++) UNROLL for (int i = 0; i < 4; i++) {
        int row = 2 * g + i / 2, col = 4 * t + 2 * (i % 2) + e;
        inverse[e][i] = row == col ? 1.0f : (row >> 1) == (col >> 1) ? -m[e][i] : 0.0f;
    }
    const Frag right = turned(operand(m));
    UNROLL for (int level = 2; level <= 4; level++) {
        const Frag left = operand(inverse);
        float c[2][4], d[2][4];
        zero(c, 2);
        zero(d, 2);
        product(c, left, right);
        product(d, operand(c), turned(left));
        UNROLL for (int e = 0; e < 2; e++) UNROLL for (int i = 0; i < 4; i++) {
            int row = 2 * g + i / 2, col = 4 * t + 2 * (i % 2) + e;
            bool between = (row >> level) == (col >> level) && (row >> (level - 1)) > (col >> (level - 1));
            if (between) inverse[e][i] -= d[e][i];
        }
    }
}

// Rows of block w of (I + M)^-1: m and inverse are [4 blocks of columns][2 tiles][4]. Warps 0 and 2 hand their diagonal
// blocks on, then blocks of 32, then of 64. Named barriers: nobody waits who does not read.
DEVICE void invert64(char *shared, float (*m)[2][4], float (*inverse)[2][4], int w, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int b = 0; b < 4; b++) zero(inverse[b], 2);
    float diagonal[2][4], own[2][4];
    UNROLL for (int b = 0; b < 4; b++) if (b == w) {
        UNROLL for (int i = 0; i < 8; i++) diagonal[i / 4][i % 4] = m[b][i / 4][i % 4];
    }
    invert16(diagonal, own, g, t);
    UNROLL for (int b = 0; b < 4; b++) if (b == w) {
        UNROLL for (int i = 0; i < 8; i++) inverse[b][i / 4][i % 4] = own[i / 4][i % 4];
    }
    const Frag left = operand(own);
    float c[2][4], d[2][4];
    zero(c, 2);
    zero(d, 2);
    if (w == 0) {
        put(shared, 0, lane, turned(left));
        arrive(1, 64);
        arrive(3, 128);
    } else if (w == 1) {
        await(1, 64);
        product(c, operand(m[0]), get(shared, 0, lane));
        negative(inverse[0], left, turned(operand(c)));
        put(shared, 1, lane, turned(operand(inverse[0])));
        put(shared, 2, lane, turned(left));
        arrive(3, 128);
    } else {
        if (w == 2) {
            put(shared, 3, lane, turned(left));
            arrive(2, 64);
        } else {
            await(2, 64);
            product(c, operand(m[2]), get(shared, 3, lane));
            negative(inverse[2], left, turned(operand(c)));
            zero(c, 2);
        }
        await(3, 128);
        const Frag m1 = operand(m[1]);
        product(c, operand(m[0]), get(shared, 0, lane));
        product(c, m1, get(shared, 1, lane));
        product(d, m1, get(shared, 2, lane));
        const Frag first = turned(operand(c)), second = turned(operand(d));
        if (w == 2) {
            put(shared, 4, lane, first);
            put(shared, 5, lane, second);
            arrive(4, 64);
        } else {
            await(4, 64);
            const Frag below = operand(inverse[2]);
            product(inverse[0], below, get(shared, 4, lane));
            product(inverse[1], below, get(shared, 5, lane));
        }
        negative(inverse[0], left, first);
        negative(inverse[1], left, second);
    }
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS) kda_chunk_cuda(const Args args) {
    SHARED(shared, 128);
    const int thread = threadIdx.x, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int head = blockIdx.x, index = blockIdx.y;
    grid_next();
    // The last rows have the most products: which scheduler gets them changes from block to block.
    const int w = uniform((thread / 32 + head + index) & 3);
    const bool upper = w >= 2;
    const i64 token = args.chunk[index * 4];
    const int rows = args.chunk[index * 4 + 1];
    const i64 place = (i64)index * args.heads + head;
    const int row = 16 * w + 2 * g;
    const bool in0 = row < rows, in1 = row + 1 < rows;

    const u16 *k_row[2], *q_row[2];
    {
        const u16 *z_row[2];
        UNROLL for (int r = 0; r < 2; r++) {
            const i64 at = token + ((r ? in1 : in0) ? row + r : 0);
            const int col = head * 128 + 8 * t;
            k_row[r] = args.k + at * args.k_stride + col;
            q_row[r] = args.q + at * args.q_stride + col;
            z_row[r] = args.z + at * args.z_stride + col;
        }
        ROLLED for (int p = 0; p < 4; p++) UNROLL for (int r = 0; r < 2; r++) {
            const bool in = r ? in1 : in0;
            copy16(shared, KST + own(w, p, lane, 2) + r * 512, z_row[r] + 32 * p, in);
            copy16(shared, SUMS + own(w, p, lane, 4) + r * 512, k_row[r] + 32 * p, in);
            copy16(shared, SUMS + own(w, p, lane, 4) + r * 512 + 1024, q_row[r] + 32 * p, in);
        }
    }
    if (thread / 2 < rows) prefetch(args.v + (token + thread / 2) * args.v_stride + head * 128 + thread % 2 * 64);
    if (thread < 64) {
        float b = 0.0f;
        if (thread < rows) b = args.beta[(token + thread) * args.beta_stride + head];
        *(float *)(shared + BETA + thread * 4) = b;
    }
    const float rate = -1.4426950408889634f * ex2(1.4426950408889634f * args.a_log[head]);
    const float unit = 1.4426950408889634f * args.bound;
    *(float *)(shared + BIAS + thread * 4) = args.dt_bias[head * 128 + thread] * rate;
    copies_done();
    sync_all();

    // Norms, and sums of sigmoids over rows: the cumulative gate of this warp's rows in units of the bound.
    float kk[2] = {0.0f, 0.0f}, qq[2] = {0.0f, 0.0f};
    ROLLED for (int p = 0; p < 4; p++) {
        char *slot = shared + SUMS + own(w, p, lane, 4);
        UNROLL for (int r = 0; r < 2; r++) {
            u32 x[4], y[4];
            words(*(const uint4 *)(slot + r * 512), x);
            words(*(const uint4 *)(slot + r * 512 + 1024), y);
            UNROLL for (int j = 0; j < 4; j++) {
                kk[r] = fused(low(x[j]), low(x[j]), fused(high(x[j]), high(x[j]), kk[r]));
                qq[r] = fused(low(y[j]), low(y[j]), fused(high(y[j]), high(y[j]), qq[r]));
            }
        }
        u32 z0[4], z1[4];
        words(*(const uint4 *)(shared + KST + own(w, p, lane, 2)), z0);
        words(*(const uint4 *)(shared + KST + own(w, p, lane, 2) + 512), z1);
        float bias[8], S[2][8];
        eight(shared + BIAS, 32 * p + 8 * t, bias);
        UNROLL for (int i = 0; i < 8; i++) {
            const float x0 = i % 2 ? high(z0[i / 2]) : low(z0[i / 2]), x1 = i % 2 ? high(z1[i / 2]) : low(z1[i / 2]);
            const float s0 = in0 ? rcp(1.0f + ex2(fused(x0, rate, bias[i]))) : 0.0f;
            const float s1 = in1 ? rcp(1.0f + ex2(fused(x1, rate, bias[i]))) : 0.0f;
            float sum = s0 + s1;
            UNROLL for (int step = 1; step < 8; step *= 2) {
                const float below = shift_rows(sum, 4 * step);
                if (g >= step) sum += below;
            }
            S[0][i] = sum - s1;
            S[1][i] = sum;
        }
        UNROLL for (int i = 0; i < 4; i++) {
            float4 x;
            x.x = S[i / 2][i % 2 * 4];
            x.y = S[i / 2][i % 2 * 4 + 1];
            x.z = S[i / 2][i % 2 * 4 + 2];
            x.w = S[i / 2][i % 2 * 4 + 3];
            *(float4 *)(slot + i * 512) = x;
            if (i >= 2 && g == 7) *(float4 *)(shared + TOTAL + (w * 128 + 32 * p + 8 * t + i % 2 * 4) * 4) = x;
        }
    }
    uint4 k_next[2], q_next[2];
    UNROLL for (int r = 0; r < 2; r++) {
        k_next[r] = load16(k_row[r], r ? in1 : in0);
        q_next[r] = load16(q_row[r], r ? in1 : in0);
    }
    float k_scale[2], q_scale[2];
    UNROLL for (int r = 0; r < 2; r++) {
        kk[r] += swap_lanes(kk[r], 1);
        qq[r] += swap_lanes(qq[r], 1);
        kk[r] += swap_lanes(kk[r], 2);
        qq[r] += swap_lanes(qq[r], 2);
        k_scale[r] = rsq(kk[r] + 1e-6f);
        q_scale[r] = rsq(qq[r] + 1e-6f) * 0.08838834764831845f;
    }
    sync_all();
    {
        const float *total = (const float *)(shared + TOTAL) + thread;
        const float t0 = unit * total[0], t1 = unit * total[128], t2 = unit * total[256], t3 = unit * total[384];
        const float middle1 = 0.5f * (t0 + t1), middle2 = 0.5f * (t2 + t3);
        float *offset = (float *)(shared + OFFSET) + thread;
        offset[0] = -middle1;
        offset[128] = t0 - middle1;
        offset[256] = -middle2;
        offset[384] = t2 - middle2;
        const float half1 = ex2(middle1), half2 = ex2(middle2);
        *(float *)(shared + HALF1 + thread * 4) = half1;
        *(float *)(shared + HALF2 + thread * 4) = half2;
        // From the middle of the first half to the end of the chunk; where this is subnormal, so is every product with it.
        *(float *)(shared + END + thread * 4) = half1 * (half2 * half2);
        args.gamma[place * 128 + thread] = half1 * half1 * half2 * half2;
    }
    sync_all();

    // By 32 channels: keys against their decay from the middle of the half (B fragments, Kg); keys and queries with their
    // decay to it (A fragments, Qg, K exp G); products. The upper warps meet the first half with other factors (`out`).
    float M[4][2][4], A[4][2][4];
    UNROLL for (int b = 0; b < 4; b++) {
        zero(M[b], 2);
        zero(A[b], 2);
    }
    ROLLED for (int p = 0; p < 4; p++) {
        const int channel = 32 * p + 8 * t;
        Frag kin[2], qin[2], kout[2], qout[2];
        char *keys = shared + KUP + p % 2 * 4096;
        u32 up[2][4], end[2][4], out[2][4];
        UNROLL for (int s = 0; s < 2; s++) {
            float offset[4], half1[4], half2[4], last[4];
            four(shared + OFFSET + w * 512, channel + 4 * s, offset);
            four(shared + HALF1, channel + 4 * s, half1);
            four(shared + HALF2, channel + 4 * s, half2);
            four(shared + (upper ? HALF2 : END), channel + 4 * s, last);
            UNROLL for (int r = 0; r < 2; r++) {
                u32 x[4], y[4];
                float S[4], kd[4], qd[4], u[4];
                words(k_next[r], x);
                words(q_next[r], y);
                four(shared + SUMS + own(w, p, lane, 4) + (2 * r + s) * 512, 0, S);
                UNROLL for (int i = 0; i < 4; i++) {
                    const float relative = fused(S[i], unit, offset[i]);
                    const float key = (i % 2 ? high(x[2 * s + i / 2]) : low(x[2 * s + i / 2])) * k_scale[r];
                    const float query = (i % 2 ? high(y[2 * s + i / 2]) : low(y[2 * s + i / 2])) * q_scale[r];
                    const float down = ex2(relative);
                    u[i] = key * ex2(-relative);
                    kd[i] = key * down;
                    qd[i] = query * down;
                }
                UNROLL for (int j = 0; j < 2; j++) {
                    up[r][2 * s + j] = pack_bf16(u[2 * j], u[2 * j + 1]);
                    end[r][2 * s + j] = pack_bf16(u[2 * j] * last[2 * j], u[2 * j + 1] * last[2 * j + 1]);
                    kin[s].x[2 * j + r] = kout[s].x[2 * j + r] = pack_bf16(kd[2 * j], kd[2 * j + 1]);
                    qin[s].x[2 * j + r] = qout[s].x[2 * j + r] = pack_bf16(qd[2 * j], qd[2 * j + 1]);
                }
                // In this order no partial product leaves the exponent range while the whole one is in it.
                if (upper) UNROLL for (int j = 0; j < 2; j++) {
                    UNROLL for (int i = 2 * j; i < 2 * j + 2; i++) {
                        kd[i] = kd[i] * half2[i] * half1[i];
                        qd[i] = qd[i] * half2[i] * half1[i];
                    }
                    kout[s].x[2 * j + r] = pack_bf16(kd[2 * j], kd[2 * j + 1]);
                    qout[s].x[2 * j + r] = pack_bf16(qd[2 * j], qd[2 * j + 1]);
                }
                UNROLL for (int j = 0; j < 2; j++) {
                    out[r][2 * s + j] = pack_bf16(qd[2 * j] * half1[2 * j], qd[2 * j + 1] * half1[2 * j + 1]);
                    *(u32 *)(shared + KST + (row + r) * 256 + ((4 * p + 2 * s + j) ^ swizzle(row)) * 16 + t * 4) =
                        pack_f16(kd[2 * j] * half1[2 * j], kd[2 * j + 1] * half1[2 * j + 1]);
                }
            }
        }
        UNROLL for (int r = 0; r < 2; r++) {
            *(uint4 *)(keys + (2 * w + r) * 512 + lane * 16) = whole(up[r]);
            *(uint4 *)(args.kg + place * 8192 + result(w, r, p, lane)) = whole(end[r]);
            *(uint4 *)(args.qg + place * 8192 + result(w, r, p, lane)) = whole(out[r]);
        }
        if (p < 3) UNROLL for (int r = 0; r < 2; r++) {
            k_next[r] = load16(k_row[r] + 32 * (p + 1), r ? in1 : in0);
            q_next[r] = load16(q_row[r] + 32 * (p + 1), r ? in1 : in0);
        }
        sync_all();
        UNROLL for (int tile = 0; tile < 8; tile++) if (tile <= 2 * w + 1) {
            u32 b[4];
            words(*(const uint4 *)(keys + tile * 512 + lane * 16), b);
            UNROLL for (int s = 0; s < 2; s++) {
                mma_bf16(M[tile / 2][tile % 2], tile < 4 ? kout[s].x : kin[s].x, b[2 * s], b[2 * s + 1]);
                mma_bf16(A[tile / 2][tile % 2], tile < 4 ? qout[s].x : qin[s].x, b[2 * s], b[2 * s + 1]);
            }
        }
    }
    // Nobody reads S any more.
    UNROLL for (int n = 0; n < 8; n++) {
        const int r = n * 8 + thread / 16, piece = thread % 16;
        const bool in = r < rows;
        const u16 *from = args.v + (token + (in ? r : 0)) * args.v_stride + head * 128 + piece * 8;
        copy16(shared, VAL + r * 256 + (piece ^ swizzle(r)) * 16, from, in);
    }
    const float *beta = (const float *)(shared + BETA);
    const float beta0 = beta[row], beta1 = beta[row + 1];
    UNROLL for (int b = 0; b < 4; b++) {
        if (b == w) UNROLL for (int i = 0; i < 4; i++) UNROLL for (int e = 0; e < 2; e++) {
            const int col = 4 * t + 2 * (i % 2) + e, here = 2 * g + i / 2;  // of this block
            M[b][e][i] = here > col ? M[b][e][i] : 0.0f;
            A[b][e][i] = here >= col ? A[b][e][i] : 0.0f;
        }
        UNROLL for (int i = 0; i < 8; i++) M[b][i / 4][i % 4] *= i % 4 / 2 ? beta1 : beta0;
        if (TILED) UNROLL for (int i = 0; i < 4; i++) {
            const int r = i / 2, e = i % 2;  // columns in fragment order too
            *(u32 *)(args.a + place * 4096 + (16 * w + 8 * r + g) * 64 + ((2 * b + e) ^ g) * 8 + 2 * t) =
                pack_bf16(A[b][e][2 * r], A[b][e][2 * r + 1]);
        } else UNROLL for (int r = 0; r < 2; r++) {
            uint2 x;
            x.x = pack_bf16(A[b][0][2 * r], A[b][1][2 * r]);
            x.y = pack_bf16(A[b][0][2 * r + 1], A[b][1][2 * r + 1]);
            *(uint2 *)(args.a + place * 4096 + (row + r) * 64 + 16 * b + 4 * t) = x;
        }
    }
    float T[4][2][4];
    invert64(shared, M, T, w, lane);
    copies_done();
    sync_all();  // K exp G and V are there
    // Rows of T cancel when keys repeat, so its own rounding would show: eleven bits for W, two terms for U, whose other
    // operand needs the range of bfloat16.
    Frag half[4], hi[4], lo[4];
    UNROLL for (int b = 0; b < 4; b++) {
        const float4 x = *(const float4 *)(beta + 16 * b + 4 * t);
        UNROLL for (int i = 0; i < 4; i++) {
            T[b][0][i] *= i % 2 ? x.z : x.x;
            T[b][1][i] *= i % 2 ? x.w : x.y;
        }
        half[b] = operand(T[b]);
        UNROLL for (int i = 0; i < 4; i++) {
            const float *c = T[b][i / 2] + 2 * (i % 2);
            hi[b].x[i] = pack_bf16(c[0], c[1]);
            lo[b].x[i] = pack_bf16(c[0] - low(hi[b].x[i]), c[1] - high(hi[b].x[i]));
        }
    }
    const int matrix = lane >> 3, line = lane & 7;
    // W: rows are tokens. Matrices of a load: tile 2u with e = 0, 1, tile 2u + 1 with e = 0, 1.
    ROLLED for (int p = 0; p < 4; p++) {
        float c[4][4];
        zero(c, 4);
        UNROLL for (int b = 0; b < 4; b++) if (b <= w) {
            UNROLL for (int u = 0; u < 2; u++) {
                const int from = 16 * b + 2 * line + (matrix & 1), piece = 4 * p + 2 * u + (matrix >> 1);
                const Frag x = load_transposed(shared, KST + from * 256 + (piece ^ swizzle(from)) * 16);
                mma_f16(c[2 * u], half[b].x, x.x[0], x.x[1]);
                mma_f16(c[2 * u + 1], half[b].x, x.x[2], x.x[3]);
            }
        }
        UNROLL for (int r = 0; r < 2; r++) {
            u32 x[4];
            UNROLL for (int j = 0; j < 4; j++) x[j] = pack_bf16(-c[j][2 * r], -c[j][2 * r + 1]);
            *(uint4 *)(args.w + place * 8192 + result(w, r, p, lane)) = whole(x);
        }
    }
    // U^T: rows are value channels. Matrices of a load: channels 0-7 and 8-15 with e = 0, then with e = 1.
    ROLLED for (int part = 0; part < 8; part++) {
        float c[2][4], rest[2][4];
        zero(c, 2);
        zero(rest, 2);
        UNROLL for (int b = 0; b < 4; b++) if (b <= w) {
            const int from = 16 * b + 2 * line + (matrix >> 1), piece = 2 * part + (matrix & 1);
            const Frag x = load_transposed(shared, VAL + from * 256 + (piece ^ swizzle(from)) * 16);
            UNROLL for (int e = 0; e < 2; e++) {
                mma_bf16(rest[e], x.x, lo[b].x[e], lo[b].x[2 + e]);
                mma_bf16(c[e], x.x, hi[b].x[e], hi[b].x[2 + e]);
            }
        }
        UNROLL for (int i = 0; i < 8; i++) c[i / 4][i % 4] += rest[i / 4][i % 4];
        if (TILED) {  // accumulator tiles of a warp of the passes: [part][w][lane][16 bytes]
            uint4 x;
            x.x = pack_bf16(c[0][0], c[0][1]);
            x.y = pack_bf16(c[0][2], c[0][3]);
            x.z = pack_bf16(c[1][0], c[1][1]);
            x.w = pack_bf16(c[1][2], c[1][3]);
            *(uint4 *)(args.ut + place * 8192 + ((part * 4 + w) * 32 + lane) * 8) = x;
        } else UNROLL for (int r = 0; r < 2; r++) {
            uint2 x;
            x.x = pack_bf16(c[0][2 * r], c[1][2 * r]);
            x.y = pack_bf16(c[0][2 * r + 1], c[1][2 * r + 1]);
            *(uint2 *)(args.ut + place * 8192 + (16 * part + g + 8 * r) * 64 + 16 * w + 4 * t) = x;
        }
    }
}
