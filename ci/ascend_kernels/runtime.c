/* What compiled linalg calls: memory for its local buffers and strided copies.
 *
 * Local buffers come from one arena that is emptied before every program and filled with 0xFF (NaN, -1), so that a value
 * which was never written shows. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RESERVED ((size_t)1 << 34)
static char *arena;
static size_t used;

void k3_reset(void) { used = 0; }

void *_mlir_memref_to_llvm_alloc(size_t size) {
  if (!arena) {
    arena = mmap(0, RESERVED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) { perror("k3 arena"); abort(); }
  }
  char *p = arena + used;
  used += (size + 4095) & ~(size_t)63;
  if (used > RESERVED) { fprintf(stderr, "k3 arena: one program asked for more than 16 GiB\n"); abort(); }
  memset(p, 0xFF, size);
  return p;
}

void _mlir_memref_to_llvm_free(void *p) { (void)p; }

typedef struct { int64_t rank; void *descriptor; } Unranked;
typedef struct { char *base, *data; int64_t offset, numbers[]; } Descriptor;

static void copy(int64_t rank, int64_t size, char *to, char *from, const int64_t *n, const int64_t *to_stride,
                 const int64_t *from_stride) {
  if (rank == 0) { memcpy(to, from, size); return; }
  if (rank == 1 && *to_stride == 1 && *from_stride == 1) { memcpy(to, from, size * *n); return; }
  for (int64_t i = 0; i < *n; i++)
    copy(rank - 1, size, to + i * *to_stride * size, from + i * *from_stride * size, n + 1, to_stride + 1, from_stride + 1);
}

void memrefCopy(int64_t size, Unranked *from, Unranked *to) {
  Descriptor *f = from->descriptor, *t = to->descriptor;
  int64_t rank = from->rank;
  copy(rank, size, t->data + t->offset * size, f->data + f->offset * size, f->numbers, t->numbers + rank,
       f->numbers + rank);
}
