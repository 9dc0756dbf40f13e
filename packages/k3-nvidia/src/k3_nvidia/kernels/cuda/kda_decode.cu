// KDA decode of one row and head, convolution to gated norm, by a cluster of SPLIT blocks that share the value rows.
// Formulas and safety: k3_nvidia/kernels/kda_step.py. bf16 activations, fp32 states of 128 x 128.
//
// A block owns BR = 128 / SPLIT value rows; eight lanes share a row, sixteen of its columns each (4 sub + 32 i + 0 .. 3),
// so a sum over a row is three exchanges and a warp's access four whole lines of 128 bytes. Every block convolves q, k
// and the gate itself; blocks meet once, with their sums of squares for the norm, and only after that meeting does the
// first one move the conv state, which all have read by then.
//
// BULK: the state comes to shared memory in one piece a group of rows, asked for by one thread; else to registers. Either
// way it is asked for as soon as the slot is known, before the convolution's own operands are.

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

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

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
    i64 qkv_stride, z_stride, beta_stride, gate_stride, out_stride, conv_stride, channel_stride, column_stride;
    i64 state_stride, slot_stride;
    float bound, eps;
    int heads;
};

enum { D = 128, THREADS = 32 * WARPS, BR = D / SPLIT, GROUPS = BR / (4 * WARPS), TASKS = 4 * D / THREADS };
// Shared memory: q | k | v | decay, o of this block, sums of squares of all warps of the cluster, barriers, state.
enum { MIX = 0, OUT = 2048, SUMS = 2560, BARS = 2816, STATE = 2944, PIECE = 4 * WARPS * D * 4,
       SHARED_BYTES = STATE + BULK * BR * D * 4 };

#ifndef HOST_EMULATION
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, BLOCKS)
#define SHARED(name) extern __shared__ __align__(128) char name[]
DEVICE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float rsq(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 round_bf16(float x) { u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
DEVICE float natural_log(float x) { return logf(x); }
DEVICE float swap_lanes(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE void sync_all() { __syncthreads(); }
DEVICE int thread_index() { return threadIdx.x; }
DEVICE int rank() { return SPLIT == 1 ? 0 : blockIdx.x; }
DEVICE u32 shared_address(const char *shared, int at) { return (u32)__cvta_generic_to_shared(shared) + at; }
// The next kernel may be launched, and all before this one is complete.
DEVICE void overlap() {
    if (PDL) asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
}
// Every block of a cluster has to run before another writes to it.
DEVICE void cluster_runs() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_runs_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void tell(const char *shared, int at, int block, float x) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared, at)), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}
DEVICE void bars_open(const char *shared, int count) {
    for (int n = 0; n < count; n++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(shared, BARS + 8 * n)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void bulk_copy(const char *shared, int piece, const float *from) {
    u32 bar = shared_address(shared, BARS + 8 * piece), to = shared_address(shared, STATE + piece * PIECE);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"((u32)PIECE) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"((u32)PIECE), "r"(bar)
                 : "memory");
}
DEVICE void bulk_wait(const char *shared, int piece) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra again;\n}" ::"r"(
                     shared_address(shared, BARS + 8 * piece))
                 : "memory");
}
#endif

#define UNROLL _Pragma("unroll")

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

KERNEL kda_decode_cuda(const Args a) {
    SHARED(shared);
    float *mix = (float *)(shared + MIX), *o_rows = (float *)(shared + OUT), *sums = (float *)(shared + SUMS);
    const int t = thread_index(), lane = t % 32, warp = t / 32, sub = lane % 8, quad = lane / 8, block = rank();
    const int head = blockIdx.y, own = block * BR;
    const i64 row = blockIdx.z;
    // Parameters of the layer: no kernel writes them, so they need no wait.
    float4 w[TASKS];
    UNROLL for (int i = 0; i < TASKS; i++) {
        const int task = t + i * THREADS, part = task / D, c = task % D;
        w[i].x = w[i].y = w[i].z = w[i].w = 0.0f;
        if (part < 3) w[i] = *(const float4 *)(a.weight + ((i64)(part * a.heads + head) * D + c) * 4);
        else w[i].x = a.dt_bias[head * D + c];
    }
    const float rate = ex2(a.a_log[head] * 1.4426950408889634f);
    float weight = 0.0f, gate = 0.0f;
    if (t < BR) weight = NORM_BF16 ? from_half(((const u16 *)a.norm)[own + t]) : ((const float *)a.norm)[own + t];
    overlap();
    const i64 slot = WIDE_SLOTS ? ((const i64 *)a.slot)[row * a.slot_stride] : ((const int *)a.slot)[row * a.slot_stride];
    u16 *out = a.out + row * a.out_stride + head * D + own;
    if (slot <= 0) {
        if (t < BR) out[t] = 0;
        return;
    }
    float *state = a.state + slot * a.state_stride + (i64)head * D * D + own * D;
    float4 S[BULK ? 1 : GROUPS][4];
    if (BULK) {
        if (t == 0) {
            bars_open(shared, GROUPS);
            for (int g = 0; g < GROUPS; g++) bulk_copy(shared, g, state + g * (PIECE / 4));
        }
    } else {
        UNROLL for (int g = 0; g < GROUPS; g++) UNROLL for (int i = 0; i < 4; i++)
            S[BULK ? 0 : g][i] = *(const float4 *)(state + ((g * WARPS + warp) * 4 + quad) * D + 4 * sub + 32 * i);
    }
    if (SPLIT > 1) cluster_runs();
    u16 h[TASKS][4];
    u16 *conv = a.conv + slot * a.conv_stride;
    UNROLL for (int i = 0; i < TASKS; i++) {
        const int task = t + i * THREADS, part = task / D, c = task % D;
        const i64 channel = (part * a.heads + head) * D + c;
        if (part < 3) {
            UNROLL for (int n = 0; n < 3; n++) h[i][n] = conv[channel * a.channel_stride + n * a.column_stride];
            h[i][3] = a.qkv[row * a.qkv_stride + channel];
        } else {
            h[i][0] = h[i][1] = h[i][2] = 0;
            h[i][3] = a.z[row * a.z_stride + head * D + c];
        }
    }
    const float beta = a.beta[row * a.beta_stride + head];
    if (t < BR) gate = from_half(a.gate[row * a.gate_stride + head * D + own + t]);
    UNROLL for (int i = 0; i < TASKS; i++) {
        const int task = t + i * THREADS;
        float y = w[i].x * from_half(h[i][0]);
        y += w[i].y * from_half(h[i][1]);
        y += w[i].z * from_half(h[i][2]);
        y += w[i].w * from_half(h[i][3]);
        // Rounded like the tensor that the separate convolution writes; the fourth part is the decay.
        if (task / D < 3) y = from_half(round_bf16(y * sigmoid(y)));
        else y = decay_of(from_half(h[i][3]) + w[i].x, rate, a.bound);
        mix[task] = y;
    }
    sync_all();
    float4 q[4], k[4], d[4];
    float qq = 0.0f, kk = 0.0f, kq = 0.0f;
    UNROLL for (int i = 0; i < 4; i++) {
        q[i] = *(const float4 *)(mix + 4 * sub + 32 * i);
        k[i] = *(const float4 *)(mix + D + 4 * sub + 32 * i);
        d[i] = *(const float4 *)(mix + 3 * D + 4 * sub + 32 * i);
        qq = dot4(q[i], q[i], qq);
        kk = dot4(k[i], k[i], kk);
        kq = dot4(k[i], q[i], kq);
    }
    const float rq = rsq(sum8(qq) + 1e-6f) * 0.08838834764831845f, rk = rsq(sum8(kk) + 1e-6f);
    kq = sum8(kq);
    float squares = 0.0f;
    UNROLL for (int g = 0; g < GROUPS; g++) {
        const int r = (g * WARPS + warp) * 4 + quad;
        float4 s[4];
        float along_k = 0.0f, along_q = 0.0f;
        if (BULK) bulk_wait(shared, g);
        UNROLL for (int i = 0; i < 4; i++) {
            s[i] = BULK ? *(const float4 *)(shared + STATE + (r * D + 4 * sub + 32 * i) * 4) : S[BULK ? 0 : g][i];
            s[i].x *= d[i].x;
            s[i].y *= d[i].y;
            s[i].z *= d[i].z;
            s[i].w *= d[i].w;
            along_k = dot4(s[i], k[i], along_k);
            along_q = dot4(s[i], q[i], along_q);
        }
        along_k = sum8(along_k);
        along_q = sum8(along_q);
        const float u = beta * (mix[2 * D + own + r] - rk * along_k) * rk;
        UNROLL for (int i = 0; i < 4; i++) {
            s[i].x += u * k[i].x;
            s[i].y += u * k[i].y;
            s[i].z += u * k[i].z;
            s[i].w += u * k[i].w;
            *(float4 *)(state + r * D + 4 * sub + 32 * i) = s[i];
        }
        const float o = rq * (along_q + u * kq);
        squares += o * o;
        if (sub == 0) o_rows[r] = o;
    }
    squares += swap_lanes(squares, 8);
    squares += swap_lanes(squares, 16);
    if (SPLIT > 1) {
        cluster_runs_wait();
        if (lane < SPLIT) tell(shared, SUMS + 4 * (block * WARPS + warp), lane, squares);
        cluster_sync();
    } else {
        if (lane == 0) sums[warp] = squares;
        sync_all();
    }
    if (t < BR) {
        float total = 0.0f;
        UNROLL for (int n = 0; n < SPLIT * WARPS; n++) total += sums[n];
        out[t] = (u16)round_bf16(o_rows[t] * rsq(total * (1.0f / D) + a.eps) * weight * sigmoid(gate));
    }
    if (block == 0) {
        UNROLL for (int i = 0; i < TASKS; i++) {
            const int task = t + i * THREADS, part = task / D;
            const i64 channel = (part * a.heads + head) * D + task % D;
            if (part < 3) UNROLL for (int n = 0; n < 3; n++)
                conv[channel * a.channel_stride + n * a.column_stride] = h[i][n + 1];
        }
    }
}
