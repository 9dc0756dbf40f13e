// kda_chunk.cu on the CPU, one C function: see cuda_emulation.hpp.
#define HOST_EMULATION
#include "cuda_emulation.hpp"

#include KERNEL

extern "C" void kda_chunk_emulated(const Args *args, int heads, int chunks, unsigned seed) {
    emulator.random.seed(seed);
    for (int index = 0; index < chunks; index++)
        for (int head = 0; head < heads; head++) {
            blockIdx = {head, index, 0};
            emulator.run(128, SHARED_BYTES, [=] { kda_chunk_cuda(*args); });
        }
}
