// Memory that ends where reading or writing on faults.
#pragma once

#include <cstddef>
#include <cstdint>

namespace daf::vectors {

// Where in its memory a buffer lies: the page before at_start and the one behind at_end may not
// be touched; displaced is a little behind the start, as badly aligned as its elements allow.
enum class Placement { at_start, displaced, at_end };
constexpr Placement placements[] = {Placement::at_start, Placement::displaced, Placement::at_end};

// One buffer at a time, with poison around it where there is room.
class Guarded {
 public:
  Guarded() = default;
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  // The buffer, of undefined content; valid until the next call.
  uint8_t* place(size_t size, Placement placement, size_t alignment);
  uint8_t* data() const { return data_; }
  // Whether the poison is as it was.
  bool intact() const;

 private:
  void reserve(size_t size);
  void release();

  uint8_t *start_ = nullptr, *end_ = nullptr;  // between the pages that fault
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

constexpr uint8_t poison = 0xA5;

}  // namespace daf::vectors
