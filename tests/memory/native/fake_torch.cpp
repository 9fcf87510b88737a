// Stands in for libc10 in the stress test: a library that allocates and frees through slots.
#include <cstdlib>

extern "C" int fake_allocate(void** pointer, size_t alignment, size_t bytes) {
  return posix_memalign(pointer, alignment, bytes);
}
extern "C" void* fake_aligned(size_t alignment, size_t bytes) {
  return aligned_alloc(alignment, bytes);
}
extern "C" void fake_free(void* pointer) { free(pointer); }
extern "C" void* fake_realloc(void* pointer, size_t bytes) { return realloc(pointer, bytes); }
