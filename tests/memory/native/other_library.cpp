// Stands in for any other library: it frees what it was handed, and its own memory.
#include <cstdlib>

extern "C" void other_free(void* pointer) { free(pointer); }
extern "C" void* other_malloc(size_t bytes) { return malloc(bytes); }
