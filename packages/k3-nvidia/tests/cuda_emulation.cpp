// A kernel of this package on the CPU, one C function; see cuda_emulation.hpp. KERNEL: its source file, ENTRY: its name,
// ARGUMENTS: the type of its only parameter.
#define HOST_EMULATION
#include "cuda_emulation.hpp"

#include KERNEL

// 1 where a block hangs.
extern "C" int emulate(const ARGUMENTS *args, int x, int y, int z, int threads, int shared, unsigned seed) {
    emulator.random.seed(seed);
    for (int k = 0; k < z; k++) for (int j = 0; j < y; j++) for (int i = 0; i < x; i++) {
        blockIdx = {i, j, k};
        if (!emulator.run(threads, shared, [=] { ENTRY(*args); })) return 1;
    }
    return 0;
}
