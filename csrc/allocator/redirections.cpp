#include "allocator/redirections.h"

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "allocator/state.h"

namespace daf::allocator {
namespace {

int allocate_tensor(void** pointer, size_t alignment, size_t bytes) {
  if (state().refusals.is_named()) return state().refusals.refuse();
  return allocate(pointer, alignment, bytes, false);
}

int allocate_scratch(void** pointer, size_t alignment, size_t bytes) {
  return allocate(pointer, alignment, bytes, true);
}

using Allocate = int (*)(void** pointer, size_t alignment, size_t bytes);

template <Allocate allocate_by> void* redirected_aligned_alloc(size_t alignment, size_t bytes) {
  void* pointer = nullptr;
  const int failed = allocate_by(&pointer, std::max(alignment, sizeof(void*)), bytes);
  if (failed) errno = failed;
  return failed ? nullptr : pointer;
}

// Other libraries free only large tensors: small ones are not looked up. glibc serves large ones
// too while the heap is closing or full.
void free_elsewhere(void* pointer) {
  if (state().heap.owns(pointer)) return release_large(pointer);
  if (::malloc_usable_size(pointer) >= large_from_bytes) forget_small(pointer);
  ::free(pointer);
}

void* redirected_realloc(void* pointer, size_t bytes) {
  if (!state().heap.owns(pointer)) {
    forget_small(pointer);
    return ::realloc(pointer, bytes);
  }
  void* moved = ::malloc(bytes);
  if (!moved) return nullptr;
  std::memcpy(moved, pointer, std::min(bytes, size_t(state().heap.usable_bytes(pointer))));
  release_large(pointer);
  return moved;
}

size_t redirected_usable_size(void* pointer) {
  if (!state().heap.owns(pointer)) return ::malloc_usable_size(pointer);
  return state().heap.usable_bytes(pointer);
}

// NumPy's blocks of 128 KiB and more, while installed; its others stay glibc's.
bool takes_array(size_t bytes) { return bytes >= large_from_bytes && state().installed > 0; }

// What makes room must not fail for want of an array.
void* make_array(size_t bytes) {
  void* pointer = nullptr;
  const int failed = allocate(&pointer, small_alignment, bytes, reclaiming);
  if (!failed) return pointer;
  Refusals::forget_words();
  errno = failed;
  return nullptr;
}

// Writes to every page: programs keep arrays for long that they fill later, and what the account
// holds must be what the process holds.
void* make_resident(void* pointer, size_t bytes) {
  const auto page = size_t(sysconf(_SC_PAGESIZE));
  for (size_t offset = 0; pointer && offset < bytes; offset += page) {
    static_cast<volatile char*>(pointer)[offset] = 0;
  }
  return pointer;
}

void* redirected_malloc(size_t bytes) {
  return takes_array(bytes) ? make_resident(make_array(bytes), bytes) : ::malloc(bytes);
}

// A recycled block holds what was in it.
void* redirected_calloc(size_t count, size_t each_bytes) {
  size_t bytes;
  if (__builtin_mul_overflow(count, each_bytes, &bytes) || !takes_array(bytes)) {
    return ::calloc(count, each_bytes);
  }
  void* pointer = make_array(bytes);
  return pointer ? std::memset(pointer, 0, bytes) : nullptr;
}

bool shrink_array(void* pointer, size_t bytes) {
  if (!state().heap.shrink(pointer, bytes)) return false;
  state().events.note(pointer, -1, current_label);
  state().events.note(pointer, int64_t(bytes), current_label);
  return true;
}

// An array that becomes large enters the account; one that shrinks stays where it is.
void* resize_array(void* pointer, size_t bytes) {
  if (!takes_array(bytes)) return redirected_realloc(pointer, bytes);
  const bool ours = state().heap.owns(pointer);
  const size_t before_bytes = redirected_usable_size(pointer);
  if (ours && shrink_array(pointer, bytes)) return pointer;
  if (!ours && bytes <= before_bytes) return redirected_realloc(pointer, bytes);
  void* moved = redirected_malloc(bytes);
  if (!moved) return nullptr;
  if (pointer) std::memcpy(moved, pointer, std::min(bytes, before_bytes));
  free_elsewhere(pointer);
  return moved;
}

// A kernel's array (`slow_conv2d_backward`'s columns) is scratch, too. `::operator delete` ends in
// the C++ library's `free`, which is redirected.
void* redirected_new(size_t bytes) {
  void* pointer = nullptr;
  const bool ours = takes_array(bytes) && !allocate(&pointer, small_alignment, bytes, true);
  return ours ? pointer : ::operator new(bytes);
}

template <class Function> void* address_of(Function function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

// A refused tensor is an exception of PyTorch's. oneDNN, FBGEMM and others (most are linked into
// libtorch_cpu) write through the null pointer.
Library library_of(const char* path) {
  if (file_starts_with(path, {"libc10.so"})) return Library::tensors;
  if (file_starts_with(path, {"libtorch_cpu.so", "libdnnl.so", "libarm_compute"}))
    return Library::kernels;
  if (file_starts_with(path, {"_multiarray_umath."})) return Library::arrays;
  return Library::other;
}

std::vector<Redirection> redirections() {
  void* const tensor = address_of(redirected_aligned_alloc<allocate_tensor>);
  void* const scratch = address_of(redirected_aligned_alloc<allocate_scratch>);
  void* const freed = address_of(release);
  void* const resized = address_of(redirected_realloc);
  void* const usable = address_of(redirected_usable_size);
  void* const elsewhere = address_of(free_elsewhere);
  return {
      {"posix_memalign", {address_of(allocate_tensor), address_of(allocate_scratch)}},
      {"aligned_alloc", {tensor, scratch}},
      {"memalign", {tensor, scratch}},
      {"free", {freed, freed, elsewhere, elsewhere}},
      {"realloc", {resized, resized, address_of(resize_array), resized}},
      {"malloc_usable_size", {usable, usable, usable, usable}},
      {"strerror_r", {address_of(Refusals::words)}},
      {"malloc", {nullptr, nullptr, address_of(redirected_malloc)}},
      {"calloc", {nullptr, nullptr, address_of(redirected_calloc)}},
      {"_Znwm", {nullptr, address_of(redirected_new)}},  // operator new, and new[]
      {"_Znam", {nullptr, address_of(redirected_new)}},
  };
}

}  // namespace daf::allocator

#endif  // Linux on x86-64 or aarch64
