// Stands in for NumPy in the stress test: a library whose arrays come from malloc and calloc.
#include <malloc.h>

#include <cstdlib>

extern "C" void* array_malloc(size_t bytes) { return malloc(bytes); }
extern "C" void* array_calloc(size_t bytes) { return calloc(bytes / 8 + 1, 8); }
extern "C" void* array_realloc(void* pointer, size_t bytes) { return realloc(pointer, bytes); }
extern "C" void array_free(void* pointer) { free(pointer); }
extern "C" size_t array_usable_size(void* pointer) { return malloc_usable_size(pointer); }
