// A source that does not lie in one piece: elements by sizes and strides.
#pragma once

#include <cstddef>
#include <cstdint>

namespace daf {

constexpr int view_dimensions = 6;

// Elements in row-major order of the sizes, whatever the strides; none where dimensions is 0.
struct View {
  int dimensions = 0;
  uint64_t size[view_dimensions] = {};   // outermost first, none 0
  int64_t stride[view_dimensions] = {};  // in elements; 0 and negative ones too
};

// Where elements [first, first + count) lie one after the other: in the source itself if they do
// so there, otherwise in `room`, to which they are copied.
const char* gather(const View& view, const char* data, size_t element_bytes, uint64_t first,
                   size_t count, char* room);

}  // namespace daf
