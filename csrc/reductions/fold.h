// Folds rows of partial results by halving strides, in a workspace. Only for files compiled for
// every processor: nothing here may be inlined for a wider set.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "arguments/channels.h"

namespace daf {

// Combines rows i and i + stride, stride = …, 4, 2, 1 from the greatest power of 2 below `rows`.
template <class Number, class Combine>
void fold_rows(Number* numbers, size_t rows, uint64_t width, Combine combine) {
  for (size_t stride = std::bit_ceil(rows); stride > 1; rows = stride) {
    stride /= 2;
    for (uint64_t i = 0; i < (rows - stride) * width; ++i)
      numbers[i] = combine(numbers[i], numbers[i + stride * width]);
  }
}

// The caller's numbers may lie at any address.
template <class Number> void store_result(Number* results, uint64_t place, Number result) {
  std::memcpy(reinterpret_cast<char*>(results) + place * sizeof result, &result, sizeof result);
}

// Hands out aligned parts of a workspace.
class Workspace {
 public:
  explicit Workspace(uintptr_t address) : next_(address) {}

  template <class Item> Item* take(uint64_t items) {
    const uintptr_t aligned = (next_ + line_bytes - 1) / line_bytes * line_bytes;
    next_ = aligned + items * sizeof(Item);
    return reinterpret_cast<Item*>(aligned);
  }

  uintptr_t end() const { return next_; }

 private:
  uintptr_t next_;
};

}  // namespace daf
