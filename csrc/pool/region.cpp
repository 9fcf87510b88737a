#include "pool/region.h"

#include <algorithm>
#include <new>
#include <vector>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace daf::paging {
namespace {

#if defined(_WIN32)

uint64_t ask_page_bytes() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}

void* reserve(uint64_t bytes) { return VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS); }
void unreserve(void* base, uint64_t) { VirtualFree(base, 0, MEM_RELEASE); }
bool make_usable(void* at, uint64_t bytes) {
  return VirtualAlloc(at, bytes, MEM_COMMIT, PAGE_READWRITE) != nullptr;
}
void discard(void* at, uint64_t bytes) { VirtualFree(at, bytes, MEM_DECOMMIT); }

#else

uint64_t ask_page_bytes() { return uint64_t(sysconf(_SC_PAGESIZE)); }

#if defined(MAP_NORESERVE)
constexpr int reserving = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#else
constexpr int reserving = MAP_PRIVATE | MAP_ANONYMOUS;
#endif

void* reserve(uint64_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_NONE, reserving, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

void unreserve(void* base, uint64_t bytes) { munmap(base, bytes); }

bool make_usable(void* at, uint64_t bytes) {
  if (mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0) return false;
#if defined(MADV_NOHUGEPAGE)
  // A huge page would add memory that was not asked for; the account would not be exact.
  madvise(at, bytes, MADV_NOHUGEPAGE);
#endif
  return true;
}

void discard(void* at, uint64_t bytes) {
#if defined(__linux__)
  madvise(at, bytes, MADV_DONTNEED);
#else
  // Elsewhere MADV_DONTNEED is a hint that may be ignored; a fresh mapping is not.
  mmap(at, bytes, PROT_READ | PROT_WRITE, reserving | MAP_FIXED, -1, 0);
#endif
}

#endif

}  // namespace

uint64_t Region::system_page_bytes() {
  static const uint64_t bytes = ask_page_bytes();
  return bytes;
}

Region::Region(uint64_t wanted_bytes, uint64_t least_bytes, bool only_counted)
    : bytes_(round_up(wanted_bytes, system_page_bytes())), only_counted_(only_counted) {
  if (only_counted_) return;
  while (!(base_ = static_cast<uint8_t*>(reserve(bytes_)))) {
    bytes_ = round_up(bytes_ / 2, system_page_bytes());
    if (bytes_ < least_bytes || bytes_ <= system_page_bytes()) throw std::bad_alloc();
  }
}

Region::~Region() {
  if (!only_counted_) unreserve(base_, bytes_);
}

void Region::extend(uint64_t bytes) {
  bytes = round_up(bytes, system_page_bytes());
  if (bytes <= usable_bytes_) return;
  if (bytes > bytes_) throw std::bad_alloc();
  if (!only_counted_ && !make_usable(base_ + usable_bytes_, bytes - usable_bytes_))
    throw std::bad_alloc();
  usable_bytes_ = bytes;
}

void Region::take_back([[maybe_unused]] uint64_t offset, [[maybe_unused]] uint64_t bytes) {
#if defined(_WIN32)
  if (!only_counted_ && !make_usable(base_ + offset, bytes)) throw std::bad_alloc();
#endif
}

void Region::give_back(uint64_t offset, uint64_t bytes) {
  if (!only_counted_) discard(base_ + offset, bytes);
}

uint64_t Region::resident_bytes() const {
  if (only_counted_) return 0;
#if defined(__linux__)
  const uint64_t page = system_page_bytes();
  std::vector<unsigned char> present(usable_bytes_ / page);
  if (present.empty() || mincore(base_, usable_bytes_, present.data()) != 0) return 0;
  return page * uint64_t(std::count_if(present.begin(), present.end(),
                                       [](unsigned char flags) { return flags & 1; }));
#else
  return usable_bytes_;
#endif
}

}  // namespace daf::paging
