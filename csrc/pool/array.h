// An array that grows without moving: address space for all elements, memory for those in use.
#pragma once

#include <algorithm>

#include "pool/region.h"

namespace daf::paging {

template <class T>
class GrowingArray {
 public:
  explicit GrowingArray(uint64_t most) : region_(most * sizeof(T), extension_bytes) {}

  uint64_t most() const { return region_.bytes() / sizeof(T); }
  uint64_t size() const { return size_; }
  T& operator[](uint64_t i) { return reinterpret_cast<T*>(region_.base())[i]; }
  const T& operator[](uint64_t i) const { return reinterpret_cast<const T*>(region_.base())[i]; }

  // Makes room for `size` elements; new ones are all zero bits. Throws std::bad_alloc.
  void extend(uint64_t size) {
    if (size <= size_) return;
    region_.extend(std::min(round_up(size * sizeof(T), extension_bytes), region_.bytes()));
    size_ = size;
  }

  // Memory that `size` elements take, in the system's units.
  static uint64_t bytes_for(uint64_t size) {
    return round_up(size * sizeof(T), Region::system_page_bytes());
  }

 private:
  static constexpr uint64_t extension_bytes = 64 << 10;

  Region region_;
  uint64_t size_ = 0;
};

}  // namespace daf::paging
