// KDA prefill, the scan over segments: S_{i+1} = S_i P_i + B_i (kda_segment.py), P in two bfloat16 terms, S in two. A block
// owns 16 rows of the state, each of its eight warps 16 columns; every step the warps exchange S as A fragments. P lies in
// memory as the B fragments that a lane needs, so it goes from there to registers, a step ahead of its use.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct ScanArgs {
    float *start;
    const u16 *hi, *lo;
    const int *scan;
    int heads;
};

#ifndef HOST_EMULATION
#define DEVICE static __device__ __forceinline__
#define SHARED(name) extern __shared__ __align__(128) char name[]
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 pack_bf16(float a, float b) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a)); return y; }
DEVICE void sync_all() { __syncthreads(); }
DEVICE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void grid_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void mma_bf16(float *c, const u32 *a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

#define UNROLL _Pragma("unroll")

enum { SCAN_SHARED = 2 * 8192 };  // two buffers of [step][term][lane][16 bytes]

DEVICE float low(u32 x) { return as_float(x << 16); }
DEVICE float high(u32 x) { return as_float(x & 0xffff0000u); }
DEVICE void words(uint4 x, u32 *y) { y[0] = x.x; y[1] = x.y; y[2] = x.z; y[3] = x.w; }

// Tiles of this warp: c[tile][0, 1] row g, [2, 3] row g + 8, columns 2t, 2t + 1.
DEVICE void load(const float *from, float (*c)[4]) {
    UNROLL for (int j = 0; j < 2; j++) UNROLL for (int r = 0; r < 2; r++) {
        const float2 x = *(const float2 *)(from + r * 1024 + j * 8);
        c[j][2 * r] = x.x;
        c[j][2 * r + 1] = x.y;
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) kda_scan_cuda(const ScanArgs args) {
    SHARED(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int first = args.scan[blockIdx.z * 2], segments = args.scan[blockIdx.z * 2 + 1];
    const i64 step = (i64)args.heads * 16384, base = ((i64)first * args.heads + blockIdx.y) * 16384;
    const i64 tile = (blockIdx.x * 16 + g) * 128 + warp * 16 + 2 * t, piece = (warp * 32 + lane) * 8;

    grid_wait();
    grid_next();
    float S[2][4], B[2][4];
    uint4 hi[8], lo[8];
    load(args.start + base + step + tile, S);
    UNROLL for (int k = 0; k < 8; k++) {
        hi[k] = *(const uint4 *)(args.hi + base + step + k * 2048 + piece);
        lo[k] = *(const uint4 *)(args.lo + base + step + k * 2048 + piece);
    }
    if (segments > 2) load(args.start + base + 2 * step + tile, B);
    for (int i = 2; i < segments; i++) {
        char *mine = shared + i % 2 * 8192;
        uint4 x, y;
        x.x = pack_bf16(S[0][0], S[0][1]);
        x.y = pack_bf16(S[0][2], S[0][3]);
        x.z = pack_bf16(S[1][0], S[1][1]);
        x.w = pack_bf16(S[1][2], S[1][3]);
        y.x = pack_bf16(S[0][0] - low(x.x), S[0][1] - high(x.x));
        y.y = pack_bf16(S[0][2] - low(x.y), S[0][3] - high(x.y));
        y.z = pack_bf16(S[1][0] - low(x.z), S[1][1] - high(x.z));
        y.w = pack_bf16(S[1][2] - low(x.w), S[1][3] - high(x.w));
        *(uint4 *)(mine + warp * 1024 + lane * 16) = x;
        *(uint4 *)(mine + warp * 1024 + 512 + lane * 16) = y;
        sync_all();
        float c[3][2][4];
        UNROLL for (int n = 0; n < 24; n++) c[n / 8][n / 4 % 2][n % 4] = 0.0f;
        UNROLL for (int k = 0; k < 8; k++) {
            u32 a[4], rest[4], b[4], less[4];
            words(*(const uint4 *)(mine + k * 1024 + lane * 16), a);
            words(*(const uint4 *)(mine + k * 1024 + 512 + lane * 16), rest);
            words(hi[k], b);
            words(lo[k], less);
            if (i + 1 < segments) {
                hi[k] = *(const uint4 *)(args.hi + base + i * step + k * 2048 + piece);
                lo[k] = *(const uint4 *)(args.lo + base + i * step + k * 2048 + piece);
            }
            UNROLL for (int j = 0; j < 2; j++) {
                mma_bf16(c[0][j], a, b[2 * j], b[2 * j + 1]);
                mma_bf16(c[1][j], rest, b[2 * j], b[2 * j + 1]);
                mma_bf16(c[2][j], a, less[2 * j], less[2 * j + 1]);
            }
        }
        float *to = args.start + base + i * step + tile;
        UNROLL for (int j = 0; j < 2; j++) UNROLL for (int r = 0; r < 2; r++) {
            float2 z;
            S[j][2 * r] = z.x = B[j][2 * r] + ((c[1][j][2 * r] + c[2][j][2 * r]) + c[0][j][2 * r]);
            S[j][2 * r + 1] = z.y = B[j][2 * r + 1] + ((c[1][j][2 * r + 1] + c[2][j][2 * r + 1]) + c[0][j][2 * r + 1]);
            *(float2 *)(to + r * 1024 + j * 8) = z;
        }
        if (i + 1 < segments) load(args.start + base + (i + 1) * step + tile, B);
    }
}
