// kda_step.cu on the CPU, one C function: see cuda_emulation.hpp. A cluster is one block of the emulator there.
#define HOST_EMULATION
#include "cuda_emulation.hpp"

#undef SHARED
#define SHARED(name, alignment) char *name = shared_of(rank())
#define KERNEL static void
#define sync_all block_sync

struct Args;
static int threads_of_block, bytes_of_block;
static float natural_log(float x) { return std::log(x); }
static int thread_index() { return emulator.current % threads_of_block; }
static int rank() { return emulator.current / threads_of_block; }
static char *shared_of(int block) { return emulator.shared + block * bytes_of_block; }
static void block_sync() { emulator.arrive(1 + rank(), threads_of_block, true); }
static void cluster_sync() { emulator.arrive(0, emulator.threads, true); }
static void tell(const char *, int at, int block, float x) { std::memcpy(shared_of(block) + at, &x, 4); }

#include SOURCE

extern "C" void kda_step_emulated(const Args *args, int heads, int rows, unsigned seed) {
    emulator.random.seed(seed);
    emulator.lazy = seed % 2;
    threads_of_block = THREADS;
    bytes_of_block = (SHARED_BYTES + 127) / 128 * 128;
    for (int row = 0; row < rows; row++)
        for (int head = 0; head < heads; head++) {
            blockIdx = {0, head, row};
            emulator.run(SPLIT * THREADS, SPLIT * bytes_of_block, [=] { kda_step_cuda(*args); });
        }
}
