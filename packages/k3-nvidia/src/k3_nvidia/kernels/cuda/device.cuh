// What the sources of this folder share: names of types, single instructions as functions, halves of words, operands in shared
// memory. cuda_host.source puts it where a source includes it: NVRTC gets one text, and the key of a cached binary covers all of
// it. Where the tests run a source on the CPU (HOST_EMULATION), their cuda_emulation.hpp offers the instructions.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define UNROLL _Pragma("unroll")

#ifndef HOST_EMULATION
#define DEVICE static __device__ __forceinline__
#define SHARED(name, alignment) extern __shared__ __align__(alignment) char name[]

DEVICE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float rsq(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
// Two values rounded to one word, the first in the low half.
DEVICE u32 pack_bf16(float a, float b) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a)); return y; }
DEVICE float swap_lanes(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
// Lane (g, t) gets elements [2t, 2t + 1][g] of the 8 x 8 matrix whose row g, columns 2t, 2t + 1 it gives.
DEVICE u32 transpose8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE void sync_all() { __syncthreads(); }
// In shared memory. (A sum of addresses and the address of a sum are not the same code: each place keeps to one.)
DEVICE u32 address(const char *shared) { return (u32)__cvta_generic_to_shared(shared); }

// The kernel before has ended, and what it wrote is there; the one after may start, up to its own wait. Before sm_90 no two
// overlap.
DEVICE void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void grid_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// From here on sm_90 or newer. An mbarrier counts arrivals, and the bytes that bulk copies bring from memory.
DEVICE void barrier_make(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 bar, int parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again; }" ::"r"(bar), "r"(parity) : "memory");
}
DEVICE void bulk_copy(u32 to, const void *from, int bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar) : "memory");
}
// What this thread stored to shared memory, copies and products may touch behind the next barrier.
DEVICE void stores_done() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Products of a warpgroup (wgmma): their registers are the tensor core's from products_begin to products_end; `pinned` keeps
// the compiler from moving their other uses across. R4, R16: accumulator tiles as operands of an instruction.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void products_end() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
DEVICE void pinned(float &x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void pinned(u32 &x) { asm volatile("" : "+r"(x)::"memory"); }
#define R4(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define R16(c, i) R4(c, i), R4(c, i + 1), R4(c, i + 2), R4(c, i + 3)
// Where operands with 128-byte swizzle may start.
DEVICE char *aligned(char *shared) { return shared + (1024 - address(shared) % 1024) % 1024; }
#endif

DEVICE float low(u32 x) { return as_float(x << 16); }
DEVICE float high(u32 x) { return as_float(x & 0xffff0000u); }
// Descriptor of an operand in shared memory with 128-byte swizzle: groups of eight rows 1024 bytes apart, tiles of 64 columns
// `apart` where there are several.
DEVICE u64 operand_at(const char *shared, int at, int apart = 16) {
    return (u64)((address(shared) + at) >> 4 & 0x3fff) | (u64)(apart >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
template <int N> DEVICE void pin(float (*c)[4]) { UNROLL for (int i = 0; i < 4 * N; i++) pinned(c[i / 4][i % 4]); }
