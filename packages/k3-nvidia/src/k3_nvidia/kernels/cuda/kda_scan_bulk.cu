// KDA prefill, the scan over segments (kda_segment.py) with wgmma and bulk copies: S_{i+1} = S_i P_i + B_i, P in two bfloat16
// terms, S in two. A block owns ROWS rows of a head's state and reads all of P every step, STAGES steps ahead. Products are
// transposed, so that the few rows are the narrow side: [64 columns, 2 ROWS] += P_hi^T [S_hi | S_lo]^T and [64 columns, ROWS]
// += P_lo^T S_hi^T, a warpgroup half of the columns. Both operands lie in shared memory: P^T as kda_passes.cu wrote it,
// S as its owners round it, in one of two buffers, so that a step has one barrier.
//
// A lane has columns c, c + 8 of sixteen; they are neighbours in the order in which the products go over the channels: 16 a + 8 r
// + 2 t + e stands at 16 a + 4 t + 2 e + r, in P's rows too.
//
// The kernel before may still run when this one starts (griddepcontrol); what it wrote is read behind grid_wait only.

#ifndef ROWS
#define ROWS 16
#endif
#ifndef STAGES
#define STAGES 3
#endif

#include "device.cuh"

struct ScanArgs {
    float *start;
    const u16 *hi, *lo;
    const int *scan;
    int heads;
};

#ifndef HOST_EMULATION
#define BEGIN "{ .reg .pred p; setp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned."
// c [64, N] += a [64, 16] b [16, N], both in shared memory with rows of 64 k.
template <int N> DEVICE void product(float (*c)[4], u64 a, u64 b) {
    static_assert(N == 16 || N == 32 || N == 64, "columns of a product");
    if constexpr (N == 16)
        asm volatile(BEGIN "m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0; }"
                     : R4(c, 0), R4(c, 1) : "l"(a), "l"(b));
    else if constexpr (N == 32)
        asm volatile(BEGIN "m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, "
                           "p, 1, 1, 0, 0; }" : R16(c, 0) : "l"(a), "l"(b));
    else
        asm volatile(BEGIN "m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                           "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0; }"
                     : R16(c, 0), R16(c, 4) : "l"(a), "l"(b));
}
#endif

// A stage: hi and lo of P, each [2][128][64]: halves of the channels, rows of 128 bytes (a column of P) with the 128-byte swizzle.
// A buffer of S: [2][2 ROWS][64], rows hi, then rows lo.
enum { TILES_OF_ROWS = ROWS / 8, TERM = 32768, STAGE = 2 * TERM, HALF = ROWS * 256, BUFFER = 2 * HALF,
       STATES = STAGES * STAGE, BARS = STATES + 2 * BUFFER, SCAN_SHARED = BARS + 8 * STAGES + 1024 };

DEVICE void ask(const ScanArgs &args, i64 at, char *shared, int n) {
    char *stage = shared + n % STAGES * STAGE;
    const u32 bar = address(shared + BARS + 8 * (n % STAGES));
    barrier_expect(bar, STAGE);
    bulk_copy(address(stage), args.hi + at, TERM, bar);
    bulk_copy(address(stage + TERM), args.lo + at, TERM, bar);
}
// Tiles of this lane: c[tile][e] row 8 tile + 2 t + e, column c; c[tile][2 + e] the same row, column c + 8.
DEVICE void load(const float *from, float (*c)[4]) {
    UNROLL for (int i = 0; i < 4 * TILES_OF_ROWS; i++) c[i / 4][i % 4] = from[(i / 4 * 8 + i % 2) * 128 + i % 4 / 2 * 8];
}
DEVICE void store(float *to, float (*c)[4]) {
    UNROLL for (int i = 0; i < 4 * TILES_OF_ROWS; i++) to[(i / 4 * 8 + i % 2) * 128 + i % 4 / 2 * 8] = c[i / 4][i % 4];
}

extern "C" __global__ void __launch_bounds__(256, 1) kda_scan_bulk_cuda(const ScanArgs args) {
    SHARED(raw, 1024);
    char *shared = aligned(raw);
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int first = args.scan[blockIdx.z * 2], steps = args.scan[blockIdx.z * 2 + 1] - 2;
    const i64 step = (i64)args.heads * 16384, base = ((i64)first * args.heads + blockIdx.y) * 16384;
    const int half = warp / 4;
    float *const mine = args.start + base + (blockIdx.x * ROWS + 2 * t) * 128 + warp * 16 + g;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_make(address(shared + BARS + 8 * s), 1);
        barriers_made();
        stores_done();
    }
    sync_all();
    grid_wait();
    grid_next();
    // Step n multiplies by the transition of segment first + 1 + n.
    if (threadIdx.x == 0) for (int n = 0; n < STAGES && n < steps; n++) ask(args, base + (n + 1) * step, shared, n);

    float S[TILES_OF_ROWS][4], B[TILES_OF_ROWS][4], next[TILES_OF_ROWS][4];
    load(mine + step, S);
    UNROLL for (int i = 0; i < 4 * TILES_OF_ROWS; i++) B[i / 4][i % 4] = next[i / 4][i % 4] = 0.0f;
    if (steps > 0) load(mine + 2 * step, B);
    for (int n = 0; n < steps; n++) {
        char *stage = shared + n % STAGES * STAGE, *states = shared + STATES + n % 2 * BUFFER;
        UNROLL for (int i = 0; i < 2 * TILES_OF_ROWS; i++) {
            const int tile = i / 2, e = i % 2, row = 8 * tile + 2 * t + e;
            const u32 hi = pack_bf16(S[tile][e], S[tile][2 + e]);
            const u32 lo = pack_bf16(S[tile][e] - low(hi), S[tile][2 + e] - high(hi));
            char *to = states + half * HALF + row * 128 + (((warp % 4 * 2 + g / 4) ^ (row % 8)) << 4) + g % 4 * 4;
            *(u32 *)to = hi;
            *(u32 *)(to + ROWS * 128) = lo;
        }
        stores_done();
        sync_all();
        if (n + 1 < steps) load(mine + (n + 3) * step, next);
        float c[2 * TILES_OF_ROWS][4], rest[TILES_OF_ROWS][4];
        UNROLL for (int i = 0; i < 8 * TILES_OF_ROWS; i++) c[i / 4][i % 4] = 0.0f;
        UNROLL for (int i = 0; i < 4 * TILES_OF_ROWS; i++) rest[i / 4][i % 4] = 0.0f;
        barrier_wait(address(shared + BARS + 8 * (n % STAGES)), (n / STAGES) & 1);
        pin<2 * TILES_OF_ROWS>(c);
        pin<TILES_OF_ROWS>(rest);
        products_begin();
        UNROLL for (int k = 0; k < 8; k++) {
            const int at = k / 4 * 16384 + half * 8192 + k % 4 * 32;
            const u64 state = operand_at(states, k / 4 * HALF + k % 4 * 32);
            product<2 * ROWS>(c, operand_at(stage, at), state);
            product<ROWS>(rest, operand_at(stage, TERM + at), state);
        }
        products_commit();
        // While they run: behind the barrier all have read what the step before multiplied by, so its stage is free.
        if (threadIdx.x == 0 && n > 0 && n - 1 + STAGES < steps) ask(args, base + (n + STAGES) * step, shared, n - 1 + STAGES);
        if (n > 0) store(mine + (n + 1) * step, S);
        products_end<0>();
        pin<2 * TILES_OF_ROWS>(c);
        pin<TILES_OF_ROWS>(rest);
        UNROLL for (int i = 0; i < 4 * TILES_OF_ROWS; i++) {
            const int j = i / 4, m = i % 4;
            S[j][m] = B[j][m] + ((c[TILES_OF_ROWS + j][m] + rest[j][m]) + c[j][m]);
            B[j][m] = next[j][m];
        }
    }
    if (steps > 0) store(mine + (steps + 1) * step, S);
}
