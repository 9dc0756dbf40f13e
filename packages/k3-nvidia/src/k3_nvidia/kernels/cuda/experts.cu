// The two products of MXFP4 experts for many tokens on Hopper (formulas: experts_gemm.py; layout of codes and scales:
// moe_layout.py), warps specialised: one warpgroup brings operands, GROUPS warpgroups decode and multiply.
//
//   DOWN 0   y[first + j, c] = act(gate, up),  gate, up = rows of W13 times x[sorted[first + j] / top_k]
//   DOWN 1   d[sorted[first + j], c] = W2[c] . y[first + j]                       j = 0 .. count - 1 of an item
//
// x bf16 [tokens, 64 columns], y bf16 [pairs, 64 columns], d bf16 [pairs, L]; sums in fp32, rounded once at the end. Weights are
// the left operand, in registers: m64 tiles (`tiles` an expert) of 64-column blocks (`columns`), 2048 bytes of codes and 128 of
// scales, contiguous in memory. Tokens are the right operand, in shared memory: rows of 64 columns = 128 bytes, 16-byte pieces
// permuted by the row's number (128-byte swizzle). An item's product is as wide as the narrowest compiled width that holds its
// tokens; columns beyond `count` repeat the last token and are not stored.
//
// Streamed (RESIDENT 0): a unit of work is (item, part), a part is GROUPS * TILES tiles, every warpgroup has TILES of them; a stage
// of the ring is one column block of these tiles and of the tokens. Resident (RESIDENT 1, few columns): the item's tokens stay, a
// slot for each column block, while `per` times TILES tiles of weights pass; the warpgroups take turns, so that one multiplies
// while the other stores. Blocks are persistent: unit blockIdx.x, + grid, ...; the number of items is read here.
//
// A warp decodes into one of two sets of operand registers while the product of the other runs; a set is written again, and a stage
// given back, only when wait_group has named the product that read it.

#ifndef DOWN
#define DOWN 0
#endif
#ifndef RESIDENT
#define RESIDENT 0
#endif
#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef TILES
#define TILES 2
#endif
#ifndef WIDEST
#define WIDEST 176
#endif
#ifndef WIDTHS  // bit i: products of 16 (i + 1) columns
#define WIDTHS 0x400
#endif
#ifndef STAGES
#define STAGES 6
#endif
#ifndef SLOTS  // column blocks of resident tokens
#define SLOTS 1
#endif
#ifndef ACT
#define ACT 1
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef CONSUMER_REGISTERS
#define CONSUMER_REGISTERS 232
#endif
#ifndef PRODUCER_REGISTERS
#define PRODUCER_REGISTERS 40
#endif

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

struct ExpertArgs {
    const u16 *tokens;
    const char *codes, *scales;
    u16 *out;
    const int *sorted, *work, *number;
    i64 tokens_stride, codes_stride, scales_stride, out_stride;  // elements; bytes an expert; bytes an expert; elements
    float beta, linear_beta, per_beta, per_linear_beta;
    int top_k, tiles, columns, parts, per, grid;
};

#ifndef HOST_EMULATION
#define DEVICE static __device__ __forceinline__
#define SHARED(name) extern __shared__ __align__(1024) char name[]

template <int N> struct Width {};
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_word(float x) { return __float_as_uint(x); }
DEVICE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE u32 pack_bf16(float a, float b) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a)); return y; }
DEVICE u32 times_bf16(u32 a, u32 b) { u32 y; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
// Byte i of x in the low byte of both halves.
template <int I> DEVICE u32 both_halves(u32 x) {
    u32 y;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(0x4040 + 0x101 * I));
    return y;
}
DEVICE u32 transpose8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE u32 lanes_with(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE int first_bit(u32 x) { return __ffs(x) - 1; }
DEVICE u32 from_lane(u32 x, int source) { return __shfl_sync(0xffffffffu, x, source); }
// Keeps the compiler from working at everything behind at once.
DEVICE void together() { __syncwarp(); }
DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
DEVICE u32 address(const char *shared) { return (u32)__cvta_generic_to_shared(shared); }
DEVICE char *aligned(char *shared) { return shared + (1024 - address(shared) % 1024) % 1024; }
DEVICE void sync_all() { __syncthreads(); }
DEVICE void barrier_make(char *bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(bar)), "r"(count) : "memory");
}
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void barrier_expect(char *bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(bar)), "r"(bytes) : "memory");
}
// Without a branch: products stay in flight across it.
DEVICE void barrier_arrive(char *bar, u32 really) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(address(bar)),
                 "r"(really) : "memory");
}
DEVICE void barrier_wait(char *bar, int parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again; }" ::"r"(address(bar)), "r"(parity) : "memory");
}
// Bytes from memory to shared memory; the barrier counts them.
DEVICE void bulk_copy(char *to, const void *from, int bytes, char *bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
                 "l"(from), "r"(bytes), "r"(address(bar)) : "memory");
}
// 16 bytes, and this thread's arrival once all that it asked for before are there.
DEVICE void copy16_later(char *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}
DEVICE void arrive_later(char *bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(bar)) : "memory");
}
// What ordinary copies wrote becomes visible to products (they read through the asynchronous proxy).
DEVICE void copies_seen() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int N> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
// The registers of a product are the tensor core's from products_begin to products_end; `pinned` keeps the compiler from moving
// their other uses across.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void products_end() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
DEVICE void pinned(float &x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void pinned(u32 &x) { asm volatile("" : "+r"(x)::"memory"); }
// c [64, N] += a [64, 16] b [16, N], b in shared memory with rows of n, 64 k each.
#define R4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define PRODUCT(n, a0, a1, a2, a3, at)                                                                                     \
    DEVICE void product(Width<n>, float (*c)[4], const u32 *a, u64 b) {                                                    \
        asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"                                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" L##n "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 \
                     "}, %" #at ", p, 1, 1, 0; }" : C##n : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));            \
    }
#define L16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define L32 L16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define L48 L32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define L64 L48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define L80 L64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define L96 L80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define L112 L96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define L128 L112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define L144 L128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define L160 L144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define L176 L160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define L192 L176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define C16 R4(0), R4(1)
#define C32 C16, R4(2), R4(3)
#define C48 C32, R4(4), R4(5)
#define C64 C48, R4(6), R4(7)
#define C80 C64, R4(8), R4(9)
#define C96 C80, R4(10), R4(11)
#define C112 C96, R4(12), R4(13)
#define C128 C112, R4(14), R4(15)
#define C144 C128, R4(16), R4(17)
#define C160 C144, R4(18), R4(19)
#define C176 C160, R4(20), R4(21)
#define C192 C176, R4(22), R4(23)
PRODUCT(16, 8, 9, 10, 11, 12)
PRODUCT(32, 16, 17, 18, 19, 20)
PRODUCT(48, 24, 25, 26, 27, 28)
PRODUCT(64, 32, 33, 34, 35, 36)
PRODUCT(80, 40, 41, 42, 43, 44)
PRODUCT(96, 48, 49, 50, 51, 52)
PRODUCT(112, 56, 57, 58, 59, 60)
PRODUCT(128, 64, 65, 66, 67, 68)
PRODUCT(144, 72, 73, 74, 75, 76)
PRODUCT(160, 80, 81, 82, 83, 84)
PRODUCT(176, 88, 89, 90, 91, 92)
PRODUCT(192, 96, 97, 98, 99, 100)
#endif

#define UNROLL _Pragma("unroll")

// Shared memory: tokens (a stage's, or a column block's), weights of a stage, barriers.
enum { STAGE_TILES = RESIDENT ? TILES : GROUPS * TILES, TOKENS = WIDEST * 128, TOKEN_SLOTS = RESIDENT ? SLOTS : STAGES,
       WEIGHTS = STAGE_TILES * 2176, WEIGHTS_AT = TOKEN_SLOTS * TOKENS, FULL = WEIGHTS_AT + STAGES * WEIGHTS,
       EMPTY = FULL + 8 * STAGES,
       FULL_TOKENS = EMPTY + 8 * STAGES, EMPTY_TOKENS = FULL_TOKENS + 8 * SLOTS, TURN = EMPTY_TOKENS + 8 * SLOTS,
       SHARED_BYTES = TURN + 8 + 1024, TOKEN_THREADS = RESIDENT ? 64 : 128, ORDERED = RESIDENT && GROUPS == 2 };

struct Ring { int stage, phase; };
DEVICE void advance(Ring &ring, int by) {
    ring.stage += by;
    while (ring.stage >= STAGES) {
        ring.stage -= STAGES;
        ring.phase ^= 1;
    }
}
DEVICE int least(int a, int b) { return a < b ? a : b; }
struct Item { int expert, first, count, part; };
// This block's units, narrow products first: every role of the block walks them in this order, a lane looks at one of 32. (One
// width after the other, because the assembler takes products of several widths in one loop to need all their registers.)
struct Walk {
    int base;
    u32 left;  // of the 32 from base: those of this width still to come
    Item seen;
};
DEVICE Walk walk(void) { return {(int)blockIdx.x, 0, {0, 0, 0, 0}}; }
// The next unit with low < count <= high; false where there is none.
DEVICE bool next_unit(const ExpertArgs &args, int units, int low, int high, Walk &at, Item &item) {
    while (!at.left) {
        if (at.base >= units) return false;
        const int unit = at.base + (int)(threadIdx.x % 32) * args.grid;
        const uint4 word = *(const uint4 *)(args.work + (i64)(least(unit, units - 1) / args.parts) * 4);
        at.seen.expert = word.x;
        at.seen.first = word.y;
        at.seen.count = word.z;
        at.seen.part = unit % args.parts;
        at.left = lanes_with(unit < units && at.seen.count > low && at.seen.count <= high);
        at.base += 32 * args.grid;
    }
    const int lane = first_bit(at.left);
    at.left &= at.left - 1;
    item.expert = from_lane(at.seen.expert, lane);
    item.first = from_lane(at.seen.first, lane);
    item.count = from_lane(at.seen.count, lane);
    item.part = from_lane(at.seen.part, lane);
    return true;
}
DEVICE bool compiled(int width) { return width == WIDEST || (WIDTHS >> (width / 16 - 1) & 1); }
DEVICE int width_before(int width) {
    do width -= 16;
    while (width > 0 && !compiled(width));
    return width;
}

// Weights of column block kb into a stage: the lanes of a warp, one a tile.
DEVICE void ask_weights(const char *codes, const char *scales, char *shared, const Ring &ring, int lane) {
    char *bar = shared + FULL + 8 * ring.stage, *stage = shared + WEIGHTS_AT + ring.stage * WEIGHTS;
    if (lane == 0) barrier_expect(bar, WEIGHTS);
    if (lane < STAGE_TILES) {
        bulk_copy(stage + lane * 2048, codes, 2048, bar);
        bulk_copy(stage + STAGE_TILES * 2048 + lane * 128, scales, 128, bar);
    }
}

#define EACH_UNIT(width)                                                                                                \
    Item item;                                                                                                          \
    for (int width = 16; width <= WIDEST; width += 16) if (compiled(width))                                     \
        for (Walk at = walk(); next_unit(args, units, width_before(width), width, at, item);)
// Streamed: all threads ask for the tokens' pieces of a stage, the first warp for its weights.
DEVICE void produce(const ExpertArgs &args, char *shared, int units) {
    const int thread = threadIdx.x, lane = thread % 32, piece = thread % 8, row = thread / 8;
    const u32 stride = (u32)(args.tokens_stride / 8);
    Ring ring = {0, 0};
    EACH_UNIT(width) {
        u32 piece_at[WIDEST / 16];
        UNROLL for (int i = 0; i < WIDEST / 16; i++) {
            const int place = item.first + least(row + 16 * i, item.count - 1);
            piece_at[i] = (16 * i < width ? DOWN ? place : args.sorted[place] / args.top_k : 0) * stride + piece;
        }
        const i64 tile = least(item.part * STAGE_TILES + lane % STAGE_TILES, args.tiles - 1) * (i64)args.columns;
        const char *codes = args.codes + item.expert * args.codes_stride + tile * 2048;
        const char *scales = args.scales + item.expert * args.scales_stride + tile * 128;
        const uint4 *from = (const uint4 *)args.tokens;
        for (int kb = 0; kb < args.columns; kb++) {
            barrier_wait(shared + EMPTY + 8 * ring.stage, ring.phase ^ 1);
            if (thread < 32) ask_weights(codes, scales, shared, ring, lane);
            char *to = shared + ring.stage * TOKENS + row * 128 + (piece ^ row % 8) * 16;
            UNROLL for (int i = 0; i < WIDEST / 16; i++) if (16 * i < width) copy16_later(to + i * 2048, from + piece_at[i]);
            arrive_later(shared + FULL + 8 * ring.stage);
            codes += 2048;
            scales += 128;
            from += 8;
            advance(ring, 1);
        }
    }
}

// Resident: the first warp streams weights ...
DEVICE void produce_weights(const ExpertArgs &args, char *shared, int units) {
    const int lane = threadIdx.x % 32, passes = (args.tiles + TILES - 1) / TILES;
    Ring ring = {0, 0};
    EACH_UNIT(width) {
        const int start = item.part * args.per, stop = least(start + args.per, passes);
        for (int pass = start; pass < stop; pass++) {
            const i64 tile = least(pass * TILES + lane % TILES, args.tiles - 1) * (i64)args.columns;
            const char *codes = args.codes + item.expert * args.codes_stride + tile * 2048;
            const char *scales = args.scales + item.expert * args.scales_stride + tile * 128;
            for (int kb = 0; kb < args.columns; kb++) {
                barrier_wait(shared + EMPTY + 8 * ring.stage, ring.phase ^ 1);
                ask_weights(codes + kb * 2048, scales + kb * 128, shared, ring, lane);
                advance(ring, 1);
            }
        }
    }
}
// ... and two others bring an item's tokens, column block by column block, as those of the item before are given back.
DEVICE void produce_tokens(const ExpertArgs &args, char *shared, int units) {
    const int thread = threadIdx.x % 64, piece = thread % 8, row = thread / 8;
    int phase = 0;
    EACH_UNIT(width) {
        for (int kb = 0; kb < args.columns; kb++) {
            barrier_wait(shared + EMPTY_TOKENS + 8 * kb, phase ^ 1);
            char *to = shared + kb * TOKENS + row * 128 + (piece ^ row) * 16;
            const u16 *from = args.tokens + kb * 64 + piece * 8;
            for (int i = 0; i < width; i += 8)
                copy16_later(to + i * 128, from + (i64)(item.first + least(row + i, item.count - 1)) * args.tokens_stride);
            arrive_later(shared + FULL_TOKENS + 8 * kb);
        }
        phase ^= 1;
    }
}

// Descriptor of an operand with 128-byte swizzle: groups of eight rows 1024 bytes apart.
DEVICE u64 operand_at(const char *shared) {
    return (u64)(address(shared) >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
template <int N> DEVICE void pin(float (*c)[4]) { UNROLL for (int i = 0; i < 4 * N; i++) pinned(c[i / 4][i % 4]); }
DEVICE void pin(u32 *a) { UNROLL for (int i = 0; i < 16; i++) pinned(a[i]); }
// A lane's sixteen bytes of a block and its scale word -> left operands of four steps of 16 columns (positions: moe_layout.py).
DEVICE void decode(const uint4 &codes, u32 scale, u32 *a) {
    const u32 word[4] = {codes.x, codes.y, codes.z, codes.w};
    // 2^(s - 1): columns 0..31 and 32..63 of row g, then of row g + 8
    const u32 by[4] = {both_halves<0>(scale) * 0x80 + 0x3f003f00, both_halves<1>(scale) * 0x80 + 0x3f003f00,
                       both_halves<2>(scale) * 0x80 + 0x3f003f00, both_halves<3>(scale) * 0x80 + 0x3f003f00};
    UNROLL for (int i = 0; i < 4; i++) {
        const u32 w = word[i], low = by[i % 2 * 2], high = by[i % 2 * 2 + 1];
        a[i] = times_bf16(w & 0x81c081c0, low);
        a[4 + i] = times_bf16(w << 3 & 0x81c081c0, low);
        a[8 + i] = times_bf16(w << 6 & 0x81c081c0, high);
        a[12 + i] = times_bf16((w << 1 & 0x80008000) | (w >> 3 & 0x01800180) | (w >> 7 & 0x00400040), high);
    }
}

struct Consumer {
    int warp, group, lane;  // of the warpgroup, of the block, of the warp
    Ring ring;
    int turn, items;  // passes and units so far (of all groups)
};
// A stage that this warp has read `back` stages ago, and the tokens of its column block after their last use.
DEVICE void give_back(const Consumer &me, char *shared, int back, u32 really, u32 last, int kb) {
    int stage = me.ring.stage - back;
    if (stage < 0) stage += STAGES;
    barrier_arrive(shared + EMPTY + 8 * stage, really);
    if (RESIDENT) barrier_arrive(shared + EMPTY_TOKENS + 8 * kb, really & last);
}
// acc = tiles of this warpgroup times the tokens. fresh: the first pass over resident tokens; last: the last one.
template <int N> DEVICE void multiply(float (*acc)[N / 8][4], Consumer &me, char *shared, int columns, bool fresh, bool last) {
    u32 a[2][16];
    UNROLL for (int i = 0; i < 32; i++) a[i / 16][i % 16] = 0;
    UNROLL for (int i = 0; i < TILES * N / 2; i++) acc[i / (N / 2)][i % (N / 2) / 4][i % 4] = 0.0f;
    UNROLL for (int i = 0; i < TILES; i++) pin<N / 8>(acc[i]);
    const int tile0 = RESIDENT ? 0 : me.group * TILES;
    if (RESIDENT && fresh) {
        for (int kb = 0; kb < columns; kb++) barrier_wait(shared + FULL_TOKENS + 8 * kb, me.items & 1);
        copies_seen();
    }
    u32 gives = 0;
    for (int kb = 0; kb < columns; kb += 2 / TILES) {
        const char *stage[2 / TILES], *tokens[2 / TILES];
        UNROLL for (int i = 0; i < 2 / TILES; i++) {
            barrier_wait(shared + FULL + 8 * me.ring.stage, me.ring.phase);
            stage[i] = shared + WEIGHTS_AT + me.ring.stage * WEIGHTS;
            tokens[i] = shared + (RESIDENT ? kb + i : me.ring.stage) * TOKENS;
            advance(me.ring, 1);
        }
        if (!RESIDENT) copies_seen();
        UNROLL for (int i = 0; i < 2; i++) {
            const int tile = TILES == 2 ? i : 0, block = TILES == 2 ? 0 : i;
            const uint4 codes = *(const uint4 *)(stage[block] + (tile0 + tile) * 2048 + me.warp * 512 + me.lane * 16);
            const char *scales = stage[block] + STAGE_TILES * 2048 + (tile0 + tile) * 128;
            const u32 scale = *(const u32 *)(scales + me.warp * 32 + me.lane / 4 * 4);
            products_end<1>();  // all but the last product: the one that read a[i], and all of an earlier stage
            pin(a[i]);
            if (TILES == 1 || i == 1) give_back(me, shared, TILES == 1 ? 4 - i : 2, gives, last, TILES == 1 ? kb + i - 2 : kb - 1);
            decode(codes, scale, a[i]);
            pin(a[i]);
            products_begin();
            UNROLL for (int p = 0; p < 4; p++) product(Width<N>(), acc[tile], a[i] + 4 * p, operand_at(tokens[block] + 32 * p));
            products_commit();
        }
        gives = me.lane == 0;
        pinned(gives);  // a branch between products would make the assembler wait for each
    }
    if (ORDERED) barrier_arrive(shared + TURN, me.lane == 0);
    products_end<0>();
    UNROLL for (int i = 0; i < 2; i++) pin(a[i]);
    UNROLL for (int i = 0; i < TILES; i++) pin<N / 8>(acc[i]);
    if (TILES == 1) give_back(me, shared, 2, gives, last, columns - 2);
    give_back(me, shared, 1, gives, last, columns - 1);
}

// (numerator, denominator) of tanh |x|: the series near 0, where 1 - e cancels (situ.py).
DEVICE void tanh_parts(float x, float &over, float &under) {
    x = as_float(as_word(x) & 0x7fffffff);
    const float e = ex2(x * -2.8853900817779268f), x2 = x * x;
    const float series = x * (1.0f + x2 * (-0.3333333333f + x2 * 0.1333333333f));
    over = x < 0.05f ? series * (1.0f + e) : 1.0f - e;
    under = 1.0f + e;
}
// ACT 0: silu(gate) up; 1: SiTU; 2: SiTU whose up half stays linear. One division for all.
DEVICE float activated(const ExpertArgs &args, float gate, float up) {
    const float below = 1.0f + ex2(gate * -1.4426950408889634f);
    if (ACT == 0) return gate * up * rcp(below);
    float left, under, right, over;
    tanh_parts(gate * args.per_beta, left, under);
    if (ACT == 2) return as_float(as_word(args.beta * left * up * rcp(under * below)) ^ (as_word(gate) & 0x80000000));
    tanh_parts(up * args.per_linear_beta, right, over);
    const float size = args.beta * args.linear_beta * (left * right) * rcp(under * over * below);
    return as_float(as_word(size) ^ ((as_word(gate) ^ as_word(up)) & 0x80000000));
}
// Rows g, g + 8 and columns 2t, 2t + 1 of an accumulator -> a token's channels 2t, 2t + 1 (activation), or rows 4t .. 4t + 3.
template <int N> DEVICE void store(const ExpertArgs &args, float (*c)[4], const Consumer &me, int tile, const Item &item) {
    const int g = me.lane >> 2, t = me.lane & 3;
    UNROLL for (int j = 0; j < N / 8; j++) {
        const int token = 8 * j + g;
        const bool valid = token < item.count && tile < args.tiles;
        const i64 place = item.first + token;
        if (!DOWN) {
            const u32 x = transpose8(pack_bf16(activated(args, c[j][0], c[j][2]), activated(args, c[j][1], c[j][3])));
            if (valid) *(u32 *)(args.out + place * args.out_stride + (tile * 4 + me.warp) * 8 + 2 * t) = x;
        } else {
            const u32 low = transpose8(pack_bf16(c[j][0], c[j][1])), high = transpose8(pack_bf16(c[j][2], c[j][3]));
            // lane t gives low to lane t / 2 and high to lane 2 + t / 2
            const int from = (me.lane & ~3) | t >> 1 | (t & 1) << 1;
            const u32 x = from_lane(t & 1 ? high : low, from), y = from_lane(t & 1 ? low : high, from ^ 1);
            uint2 rows;
            rows.x = t < 2 ? x : y;
            rows.y = t < 2 ? y : x;
            if (valid) *(uint2 *)(args.out + (i64)args.sorted[place] * args.out_stride + tile * 64 + me.warp * 16 + 4 * t) = rows;
        }
        if (j % 4 == 3) together();
    }
}

// One unit of work by products of N columns.
template <int N> DEVICE void run(const ExpertArgs &args, Consumer &me, char *shared, const Item &item) {
    const int passes = (args.tiles + TILES - 1) / TILES;
    const int start = RESIDENT ? item.part * args.per : item.part, stop = RESIDENT ? least(start + args.per, passes) : start + 1;
    for (int pass = start; pass < stop; pass++) {
        const int at = pass - start;
        if (RESIDENT && at % GROUPS != me.group) {
            advance(me.ring, args.columns);
        } else {
            if (ORDERED) barrier_wait(shared + TURN, me.turn & 1 ^ 1);
            float acc[TILES][N / 8][4];
            multiply<N>(acc, me, shared, args.columns, at < GROUPS, pass + GROUPS >= stop);
            const int tile = RESIDENT ? pass * TILES : (pass * GROUPS + me.group) * TILES;
            UNROLL for (int i = 0; i < TILES; i++) store<N>(args, acc[i], me, tile + i, item);
        }
        me.turn++;
    }
    // A warpgroup without a pass gives the tokens back too.
    if (RESIDENT && me.group >= stop - start) for (int kb = 0; kb < args.columns; kb++) {
        barrier_wait(shared + FULL_TOKENS + 8 * kb, me.items & 1);
        barrier_arrive(shared + EMPTY_TOKENS + 8 * kb, me.lane == 0);
    }
    me.items++;
}
template <int N> DEVICE void run_widths(const ExpertArgs &args, Consumer &me, char *shared, int units) {
    if constexpr (N == WIDEST || (WIDTHS >> (N / 16 - 1) & 1) != 0) {
        Item item;
        for (Walk at = walk(); next_unit(args, units, width_before(N), N, at, item);) run<N>(args, me, shared, item);
    }
    if constexpr (N < WIDEST) run_widths<N + 16>(args, me, shared, units);
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), BLOCKS) experts_cuda(const ExpertArgs args) {
    SHARED(raw);
    char *shared = aligned(raw);
    const int warp = uniform(threadIdx.x / 32), units = args.number[0] * args.parts;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_make(shared + FULL + 8 * s, RESIDENT ? 1 : 1 + TOKEN_THREADS);
            barrier_make(shared + EMPTY + 8 * s, RESIDENT ? 4 : 4 * GROUPS);
        }
        for (int s = 0; s < SLOTS; s++) {
            barrier_make(shared + FULL_TOKENS + 8 * s, TOKEN_THREADS);
            barrier_make(shared + EMPTY_TOKENS + 8 * s, 4 * GROUPS);
        }
        barrier_make(shared + TURN, 4);
        barriers_made();
    }
    sync_all();
    if (warp < 4) {
        fewer_registers<PRODUCER_REGISTERS>();
        if (!RESIDENT) produce(args, shared, units);
        else if (warp == 0) produce_weights(args, shared, units);
        else if (warp >= 2) produce_tokens(args, shared, units);
    } else {
        more_registers<CONSUMER_REGISTERS>();
        Consumer me = {warp % 4, warp / 4 - 1, (int)threadIdx.x % 32, {0, 0}, 0, 0};
        run_widths<16>(args, me, shared, units);
    }
}
