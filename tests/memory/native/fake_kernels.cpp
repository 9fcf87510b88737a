// Stands in for oneDNN in the stress test: a library that cannot bear a refusal.
#include <cstdlib>

extern "C" int scratch_allocate(void** pointer, size_t alignment, size_t bytes) {
  return posix_memalign(pointer, alignment, bytes);
}
