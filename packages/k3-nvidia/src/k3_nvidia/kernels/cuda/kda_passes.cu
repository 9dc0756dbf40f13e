// KDA prefill, the passes over chunks (formulas: kda_segment.py) with wgmma: one warpgroup owns 64 rows of the state, its
// accumulator is the state and, rounded, the left operand from registers. A block is GROUPS warpgroups that share every
// chunk's operands; the warp that leaves a stage last asks for its next contents (bulk copies, nobody waits).
//
// The operands lie in memory as kda_chunk.cu writes them with TILED: the bytes that a wgmma with 128-byte swizzle reads.
// Tokens of a chunk stand in the order 16 w + 8 e + n <-> token 16 w + 2 n + e everywhere (rows of W, Qg, Kg, A,
// columns of A, columns of U), so that the chunk kernel stores what its lanes hold.

#ifndef OUTPUT
#define OUTPUT 1
#endif
#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef STATE_BF16
#define STATE_BF16 0
#endif

#include "device.cuh"

struct PassArgs {
    const u16 *w, *u, *qg, *kg, *a;
    const float *gamma;
    const int *chunk, *segment, *order;
    float *start;
    u16 *hi, *lo, *out;
    void *state;
    const int *slot;
    const unsigned char *init;
    i64 out_stride, state_stride, slot_stride;
    int heads;
};

#ifndef HOST_EMULATION
// The value before an addition in shared memory; what this warp read before is read.
DEVICE int count_one(char *counter) {
    __threadfence_block();
    return atomicAdd((int *)counter, 1);
}
// c [64, 64] += a [64, 16] b [16, 64], b in shared memory with rows of n, 64 k each.
DEVICE void product64(float (*c)[4], const u32 *a, u64 b) {
    asm volatile(
        "{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,"
        "%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
        : R4(c, 0), R4(c, 1), R4(c, 2), R4(c, 3), R4(c, 4), R4(c, 5), R4(c, 6), R4(c, 7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// c [64, 128] += a [64, 16] b [16, 128], b in shared memory with rows of k, two tiles of 64 n.
DEVICE void product128(float (*c)[4], const u32 *a, u64 b) {
    asm volatile(
        "{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,"
        "%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,"
        "%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, p, 1, 1, 1; }"
        : R4(c, 0), R4(c, 1), R4(c, 2), R4(c, 3), R4(c, 4), R4(c, 5), R4(c, 6), R4(c, 7), R4(c, 8), R4(c, 9), R4(c, 10),
          R4(c, 11), R4(c, 12), R4(c, 13), R4(c, 14), R4(c, 15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

// One stage of shared memory; a tile of W, Kg, Qg is [2][64][64]: halves of the channels, rows of 128 bytes.
enum { W_AT = 0, KG_AT = 16384, QG_AT = 32768, A_AT = 49152, GAMMA_AT = OUTPUT ? 57344 : 32768,
       STAGE = OUTPUT ? 58368 : 33792, BYTES = OUTPUT ? 57856 : 33280, BARS = STAGES * STAGE,
       PASS_SHARED = BARS + 16 * STAGES + 1024 };

// Rows r and r + 8 of accumulator tiles 2s, 2s + 1 -> the left operand of step s.
DEVICE void left(float (*c)[4], int s, u32 *a) {
    a[0] = pack_bf16(c[2 * s][0], c[2 * s][1]);
    a[1] = pack_bf16(c[2 * s][2], c[2 * s][3]);
    a[2] = pack_bf16(c[2 * s + 1][0], c[2 * s + 1][1]);
    a[3] = pack_bf16(c[2 * s + 1][2], c[2 * s + 1][3]);
}
template <int N> DEVICE void pin(u32 *a) { UNROLL for (int i = 0; i < N; i++) pinned(a[i]); }

// Two words of two values each -> (x0, y0), (x1, y1).
DEVICE uint2 interleaved(const u32 *x) {
    uint2 y;
    y.x = (x[0] & 0xffff) | x[1] << 16;
    y.y = x[0] >> 16 | (x[1] & 0xffff0000u);
    return y;
}
DEVICE void pair(const float *from, int row, int col, float *to) {
    const float2 z = *(const float2 *)(from + row * 128 + col);
    to[0] = z.x;
    to[1] = z.y;
}
// Asks for the operands of a chunk of the segment.
DEVICE void ask(const PassArgs &args, i64 place, char *shared, int n) {
    const i64 at = place + (i64)n * args.heads;
    char *stage = shared + n % STAGES * STAGE;
    const u32 bar = address(shared + BARS + 8 * (n % STAGES));
    barrier_expect(bar, BYTES);
    bulk_copy(address(stage + W_AT), args.w + at * 8192, 16384, bar);
    if (OUTPUT) bulk_copy(address(stage + QG_AT), args.qg + at * 8192, 16384, bar);
    bulk_copy(address(stage + KG_AT), args.kg + at * 8192, 16384, bar);
    if (OUTPUT) bulk_copy(address(stage + A_AT), args.a + at * 4096, 8192, bar);
    bulk_copy(address(stage + GAMMA_AT), args.gamma + at * 128, 512, bar);
}

extern "C" __global__ void __launch_bounds__(GROUPS * 128, 1) kda_pass_cuda(const PassArgs args) {
    SHARED(raw, 1024);
    char *shared = aligned(raw);
    char *full = shared + BARS, *left_by = full + 8 * STAGES;
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int head = blockIdx.y;
    const int segment = OUTPUT ? blockIdx.z : args.order[blockIdx.z];
    const int chunk0 = args.segment[segment * 4], chunks = args.segment[segment * 4 + 1];
    const int seq = args.segment[segment * 4 + 2], flags = args.segment[segment * 4 + 3];
    const i64 place = (i64)chunk0 * args.heads + head;
    const bool first = (flags & 1) != 0, several = (flags & 4) != 0;
    // The transition of a first segment is multiplied by nothing.
    if (!OUTPUT && first && blockIdx.x * GROUPS >= 2) return;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_make(address(full + 8 * s), 1);
            *(int *)(left_by + 8 * s) = 0;
        }
        barriers_made();
        stores_done();
    }
    sync_all();
    // A launch of the output pass that overlaps the one before it follows the local pass, so the chunk kernel has ended
    // and its results may be asked for; what the scan writes waits.
    if (!OUTPUT) grid_wait();
    if (threadIdx.x == 0) for (int n = 0; n < STAGES && n < chunks; n++) ask(args, place, shared, n);
    if (OUTPUT) grid_wait();
    grid_next();

    // This warp's sixteen rows: row0 + g and row0 + g + 8 of 128 (values), or of 256 (values, then rows of the transition).
    const int group = blockIdx.x * (4 * GROUPS) + warp, row0 = group % 8 * 16;
    const bool values = group < 8;
    const i64 matrix = ((i64)segment * args.heads + head) * 16384;
    const int slot = args.slot[seq * args.slot_stride];
    const bool known = values && (OUTPUT ? !several : first);
    const bool use = known && slot > 0 && args.init[seq] != 0;
    const i64 state_at = (i64)slot * args.state_stride + (i64)head * 16384;
    float S[16][4];
    UNROLL for (int i = 0; i < 64; i++) {
        const int row = row0 + g + i % 4 / 2 * 8, col = i / 4 * 8 + 2 * t + i % 2;
        S[i / 4][i % 4] = !values && row == col ? 1.0f : 0.0f;
    }
    if (OUTPUT && several) {
        UNROLL for (int i = 0; i < 32; i++) pair(args.start + matrix, row0 + g + i % 2 * 8, i / 2 * 8 + 2 * t, &S[i / 2][i % 2 * 2]);
    } else if (use && STATE_BF16) {
        const u16 *from = (const u16 *)args.state + state_at;
        UNROLL for (int i = 0; i < 32; i++) {
            const u32 z = *(const u32 *)(from + (row0 + g + i % 2 * 8) * 128 + i / 2 * 8 + 2 * t);
            S[i / 2][i % 2 * 2] = low(z);
            S[i / 2][i % 2 * 2 + 1] = high(z);
        }
    } else if (use) {
        const float *from = (const float *)args.state + state_at;
        UNROLL for (int i = 0; i < 32; i++) pair(from, row0 + g + i % 2 * 8, i / 2 * 8 + 2 * t, &S[i / 2][i % 2 * 2]);
    }
    if (!OUTPUT && known) UNROLL for (int i = 0; i < 32; i++) {
        float2 z;
        z.x = S[i / 2][i % 2 * 2];
        z.y = S[i / 2][i % 2 * 2 + 1];
        *(float2 *)(args.start + matrix + (row0 + g + i % 2 * 8) * 128 + i / 2 * 8 + 2 * t) = z;
    }

    uint4 u[4];
    const uint4 *u_at = (const uint4 *)(args.u + place * 8192) + (row0 / 16 * 4) * 32 + lane;
    UNROLL for (int w = 0; w < 4; w++) {
        u[w].x = u[w].y = u[w].z = u[w].w = 0;
        if (values) u[w] = u_at[w * 32];
    }
    for (int n = 0; n < chunks; n++) {
        const int s = n % STAGES;
        char *stage = shared + s * STAGE;
        float fresh[8][4], o[8][4];
        u32 a[8][4], b[4][4];
        UNROLL for (int w = 0; w < 4; w++) {
            fresh[2 * w][0] = low(u[w].x);
            fresh[2 * w][1] = high(u[w].x);
            fresh[2 * w][2] = low(u[w].y);
            fresh[2 * w][3] = high(u[w].y);
            fresh[2 * w + 1][0] = low(u[w].z);
            fresh[2 * w + 1][1] = high(u[w].z);
            fresh[2 * w + 1][2] = low(u[w].w);
            fresh[2 * w + 1][3] = high(u[w].w);
        }
        UNROLL for (int i = 0; i < 32; i++) o[i / 4][i % 4] = 0.0f;
        UNROLL for (int k = 0; k < 8; k++) left(S, k, a[k]);
        int token = 0, valid = 0;
        if (OUTPUT) {
            token = args.chunk[(chunk0 + n) * 4];
            valid = args.chunk[(chunk0 + n) * 4 + 1];
        }
        u_at += (i64)args.heads * 1024;
        if (values && n + 1 < chunks) UNROLL for (int w = 0; w < 4; w++) u[w] = u_at[w * 32];
        barrier_wait(address(full + 8 * s), (n / STAGES) & 1);
        UNROLL for (int j = 0; j < 16; j++) {
            const float2 gamma = *(const float2 *)(stage + GAMMA_AT + (8 * j + 2 * t) * 4);
            S[j][0] *= gamma.x;
            S[j][1] *= gamma.y;
            S[j][2] *= gamma.x;
            S[j][3] *= gamma.y;
        }

        pin<8>(fresh);
        UNROLL for (int k = 0; k < 8; k++) pin<4>(a[k]);
        products_begin();
        UNROLL for (int k = 0; k < 8; k++) product64(fresh, a[k], operand_at(stage, W_AT + k / 4 * 8192 + k % 4 * 32, 8192));
        products_commit();
        if (OUTPUT) {
            pin<8>(o);
            products_begin();
            UNROLL for (int k = 0; k < 8; k++) product64(o, a[k], operand_at(stage, QG_AT + k / 4 * 8192 + k % 4 * 32, 8192));
            products_commit();
        }
        if (OUTPUT) products_end<1>();
        else products_end<0>();
        pin<8>(fresh);
        UNROLL for (int k = 0; k < 4; k++) left(fresh, k, b[k]);
        pin<16>(S);
        UNROLL for (int k = 0; k < 4; k++) pin<4>(b[k]);
        products_begin();
        UNROLL for (int k = 0; k < 4; k++) product128(S, b[k], operand_at(stage, KG_AT + k * 2048, 8192));
        if (OUTPUT) UNROLL for (int k = 0; k < 4; k++) product64(o, b[k], operand_at(stage, A_AT + k * 32, 8192));
        products_commit();
        products_end<0>();
        pin<16>(S);
        pin<8>(o);
        UNROLL for (int k = 0; k < 8; k++) pin<4>(a[k]);
        UNROLL for (int k = 0; k < 4; k++) pin<4>(b[k]);
        if (lane == 0 && count_one(left_by + 8 * s) == 4 * GROUPS * (n / STAGES + 1) - 1 && n + STAGES < chunks)
            ask(args, place, shared, n + STAGES);

        // Transposed, a lane has a token's channels 2t, 2t + 1 and eight further.
        if (OUTPUT) UNROLL for (int j = 0; j < 8; j++) {
            const int at = 16 * (j / 2) + 2 * g + j % 2;
            UNROLL for (int r = 0; r < 2; r++) {
                const u32 x = transpose8(pack_bf16(o[j][2 * r], o[j][2 * r + 1]));
                u16 *to = args.out + (i64)(token + at) * args.out_stride + head * 128 + row0 + 8 * r + 2 * t;
                if (at < valid) *(u32 *)to = slot > 0 ? x : 0;
            }
        }
    }

    if (OUTPUT && ((flags & 2) == 0 || slot <= 0)) return;
    UNROLL for (int j = 0; j < 16; j++) UNROLL for (int r = 0; r < 2; r++) {
        const int row = row0 + g + 8 * r, col = 8 * j + 2 * t;
        const float x = S[j][2 * r], y = S[j][2 * r + 1];
        float2 z;
        z.x = x;
        z.y = y;
        if (OUTPUT && STATE_BF16) {
            *(u32 *)((u16 *)args.state + state_at + row * 128 + col) = pack_bf16(x, y);
        } else if (OUTPUT) {
            *(float2 *)((float *)args.state + state_at + row * 128 + col) = z;
        } else if (values) {
            *(float2 *)(args.start + matrix + (i64)args.heads * 16384 + row * 128 + col) = z;
        }
    }
    // The transition in two terms, as the left operand of kda_scan_bulk.cu: halves of k, 128 rows (columns of P) of 128 bytes
    // with the 128-byte swizzle, k = 16 a + 8 r + 2 t + e at place 16 a + 4 t + 2 e + r.
    if (!OUTPUT && !values) UNROLL for (int j = 0; j < 16; j++) {
        u32 hi[2], lo[2];
        UNROLL for (int r = 0; r < 2; r++) {
            const float x = S[j][2 * r], y = S[j][2 * r + 1];
            const u32 h = pack_bf16(x, y);
            hi[r] = transpose8(h);
            lo[r] = transpose8(pack_bf16(x - low(h), y - high(h)));
        }
        const int piece = (row0 / 16 % 4 * 2 + t / 2) ^ g;
        const i64 at = matrix + row0 / 64 * 8192 + (8 * j + g) * 64 + piece * 8 + t % 2 * 4;
        *(uint2 *)(args.hi + at) = interleaved(hi);
        *(uint2 *)(args.lo + at) = interleaved(lo);
    }
}
