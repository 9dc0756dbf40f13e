// Runs a CUDA kernel of this package on the CPU: every thread of a block is a fiber, operations of a warp and barriers
// are meetings, who runs next is drawn at random, shared memory starts as NaN. Included before the kernel's source with
// HOST_EMULATION defined; offers the names that its device part offers. Layouts are those of the PTX manual.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <random>
#include <vector>

struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
struct dim3_ { int x, y, z; };
static dim3_ threadIdx, blockIdx;
#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)
#define SHARED(name, alignment) char *name = emulator.shared

struct Frag { unsigned x[4]; };

struct Meeting { unsigned given[2][32][8]; int arrived = 0; long generation = 0; };
struct Barrier { int arrived = 0; long generation = 0; };
// An mbarrier: completed phases; of the current one, arrivals to come and bytes to come.
struct Phases { long done = 0; int count = 0, arrivals = 0; long bytes = 0; };
struct Copy { unsigned to; const void *from; int bytes; unsigned bar; };
// Products that a thread has asked for, a list a group of them.
typedef std::vector<std::vector<std::function<void()>>> Products;

struct Emulator {
    std::vector<ucontext_t> fibers;
    std::vector<char *> stacks;
    ucontext_t home;
    std::vector<int> done;
    std::vector<Meeting> warps;
    std::vector<long> met;  // meetings a thread took part in
    std::vector<const long *> waits;
    std::vector<long> turns;
    Barrier barriers[16];
    std::map<unsigned, Phases> phases;  // by address in shared memory
    std::vector<Copy> copies;  // asked for, not yet there
    bool lazy = false;  // copies come when nobody can go on without them, not when they like
    std::vector<Products> products;
    bool late = false;  // products of this block read their operands when they are waited for, not when they are asked for
    char *shared = nullptr;
    int current = 0, threads = 0;
    std::mt19937 random{1};

    // Runs others until the counter has passed the turn.
    void await(const long *counter, long turn) {
        waits[current] = counter;
        turns[current] = turn;
        swapcontext(&fibers[current], &home);
    }

    // Gives up to eight words, returns those of all lanes; they stay until this lane's next meeting but one.
    const unsigned (*meet(std::initializer_list<unsigned> words))[8] {
        Meeting &m = warps[current / 32];
        const long turn = met[current]++;
        std::copy(words.begin(), words.end(), m.given[turn % 2][current % 32]);
        if (++m.arrived == 32) { m.arrived = 0; m.generation++; }
        if (m.generation <= turn) await(&m.generation, turn);
        return m.given[turn % 2];
    }
    void arrive(int id, int count, bool wait) {
        Barrier &b = barriers[id];
        const long turn = b.generation;
        if (++b.arrived == count) { b.arrived = 0; b.generation++; }
        if (wait && b.generation == turn) await(&b.generation, turn);
    }
    void settle(Phases &p) {
        if (p.arrivals > 0 || p.bytes > 0) return;
        p.arrivals = p.count;
        p.done++;
    }
    void bring(size_t i) {
        const Copy c = copies[i];
        copies.erase(copies.begin() + i);
        std::memcpy(shared + c.to, c.from, c.bytes);
        phases[c.bar].bytes -= c.bytes;
        settle(phases[c.bar]);
    }
    // False where every thread waits for something that never comes.
    template <class Body> bool run(int count, int shared_bytes, Body body) {
        threads = count;
        fibers.resize(count);
        while ((int)stacks.size() < count) stacks.push_back((char *)std::malloc(1 << 17));
        done.assign(count, 0);
        warps.assign(count / 32, Meeting());
        met.assign(count, 0);
        static const long free_to_run = 1;
        waits.assign(count, &free_to_run);
        turns.assign(count, 0);
        for (Barrier &b : barriers) b = Barrier();
        phases.clear();
        copies.clear();
        products.assign(count, Products(1));
        late = random() % 2;
        shared = (char *)std::aligned_alloc(1024, (shared_bytes + 1023) / 1024 * 1024);
        std::memset(shared, 0xff, shared_bytes);
        static Body *entry;
        entry = &body;
        for (int i = 0; i < count; i++) {
            getcontext(&fibers[i]);
            fibers[i].uc_stack.ss_sp = stacks[i];
            fibers[i].uc_stack.ss_size = 1 << 17;
            fibers[i].uc_link = nullptr;
            makecontext(&fibers[i], (void (*)())(void (*)(int))+[](int n) {
                (*entry)();
                extern Emulator emulator;
                emulator.done[n] = 1;
                swapcontext(&emulator.fibers[n], &emulator.home);
            }, 1, i);
        }
        int left = count;
        long idle = 0;
        int ahead = 0;
        while (left) {
            if (!copies.empty() && (lazy ? idle > 4096 : random() % 256 == 0)) bring(random() % copies.size());
            // One warp runs ahead until it must wait, so that races of distant warps come up too.
            current = random() % 8 ? ahead * 32 + random() % 32 : random() % count;
            if (++idle > 1000000) break;
            if (done[current] || *waits[current] <= turns[current]) {
                if (current / 32 == ahead && random() % 16 == 0) ahead = random() % (count / 32);
                continue;
            }
            idle = 0;
            threadIdx = {current, 0, 0};
            swapcontext(&home, &fibers[current]);
            left -= done[current];
        }
        std::free(shared);
        return left == 0;
    }
};
Emulator emulator;

inline float as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned as_word(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float ex2(float x) { float y = std::exp2(x); return std::fabs(y) < 1.1754944e-38f ? 0.0f : y; }
inline float rcp(float x) { return 1.0f / x; }
inline float rsq(float x) { return 1.0f / std::sqrt(x); }
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned round_bf16(float x) {
    unsigned y = as_word(x);
    if (x != x) return 0x7fff;
    return (y + 0x7fff + (y >> 16 & 1)) >> 16;
}
inline unsigned round_f16(float x) { _Float16 y = (_Float16)x; uint16_t z; std::memcpy(&z, &y, 2); return z; }
inline float from_bf16(unsigned x) { return as_float(x << 16); }
inline float from_f16(unsigned x) { uint16_t z = x; _Float16 y; std::memcpy(&y, &z, 2); return (float)y; }
inline unsigned pack_bf16(float a, float b) { return round_bf16(a) | round_bf16(b) << 16; }
inline unsigned pack_f16(float a, float b) { return round_f16(a) | round_f16(b) << 16; }
inline uint4 load16(const void *p, bool inside) {
    uint4 y = {0, 0, 0, 0};
    if ((uintptr_t)p % 16) { std::fprintf(stderr, "unaligned\n"); std::abort(); }
    if (inside) std::memcpy(&y, p, 16);
    return y;
}
inline void copy16(char *shared, int at, const void *p, bool inside) {
    uint4 y = load16(p, inside);
    std::memcpy(shared + at, &y, 16);
}
inline void copies_done() {}
inline void prefetch(const void *) {}
inline float exchange(float x, int source) { return as_float(emulator.meet({as_word(x)})[source][0]); }
inline int self() { return emulator.current % 32; }
inline float shift_rows(float x, int lanes) { int s = self() - lanes; return exchange(x, s < 0 ? self() : s); }
inline float swap_lanes(float x, int mask) { return exchange(x, self() ^ mask); }
inline void sync_all() { emulator.arrive(0, emulator.threads, true); }
inline void arrive(int barrier, int threads) { emulator.arrive(barrier, threads, false); }
inline void await(int barrier, int threads) { emulator.arrive(barrier, threads, true); }

inline float half_of(unsigned word, int i, bool bf16) {
    unsigned x = i ? word >> 16 : word & 0xffff;
    return bf16 ? from_bf16(x) : from_f16(x);
}
inline void mma(float *c, const unsigned *a, unsigned b0, unsigned b1, bool bf16) {
    const unsigned (*all)[8] = emulator.meet({a[0], a[1], a[2], a[3], b0, b1});
    const int g = self() / 4, t = self() % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i / 2), col = 2 * t + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            // a: lane (row % 8, k % 8 / 2), register row / 8 + 2 (k / 8); b: lane (col, k % 8 / 2), register k / 8
            const unsigned x = all[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            const unsigned y = all[col * 4 + k % 8 / 2][4 + k / 8];
            sum += (double)half_of(x, k % 2, bf16) * half_of(y, k % 2, bf16);
        }
        c[i] = (float)sum;
    }
}
inline void mma_bf16(float *c, const unsigned *a, unsigned b0, unsigned b1) { mma(c, a, b0, b1, true); }
inline void mma_f16(float *c, const unsigned *a, unsigned b0, unsigned b1) { mma(c, a, b0, b1, false); }
inline unsigned transpose8(unsigned x) {
    const unsigned (*all)[8] = emulator.meet({x});
    const int g = self() / 4, t = self() % 4;
    unsigned y = 0;
    for (int i = 0; i < 2; i++) y |= (all[(2 * t + i) * 4 + g / 2][0] >> (16 * (g % 2)) & 0xffff) << (16 * i);
    return y;
}
inline Frag load_transposed(const char *shared, int at) {
    const unsigned (*all)[8] = emulator.meet({(unsigned)at});
    const int g = self() / 4, t = self() % 4;
    Frag y;
    for (int m = 0; m < 4; m++) {
        y.x[m] = 0;
        for (int i = 0; i < 2; i++) {
            uint16_t z;
            std::memcpy(&z, shared + all[8 * m + 2 * t + i][0] + 2 * g, 2);
            y.x[m] |= (unsigned)z << (16 * i);
        }
    }
    return y;
}

// Bulk copies, mbarriers, and products of a warpgroup with their right operand in shared memory.
typedef unsigned long long u64_;
inline int uniform(int x) { return (int)emulator.meet({(unsigned)x})[0][0]; }
inline unsigned address(const char *shared) { return (unsigned)(shared - emulator.shared); }
inline char *aligned(char *shared) { return shared; }
inline void barrier_make(unsigned bar, int count) {
    emulator.phases[bar] = Phases();
    emulator.phases[bar].count = emulator.phases[bar].arrivals = count;
}
inline void barriers_made() {}
inline void barrier_expect(unsigned bar, int bytes) {
    Phases &p = emulator.phases.at(bar);
    p.bytes += bytes;
    p.arrivals--;
    emulator.settle(p);
}
inline void barrier_wait(unsigned bar, int parity) {
    Phases &p = emulator.phases.at(bar);
    if ((p.done & 1) == parity) emulator.await(&p.done, p.done);
}
inline void bulk_copy(unsigned to, const void *from, int bytes, unsigned bar) {
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16) { std::fprintf(stderr, "unaligned copy\n"); std::abort(); }
    std::memset(emulator.shared + to, 0xff, bytes);
    emulator.copies.push_back({to, from, bytes, bar});
}
inline int count_one(char *counter) { int x; std::memcpy(&x, counter, 4); int y = x + 1; std::memcpy(counter, &y, 4); return x; }
inline void grid_wait() {}
inline void grid_next() {}
inline void stores_done() {}
inline void products_begin() {}
inline void products_commit() { emulator.products[emulator.current].emplace_back(); }
// Products run as late as they may, or at once. A warp leaves together: what its lanes read is read.
template <int PENDING> inline void products_end() {
    Products &mine = emulator.products[emulator.current];
    while ((int)mine.size() > PENDING + 1) {
        const auto group = mine.front();
        mine.erase(mine.begin());
        for (const auto &product : group) product();
    }
    emulator.meet({0});
}
inline void asked(std::function<void()> product) {
    if (emulator.late) emulator.products[emulator.current].back().push_back(product);
    else product();
}
inline void pinned(float &) {}
inline void pinned(unsigned &) {}
// A descriptor's element: rows of 128 bytes, eight of them apart by `stride`, tiles of 64 columns apart by `leading`, the 16-byte
// pieces of a row permuted by its number (address bits 4-6 ^= bits 7-9).
inline float right(u64_ d, int k, int n, bool rows_of_k) {
    const unsigned start = (d & 0x3fff) << 4, leading = (d >> 16 & 0x3fff) << 4, stride = (d >> 32 & 0x3fff) << 4;
    const int row = rows_of_k ? k : n, col = rows_of_k ? n : k;
    if (d >> 62 != 1) { std::fprintf(stderr, "not the 128-byte swizzle\n"); std::abort(); }
    unsigned at = start + row % 8 * 128 + row / 8 * stride + col / 64 * leading + col % 64 * 2;
    at ^= (at >> 7 & 7) << 4;
    uint16_t x;
    std::memcpy(&x, emulator.shared + at, 2);
    return from_bf16(x);
}
inline void warpgroup_product(float (*c)[4], const unsigned *a, u64_ b, int tiles, bool rows_of_k) {
    const unsigned (*all)[8] = emulator.meet({a[0], a[1], a[2], a[3]});
    const int g = self() / 4, t = self() % 4;
    float left[2][16];
    for (int r = 0; r < 2; r++) for (int k = 0; k < 16; k++)
        left[r][k] = half_of(all[g * 4 + k % 8 / 2][r + 2 * (k / 8)], k % 2, true);
    for (int j = 0; j < tiles; j++) for (int i = 0; i < 4; i++) {
        double sum = c[j][i];
        for (int k = 0; k < 16; k++) sum += (double)left[i / 2][k] * right(b, k, 8 * j + 2 * t + i % 2, rows_of_k);
        c[j][i] = (float)sum;
    }
}
inline void product64(float (*c)[4], const unsigned *a, u64_ b) { asked([=] { warpgroup_product(c, a, b, 8, false); }); }
inline void product128(float (*c)[4], const unsigned *a, u64_ b) { asked([=] { warpgroup_product(c, a, b, 16, true); }); }
// c [64, N] += a [64, 16] b [16, N], both in shared memory; this warp's rows are a quarter of a's.
template <int N> inline void product(float (*c)[4], u64_ a, u64_ b) {
    asked([=] {
        const int g = self() / 4, t = self() % 4, warp = emulator.current / 32 % 4;
        for (int i = 0; i < N / 2; i++) {
            double sum = c[i / 4][i % 4];
            for (int k = 0; k < 16; k++)
                sum += (double)right(a, k, 16 * warp + g + i % 4 / 2 * 8, false) * right(b, k, i / 4 * 8 + 2 * t + i % 2, false);
            c[i / 4][i % 4] = (float)sum;
        }
    });
}
