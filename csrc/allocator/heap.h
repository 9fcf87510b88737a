// Blocks of 128 KiB and more: kept when freed, reused by best fit, returned oldest first.
//
// An allocation is served, in this order, by
//   1. a recycled block at most 25 % larger (excess whole slots stay recycled), or the first slots
//      of a larger one: no system call;
//   2. a fresh address range whose whole slots receive the pages of recycled blocks of any size:
//      about 2 microseconds per 2 MiB, where faulting them in costs 150 to 900;
//   3. pages from the system, only for what is still missing.
// So recycled memory never lies idle while an allocation grows the process.
//
// Blocks shorter than a slot are kept by size within the limit. At the limit, or without one, the
// recycled block of the nearest size is resized in place, or fills a longer block's partial slot.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "allocator/account.h"
#include "allocator/range.h"

namespace daf {

constexpr uint64_t large_from_bytes = 128 << 10;

struct LiveBlock {
  uintptr_t address;
  uint64_t bytes;
  uint64_t held_bytes;
  uint64_t order;  // counts allocations: a block with a larger number is younger
  uint32_t label;
};

enum class Served { yes, no_memory, over_limit };

class BlockHeap {
 public:
  explicit BlockHeap(Account& account) : account_(account) {}
  ~BlockHeap();

  // Call once, before `open`; false if the system grants no address space.
  bool reserve(uint64_t range_bytes);
  // First address and bytes of the range of all blocks.
  std::pair<uintptr_t, uint64_t> address_range() const {
    return {range_.first(), range_.slots() * slot_bytes};
  }
  bool owns(const void* pointer) const { return range_.contains(pointer); }

  // While closed, the heap serves nothing and returns freed blocks to the system.
  void open();
  void close();

  // With over_limit, `over_bytes` must be freed first; with `must`, the limit is exceeded instead.
  Served allocate(uint64_t bytes, uint32_t label, bool must, void** pointer, uint64_t* over_bytes);
  // Aborts, as the C library does, if no live block starts there.
  void release(void* pointer);
  // What was asked: a limit may take the rest of what the block holds at any moment.
  uint64_t usable_bytes(const void* pointer);
  // Returns what a live block holds beyond `bytes` to the system; false if it was asked for less.
  bool shrink(const void* pointer, uint64_t bytes);

  // Sets the most that may lie recycled; acts at once.
  void set_cap(uint64_t bytes);
  // Returns at least `bytes`, or all, to the system: recycled memory, then live blocks' excess.
  uint64_t shed(uint64_t bytes);

  std::vector<LiveBlock> live_blocks();
  uint64_t live_count();

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  void close_locked() {
    open_ = false;
    shed_locked(no_limit);
  }

 private:
  enum class State : uint32_t { unused, live, recycled };

  // Lies in the entry of its first slot; other slots' entries use only the last field.
  struct Block {
    uint64_t bytes;       // requested
    uint64_t held_bytes;  // whole pages; whole slots where pages were moved in
    uint64_t stamp;       // when it was freed, or allocated
    State state;
    uint32_t label;
    // Bytes of each slot in one mapping, as moving pages requires; fewer after a partial move.
    uint64_t first_mapping_bytes;
  };

  using BySize = std::set<std::tuple<uint64_t, uint64_t, uint32_t>>;  // held, ~stamp, slot
  using ByAge = std::set<std::pair<uint64_t, uint32_t>>;              // stamp, slot

  static uint32_t slots_for(uint64_t bytes) {
    return static_cast<uint32_t>((bytes + slot_bytes - 1) / slot_bytes);
  }
  bool fits_before_limit(uint64_t bytes, uint64_t* over_bytes) const;
  bool reuse(uint64_t held_bytes, uint32_t* slot);
  Served assemble(uint64_t held_bytes, bool must, uint32_t* slot);
  Served fill(uint32_t slot, uint64_t held_bytes, bool must);
  bool takes_all(uint64_t held_bytes) const;
  bool nearest_partial(uint64_t held_bytes, uint32_t* slot) const;
  Served resize(uint32_t slot, uint64_t held_bytes, bool must);
  uint64_t gather_tail(uint32_t to, uint64_t wanted_bytes);
  bool take_slots(uint32_t count, uint32_t* slot);
  void count_returned(uint64_t bytes);
  uint32_t gather_pages(uint32_t slot, uint32_t wanted);
  uint32_t move_from_oldest(uint32_t to, uint32_t wanted);
  bool charge(uint64_t bytes, bool must);
  void drop_first(uint32_t slot, uint32_t count);
  void make_live(uint32_t slot, uint64_t bytes, uint32_t label);
  void insert_recycled(uint32_t slot, uint64_t held_bytes, uint64_t stamp);
  void remove_recycled(uint32_t slot);
  uint64_t shed_locked(uint64_t bytes);
  uint64_t shed_oldest(uint64_t bytes);
  uint64_t fit_live_locked(uint64_t bytes);
  uint64_t fit_live(uint32_t slot);
  void return_slots(uint32_t slot, uint32_t count, uint64_t held_bytes);
  Block& live_block(const void* pointer);

  std::mutex mutex_;
  Account& account_;
  AddressRange range_;
  Block* blocks_ = nullptr;  // one per slot
  uint32_t highest_slot_ = 0;
  uint64_t cap_bytes_ = no_limit;
  uint64_t clock_ = 0;
  uint64_t live_count_ = 0;
  bool open_ = false;
  BySize by_size_;
  ByAge by_age_;
};

}  // namespace daf
