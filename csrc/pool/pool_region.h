// A stretch of address space, reserved at once and given memory piece by piece.
//
// Addresses never move, so pages may be pointed at; what is not in use costs no memory. Linux
// reserves with mmap(PROT_NONE, NORESERVE) and gives back with madvise; other Unixes give back by
// mapping afresh; Windows reserves, commits and decommits. A region that is only counted has
// neither addresses nor memory: what is in it lies elsewhere, on a GPU.
#pragma once

#include <cstdint>

namespace daf::paging {

class Region {
 public:
  // Reserves `wanted_bytes`, or half, a quarter, ... of it where the system grants no more;
  // throws std::bad_alloc where it grants less than `least_bytes`.
  Region(uint64_t wanted_bytes, uint64_t least_bytes, bool only_counted = false);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  uint8_t* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }

  // Makes [0, bytes) usable; what was usable before stays. Throws std::bad_alloc.
  void extend(uint64_t bytes);
  // Memory for a piece that was given back (where the system wants to be told).
  void take_back(uint64_t offset, uint64_t bytes);
  // Gives the memory of a usable piece back to the system; its content is lost.
  void give_back(uint64_t offset, uint64_t bytes);
  // Bytes of the usable part that are in memory now, as the system sees it.
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
