// A range of address space, reserved at once and given memory in parts; addresses never move. A
// region that is only counted has neither addresses nor memory: its content lies on a GPU.
#pragma once

#include <cstdint>

namespace daf::paging {

class Region {
 public:
  // Reserves `wanted_bytes`, or half, a quarter, ...; throws std::bad_alloc below `least_bytes`.
  Region(uint64_t wanted_bytes, uint64_t least_bytes, bool only_counted = false);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  uint8_t* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }

  // Makes [0, bytes) usable; what was usable before stays. Throws std::bad_alloc.
  void extend(uint64_t bytes);
  // Restores memory to a returned part (where the system requires a call).
  void take_back(uint64_t offset, uint64_t bytes);
  // Returns the memory of a usable part to the system; its content is lost.
  void give_back(uint64_t offset, uint64_t bytes);
  // Bytes of the usable part that are resident, as the system counts.
  uint64_t resident_bytes() const;

  static uint64_t system_page_bytes();

 private:
  uint8_t* base_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t usable_bytes_ = 0;
  const bool only_counted_;
};

inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace daf::paging
