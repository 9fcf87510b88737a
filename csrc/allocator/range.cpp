#include "allocator/range.h"

#ifdef __linux__

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace daf {
namespace {

constexpr uint64_t least_range_bytes = 1ull << 30;

void* map_reserved(void* where, uint64_t bytes, int extra_flags) {
  return mmap(where, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | extra_flags,
              -1, 0);
}

}  // namespace

bool AddressRange::reserve(uint64_t wanted_bytes) {
  page_bytes_ = uint64_t(sysconf(_SC_PAGESIZE));
  for (uint64_t bytes = wanted_bytes; bytes >= least_range_bytes; bytes /= 2) {
    void* found = map_reserved(nullptr, bytes + slot_bytes, 0);
    if (found == MAP_FAILED) continue;
    reserved_base_ = reinterpret_cast<uintptr_t>(found);
    reserved_bytes_ = bytes + slot_bytes;
    base_ = (reserved_base_ + slot_bytes - 1) / slot_bytes * slot_bytes;
    bytes_ = bytes / slot_bytes * slot_bytes;
    free_runs_[0] = slots();
    return true;
  }
  return false;
}

AddressRange::~AddressRange() {
  if (reserved_bytes_) munmap(reinterpret_cast<void*>(reserved_base_), reserved_bytes_);
}

bool AddressRange::take(uint32_t count, uint32_t* first) {
  for (auto run = free_runs_.begin(); run != free_runs_.end(); ++run) {
    if (run->second < count) continue;
    *first = run->first;
    const uint32_t left = run->second - count;
    const auto hint = free_runs_.erase(run);
    if (left) free_runs_.emplace_hint(hint, *first + count, left);
    return true;
  }
  return false;
}

bool AddressRange::commit(uint32_t slot, uint64_t bytes) {
  const uint64_t whole = bytes / slot_bytes * slot_bytes;
  // All of the last slot too: short blocks side by side are one mapping then, of at most some
  // 65,000 in a process (vm.max_map_count).
  const uint64_t slots = (bytes + slot_bytes - 1) / slot_bytes * slot_bytes;
  if (mprotect(address(slot), slots, PROT_READ | PROT_WRITE) != 0) return false;
  // Advice only. The last, partial slot never gets a huge page: a block holds only its own pages.
  if (whole) madvise(address(slot), whole, MADV_HUGEPAGE);
  return true;
}

bool AddressRange::move(uint32_t from, uint32_t to, uint64_t bytes) {
  if (!can_move_) return false;
  // DONTUNMAP keeps the source mapped: another mmap in the hole would look like ours.
  constexpr int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  if (mremap(address(from), bytes, bytes, flags, address(to)) != MAP_FAILED) return true;
  if (errno == EINVAL) can_move_ = false;  // this kernel does not know the flag
  // Before Linux 6.12 the target's mapping is gone by now; map it again.
  constexpr int fresh = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(address(to), bytes, PROT_READ | PROT_WRITE, fresh, -1, 0);
  if (bytes == slot_bytes) madvise(address(to), bytes, MADV_HUGEPAGE);
  return false;
}

uint32_t AddressRange::move_pages(uint32_t from, uint32_t to, uint32_t count) {
  // One by one: after an earlier move they may lie in several mappings.
  uint32_t moved = 0;
  while (moved < count && move(from + moved, to + moved, slot_bytes)) ++moved;
  return moved;
}

void AddressRange::discard(uint32_t slot, uint64_t first_byte, uint64_t end_byte) {
  madvise(static_cast<char*>(address(slot)) + first_byte, end_byte - first_byte, MADV_DONTNEED);
}

void AddressRange::give_back(uint32_t first, uint32_t count) {
  const uint64_t bytes = count * slot_bytes;
  if (map_reserved(address(first), bytes, MAP_FIXED) == MAP_FAILED) {
    // Out of mappings (vm.max_map_count): at least release the pages.
    madvise(address(first), bytes, MADV_DONTNEED);
  }
  auto next = free_runs_.lower_bound(first);
  if (next != free_runs_.end() && next->first == first + count) {
    count += next->second;
    next = free_runs_.erase(next);
  }
  if (next != free_runs_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == first) {
      before->second += count;
      return;
    }
  }
  free_runs_.emplace_hint(next, first, count);
}

}  // namespace daf

#endif  // __linux__
