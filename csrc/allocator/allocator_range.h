// One reserved stretch of address space, in which every recycled block lives.
//
// Whether a pointer is ours is therefore one subtraction and one comparison, whatever the pointer;
// no foreign memory is read. Address space costs nothing until it is committed, so the stretch is
// many times the machine's memory and fragmentation of addresses never matters.
//
// The unit is a slot of 2 MiB, the size of a huge page: each block begins on a slot, so that the
// kernel can back all its whole slots with huge pages, and so that the *pages* of a slot can be
// moved to another slot (mremap) without being copied, cleared or faulted in again.
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

  // Reserves `wanted_bytes`, or half, a quarter, ... of it where the system grants no more;
  // false where it grants less than 1 GiB. Before that the range is empty.
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

  // The first run of `count` free slots; false where there is none.
  bool take(uint32_t count, uint32_t* first);
  // Makes `bytes` from the start of `slot` readable and writable; huge pages advised for all
  // whole slots. Nothing is resident yet. False where the system refuses.
  bool commit(uint32_t slot, uint64_t bytes);
  // Moves the pages of up to `count` slots to as many others, committed or not; the source stays
  // reserved and empty. Returns how many slots were moved: 0 where the kernel cannot (before
  // Linux 5.7).
  uint32_t move_pages(uint32_t from, uint32_t to, uint32_t count);
  // Moves the first `bytes` of a slot, whole pages, in the same way; false where it cannot.
  bool move_part(uint32_t from, uint32_t to, uint64_t bytes);
  // Gives the pages between two offsets from the start of a slot back to the system; both are
  // multiples of a page. The range stays committed, and reads as zeros.
  void discard(uint32_t slot, uint64_t first_byte, uint64_t end_byte);
  // Gives the pages of these slots back to the system and the slots back to `take`.
  void give_back(uint32_t first, uint32_t count);

 private:
  bool move(uint32_t from, uint32_t to, uint64_t bytes);

  uintptr_t base_ = 0;
  uint64_t bytes_ = 0;
  uintptr_t reserved_base_ = 0;
  uint64_t reserved_bytes_ = 0;
  uint64_t page_bytes_ = 4096;
  bool can_move_ = true;
  std::map<uint32_t, uint32_t> free_runs_;  // first slot -> count; neighbours always joined
};

}  // namespace daf
