// One reserved range of address space that holds every recycled block.
//
// Testing whether a pointer is ours is one subtraction and one comparison. Uncommitted address
// space is free, so the range is many times the machine's memory and fragmentation never matters.
//
// The unit is a slot of 2 MiB, a huge page. Blocks begin on a slot, so the kernel can back whole
// slots with huge pages, and mremap can move a slot's pages without copying, clearing or faulting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace daf {

constexpr uint64_t slot_bytes = 2 << 20;

class AddressRange {
 public:
  AddressRange() = default;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  ~AddressRange();

  // Reserves `wanted_bytes`, or half, a quarter, ... as the system grants; false below 1 GiB.
  bool reserve(uint64_t wanted_bytes);

  bool contains(const void* pointer) const {
    return reinterpret_cast<uintptr_t>(pointer) - base_ < bytes_;
  }
  uint32_t slots() const { return static_cast<uint32_t>(bytes_ / slot_bytes); }
  uint32_t slot_of(const void* pointer) const {
    return static_cast<uint32_t>((reinterpret_cast<uintptr_t>(pointer) - base_) / slot_bytes);
  }
  void* address(uint32_t slot) const {
    return reinterpret_cast<void*>(base_ + uint64_t(slot) * slot_bytes);
  }
  uintptr_t first() const { return base_; }
  uint64_t page_bytes() const { return page_bytes_; }

  // Takes the first run of `count` free slots; false if there is none.
  bool take(uint32_t count, uint32_t* first);
  // Commits `bytes` from the start of `slot`, with huge pages advised for whole slots; nothing is
  // resident yet. False if the system refuses.
  bool commit(uint32_t slot, uint64_t bytes);
  // Moves the pages of up to `count` slots to other slots, committed or not; the source stays
  // reserved and empty. Returns how many slots moved: 0 before Linux 5.7.
  uint32_t move_pages(uint32_t from, uint32_t to, uint32_t count);
  // Moves the first `bytes` of a slot, whole pages, likewise; false if the kernel cannot.
  bool move(uint32_t from, uint32_t to, uint64_t bytes);
  // Returns the pages between two page-aligned offsets to the system; they then read as zeros.
  void discard(uint32_t slot, uint64_t first_byte, uint64_t end_byte);
  // Returns the pages of these slots to the system and the slots to `take`.
  void give_back(uint32_t first, uint32_t count);

 private:
  uintptr_t base_ = 0;
  uint64_t bytes_ = 0;
  uintptr_t reserved_base_ = 0;
  uint64_t reserved_bytes_ = 0;
  uint64_t page_bytes_ = 4096;
  bool can_move_ = true;
  std::map<uint32_t, uint32_t> free_runs_;  // first slot -> count; neighbours always joined
};

}  // namespace daf
