#include "arguments/strided.h"

#include <algorithm>
#include <cstring>

namespace daf {
namespace {

// A place in a view; moves along its innermost dimension and carries into the others.
class Cursor {
 public:
  Cursor(const View& view, uint64_t element) : view_(view) {
    for (int d = view.dimensions - 1; d >= 0; --d) {
      place_[d] = element % view.size[d];
      element /= view.size[d];
      offset_ += int64_t(place_[d]) * view.stride[d];
    }
  }

  int64_t offset() const { return offset_; }
  uint64_t left_in_row() const { return view_.size[inner()] - place_[inner()]; }

  void advance(uint64_t elements) {
    place_[inner()] += elements;
    offset_ += int64_t(elements) * view_.stride[inner()];
    for (int d = inner(); d > 0 && place_[d] == view_.size[d]; --d) carry(d);
  }

 private:
  int inner() const { return view_.dimensions - 1; }

  void carry(int d) {
    offset_ += view_.stride[d - 1] - int64_t(view_.size[d]) * view_.stride[d];
    place_[d] = 0;
    ++place_[d - 1];
  }

  const View& view_;
  uint64_t place_[view_dimensions] = {};
  int64_t offset_ = 0;
};

template <size_t bytes>
void copy_row(char* to, const char* from, size_t elements, int64_t stride) {
  for (size_t i = 0; i < elements; ++i)
    std::memcpy(to + i * bytes, from + int64_t(i) * stride * int64_t(bytes), bytes);
}

void copy_elements(char* to, const char* from, size_t elements, int64_t stride, size_t bytes) {
  if (stride == 1)
    std::memcpy(to, from, elements * bytes);
  else if (bytes == 4)
    copy_row<4>(to, from, elements, stride);
  else
    copy_row<2>(to, from, elements, stride);
}

}  // namespace

const char* gather(const View& view, const char* data, size_t element_bytes, uint64_t first,
                   size_t count, char* room) {
  Cursor cursor(view, first);
  const int64_t stride = view.stride[view.dimensions - 1];
  for (size_t done = 0; done < count;) {
    const size_t run = size_t(std::min<uint64_t>(cursor.left_in_row(), count - done));
    const char* from = data + cursor.offset() * int64_t(element_bytes);
    if (run == count && stride == 1) return from;
    copy_elements(room + done * element_bytes, from, run, stride, element_bytes);
    cursor.advance(run);
    done += run;
  }
  return room;
}

}  // namespace daf
