// What experts.cu asks of the emulation beside cuda_emulation.hpp: copies of 16 bytes that arrive at an mbarrier, plain
// arrivals, lanes that look at each other, products of any width whose left operand is in registers.
#pragma once
#include "cuda_emulation.hpp"

// 16 bytes that come when they like, and an arrival of this thread once all before are there.
inline void copy16_later(char *to, const void *from) {
    if (address(to) % 16 || (uintptr_t)from % 16) { std::fprintf(stderr, "unaligned copy\n"); std::abort(); }
    std::memset(to, 0xff, 16);
    emulator.wanted[emulator.current].push_back({to, from, 16, nullptr});
}
inline void arrive_later(char *bar) {
    std::vector<Copy> &mine = emulator.wanted[emulator.current];
    emulator.pieces.push_back({mine, bar});
    mine.clear();
}
inline void copies_seen() {}
inline void barrier_arrive(char *bar, unsigned really) {
    if (!really) return;
    Phases &p = emulator.phases.at(bar);
    p.arrivals--;
    emulator.settle(p);
}
template <int N> inline void fewer_registers() {}
template <int N> inline void more_registers() {}
inline void together() {}
inline unsigned from_lane(unsigned x, int source) { return emulator.meet({x})[source][0]; }
inline unsigned lanes_with(bool x) {
    const unsigned (*all)[8] = emulator.meet({x});
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= all[i][0] << i;
    return y;
}
inline int first_bit(unsigned x) { return __builtin_ctz(x); }
inline unsigned times_bf16(unsigned a, unsigned b) {
    return pack_bf16(half_of(a, 0, true) * half_of(b, 0, true), half_of(a, 1, true) * half_of(b, 1, true));
}
template <int I> inline unsigned both_halves(unsigned x) { return (x >> (8 * I) & 255) * 0x10001; }
template <int N> struct Width {};
template <int N> inline void product(Width<N>, float (*c)[4], const unsigned *a, u64_ b) {
    asked([=] { warpgroup_product(c, a, b, N / 8, false); });
}
