#include "guarded.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace daf::vectors {
namespace {

constexpr size_t displacement_elements = 13;
constexpr size_t margin_bytes = 512;  // poisoned on either side: two rows of 64 floats

size_t page_bytes() { return size_t(sysconf(_SC_PAGESIZE)); }

bool all_poison(const uint8_t* first, const uint8_t* last) {
  return std::all_of(first, last, [](uint8_t byte) { return byte == poison; });
}

}  // namespace

Guarded::~Guarded() { release(); }

void Guarded::release() {
  if (start_) munmap(start_ - page_bytes(), size_t(end_ - start_) + 2 * page_bytes());
}

void Guarded::reserve(size_t size) {
  if (start_ && size_t(end_ - start_) >= size) return;
  release();
  const size_t page = page_bytes(), room = (2 * size + page) / page * page;
  void* found = mmap(nullptr, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  start_ = static_cast<uint8_t*>(found) + page;
  end_ = start_ + room;
  if (mprotect(start_, room, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
}

uint8_t* Guarded::place(size_t size, Placement placement, size_t alignment) {
  const size_t displacement = displacement_elements * alignment;
  reserve(size + displacement + margin_bytes);
  data_ = placement == Placement::at_end ? end_ - size : start_;
  if (placement == Placement::displaced) data_ += displacement;
  size_ = size;
  uint8_t* first = data_ - std::min(margin_bytes, size_t(data_ - start_));
  uint8_t* last = data_ + size + std::min(margin_bytes, size_t(end_ - data_) - size);
  std::memset(first, poison, size_t(last - first));
  return data_;
}

bool Guarded::intact() const {
  const size_t before = std::min(margin_bytes, size_t(data_ - start_));
  const size_t behind = std::min(margin_bytes, size_t(end_ - data_) - size_);
  const uint8_t* tail = data_ + size_;
  return all_poison(data_ - before, data_) && all_poison(tail, tail + behind);
}

}  // namespace daf::vectors
