#include "allocator/heap.h"

#ifdef __linux__

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>

namespace daf {

constexpr uint64_t reuse_excess_divisor = 4;  // a reused block is at most 25 % too large

bool BlockHeap::reserve(uint64_t range_bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (blocks_) return true;
  if (!range_.reserve(range_bytes)) return false;
  // The table is as sparse as the range: only used entries become resident.
  const uint64_t bytes = range_.slots() * sizeof(Block);
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* table = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (table != MAP_FAILED) blocks_ = static_cast<Block*>(table);
  return blocks_ != nullptr;
}

BlockHeap::~BlockHeap() {
  if (blocks_) munmap(blocks_, range_.slots() * sizeof(Block));
}

void BlockHeap::open() {
  const std::lock_guard<std::mutex> guard(mutex_);
  open_ = blocks_ != nullptr;
}

void BlockHeap::close() {
  const std::lock_guard<std::mutex> guard(mutex_);
  close_locked();
}

Served BlockHeap::allocate(uint64_t bytes, uint32_t label, bool must, void** pointer,
                           uint64_t* over_bytes) {
  const uint64_t page = range_.page_bytes();
  const uint64_t held_bytes = (bytes + page - 1) / page * page;
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!open_) return Served::no_memory;
  uint32_t slot;
  if (reuse(held_bytes, &slot)) {
    account_.hits.add();
  } else {
    Served served;
    do {
      while (!must && !fits_before_limit(held_bytes, over_bytes)) {
        if (fit_live_locked(*over_bytes) == 0) return Served::over_limit;
      }
      served = assemble(held_bytes, must, &slot);
      // Another thread's small blocks took the remaining room: try again.
    } while (served == Served::over_limit);
    if (served == Served::no_memory) return served;
  }
  make_live(slot, bytes, label);
  *pointer = range_.address(slot);
  return Served::yes;
}

// True if the block would fit with everything recycled returned to the system.
bool BlockHeap::fits_before_limit(uint64_t bytes, uint64_t* over_bytes) const {
  const uint64_t needed = account_.held.current() - account_.recycled.current() + bytes;
  const uint64_t limit = account_.limit.load();
  *over_bytes = needed > limit ? needed - limit : 0;
  return needed <= limit;
}

// Takes a recycled block, or its first slots, out of the index and sets its held bytes.
bool BlockHeap::reuse(uint64_t held_bytes, uint32_t* slot) {
  const auto found = by_size_.lower_bound({held_bytes, 0, 0});
  if (found == by_size_.end()) return false;
  const uint64_t found_bytes = std::get<0>(*found);
  const uint32_t count = slots_for(held_bytes);
  const uint64_t whole_bytes = count * slot_bytes;
  const bool splits = found_bytes >= whole_bytes + large_from_bytes;
  const uint64_t excess_bytes = (splits ? whole_bytes : found_bytes) - held_bytes;
  if (excess_bytes > held_bytes / reuse_excess_divisor) return false;
  *slot = std::get<2>(*found);
  if (splits) {
    drop_first(*slot, count);  // the rest stays recycled with its age
    blocks_[*slot].held_bytes = whole_bytes;
  } else {
    remove_recycled(*slot);
  }
  return true;
}

// Fills a new range of slots: pages of recycled blocks first, the system's for the rest.
Served BlockHeap::assemble(uint64_t held_bytes, bool must, uint32_t* slot) {
  if (held_bytes < slot_bytes && takes_all(held_bytes) && nearest_partial(held_bytes, slot)) {
    return resize(*slot, held_bytes, must);
  }
  const uint32_t count = slots_for(held_bytes);
  if (!take_slots(count, slot)) return Served::no_memory;
  const Served served = fill(*slot, held_bytes, must);
  if (served != Served::yes) range_.give_back(*slot, count);
  return served;
}

// Without free addresses, recycled blocks give up theirs.
bool BlockHeap::take_slots(uint32_t count, uint32_t* slot) {
  if (!range_.take(count, slot) && (shed_locked(no_limit) == 0 || !range_.take(count, slot))) {
    return false;
  }
  for (uint32_t each = *slot; each < *slot + count; ++each) {
    blocks_[each].first_mapping_bytes = slot_bytes;
  }
  if (*slot + count > highest_slot_) highest_slot_ = *slot + count;
  return true;
}

Served BlockHeap::fill(uint32_t slot, uint64_t held_bytes, bool must) {
  if (!range_.commit(slot, held_bytes)) return Served::no_memory;
  const auto whole = static_cast<uint32_t>(held_bytes / slot_bytes);
  uint64_t gathered_bytes = gather_pages(slot, whole) * slot_bytes;
  if (whole && takes_all(held_bytes - gathered_bytes)) {
    gathered_bytes += gather_tail(slot + whole, held_bytes % slot_bytes);
  }
  if (!charge(held_bytes - gathered_bytes, must)) {
    // Another thread's small blocks took the room: the gathered pages leave the account.
    count_returned(gathered_bytes);
    return Served::over_limit;
  }
  if (gathered_bytes) account_.assembled.add();
  account_.moved_bytes.add(gathered_bytes);
  account_.fresh_bytes.add(held_bytes - gathered_bytes);
  blocks_[slot].held_bytes = held_bytes;
  return Served::yes;
}

// True if `held_bytes` more would pass the limit, or without one: then no recycled page lies idle.
bool BlockHeap::takes_all(uint64_t held_bytes) const {
  const uint64_t limit = account_.limit.load();
  return limit == no_limit || account_.held.current() + held_bytes > limit;
}

// Finds the recycled block shorter than a slot whose size is nearest; false if there is none.
bool BlockHeap::nearest_partial(uint64_t held_bytes, uint32_t* slot) const {
  const auto larger = by_size_.lower_bound({held_bytes, 0, 0});
  const bool has_larger = larger != by_size_.end() && std::get<0>(*larger) < slot_bytes;
  const bool has_smaller = larger != by_size_.begin();
  if (!has_larger && !has_smaller) return false;
  auto nearest = has_smaller ? std::prev(larger) : larger;
  if (has_larger && has_smaller &&
      std::get<0>(*larger) - held_bytes <= held_bytes - std::get<0>(*nearest)) {
    nearest = larger;
  }
  *slot = std::get<2>(*nearest);
  return true;
}

// Resizes a recycled block shorter than a slot in place: its address range is a slot of its own.
Served BlockHeap::resize(uint32_t slot, uint64_t held_bytes, bool must) {
  const uint64_t before_bytes = blocks_[slot].held_bytes;
  remove_recycled(slot);
  if (before_bytes >= held_bytes) {
    range_.discard(slot, held_bytes, before_bytes);
    count_returned(before_bytes - held_bytes);
  } else if (!range_.commit(slot, held_bytes)) {
    return_slots(slot, 1, before_bytes);
    return Served::no_memory;
  } else if (!charge(held_bytes - before_bytes, must)) {
    return_slots(slot, 1, before_bytes);
    return Served::over_limit;
  } else {
    account_.fresh_bytes.add(held_bytes - before_bytes);
  }
  account_.resized.add();
  blocks_[slot].held_bytes = held_bytes;
  return Served::yes;
}

// Moves the pages of a recycled block shorter than a slot into a new block's last, partial slot;
// returns their bytes. Its other pages go to the system.
uint64_t BlockHeap::gather_tail(uint32_t to, uint64_t wanted_bytes) {
  uint32_t from;
  if (wanted_bytes == 0 || !nearest_partial(wanted_bytes, &from)) return 0;
  const uint64_t held_bytes = blocks_[from].held_bytes;
  const uint64_t movable_bytes = std::min(held_bytes, blocks_[from].first_mapping_bytes);
  const uint64_t moved_bytes = std::min(movable_bytes, wanted_bytes);
  if (moved_bytes == 0) return 0;
  if (!range_.move(from, to, moved_bytes)) {
    blocks_[to].first_mapping_bytes = 0;  // unknown from now on
    return 0;
  }
  blocks_[to].first_mapping_bytes = moved_bytes;
  remove_recycled(from);
  range_.give_back(from, 1);
  if (held_bytes > moved_bytes) count_returned(held_bytes - moved_bytes);
  return moved_bytes;
}

uint32_t BlockHeap::gather_pages(uint32_t slot, uint32_t wanted) {
  uint32_t gathered = 0;
  while (gathered < wanted && !by_age_.empty()) {
    const uint32_t moved = move_from_oldest(slot + gathered, wanted - gathered);
    if (moved == 0) break;
    gathered += moved;
  }
  return gathered;
}

// Moves up to `wanted` slots from the oldest block with whole slots; returns how many.
uint32_t BlockHeap::move_from_oldest(uint32_t to, uint32_t wanted) {
  for (const auto& aged : by_age_) {
    const uint32_t from = aged.second;  // a copy: the entry is erased below
    const auto whole = static_cast<uint32_t>(blocks_[from].held_bytes / slot_bytes);
    if (whole == 0) continue;
    const uint32_t count = range_.move_pages(from, to, whole < wanted ? whole : wanted);
    if (count == 0) return 0;
    drop_first(from, count);
    range_.give_back(from, count);
    return count;
  }
  return 0;
}

// Removes a recycled block's first slots; a rest too short for reuse goes to the system.
void BlockHeap::drop_first(uint32_t slot, uint32_t count) {
  const Block whole = blocks_[slot];
  const uint64_t rest_bytes = whole.held_bytes - count * slot_bytes;
  remove_recycled(slot);
  if (rest_bytes >= large_from_bytes) {
    insert_recycled(slot + count, rest_bytes, whole.stamp);
  } else if (rest_bytes > 0) {
    return_slots(slot + count, 1, rest_bytes);
  }
}

// Enters fresh bytes into the account, returning recycled ones as the limit requires.
bool BlockHeap::charge(uint64_t bytes, bool must) {
  while (const uint64_t over = account_.hold(bytes)) {
    if (shed_locked(over) == 0 && fit_live_locked(over) == 0) {
      if (must) account_.overdraw(bytes);
      return must;
    }
    account_.emptied.add();
  }
  return true;
}

void BlockHeap::make_live(uint32_t slot, uint64_t bytes, uint32_t label) {
  Block& block = blocks_[slot];
  block.bytes = bytes;
  block.label = label;
  block.state = State::live;
  block.stamp = ++clock_;
  ++live_count_;
  account_.live.add(bytes);
  account_.allocations.add();
  account_.note_watermark();
}

BlockHeap::Block& BlockHeap::live_block(const void* pointer) {
  const uint32_t slot = range_.slot_of(pointer);
  Block& block = blocks_[slot];
  if (block.state != State::live || range_.address(slot) != pointer) {
    std::fprintf(stderr, "daf: %p is freed twice, or is not the start of a block\n", pointer);
    std::abort();
  }
  return block;
}

void BlockHeap::release(void* pointer) {
  const std::lock_guard<std::mutex> guard(mutex_);
  Block& block = live_block(pointer);
  --live_count_;
  account_.live.subtract(block.bytes);
  account_.frees.add();
  insert_recycled(range_.slot_of(pointer), block.held_bytes, ++clock_);
  const uint64_t keep_bytes = open_ ? cap_bytes_ : 0;
  const uint64_t recycled = account_.recycled.current();
  if (recycled > keep_bytes) shed_locked(recycled - keep_bytes);
  // Above a limit lowered meanwhile, freed bytes go to the system.
  const uint64_t held = account_.held.current();
  const uint64_t limit = account_.limit.load();
  if (held > limit) shed_locked(held - limit);
}

uint64_t BlockHeap::usable_bytes(const void* pointer) {
  const std::lock_guard<std::mutex> guard(mutex_);
  return live_block(pointer).bytes;
}

bool BlockHeap::shrink(const void* pointer, uint64_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  Block& block = live_block(pointer);
  if (bytes > block.bytes) return false;
  account_.live.subtract(block.bytes - bytes);
  block.bytes = bytes;
  fit_live(range_.slot_of(pointer));
  return true;
}

void BlockHeap::insert_recycled(uint32_t slot, uint64_t held_bytes, uint64_t stamp) {
  Block& block = blocks_[slot];
  block.state = State::recycled;
  block.held_bytes = held_bytes;
  block.stamp = stamp;
  by_size_.emplace(held_bytes, ~stamp, slot);
  by_age_.emplace(stamp, slot);
  account_.recycled.add(held_bytes);
}

void BlockHeap::remove_recycled(uint32_t slot) {
  Block& block = blocks_[slot];
  by_size_.erase({block.held_bytes, ~block.stamp, slot});
  by_age_.erase({block.stamp, slot});
  block.state = State::unused;
  account_.recycled.subtract(block.held_bytes);
}

void BlockHeap::set_cap(uint64_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  cap_bytes_ = bytes;
  const uint64_t recycled = account_.recycled.current();
  if (recycled > bytes) shed_locked(recycled - bytes);
}

uint64_t BlockHeap::shed(uint64_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const uint64_t shed = shed_locked(bytes);
  return shed < bytes ? shed + fit_live_locked(bytes - shed) : shed;
}

uint64_t BlockHeap::shed_locked(uint64_t bytes) {
  uint64_t shed = 0;
  while (shed < bytes && !by_age_.empty()) shed += shed_oldest(bytes - shed);
  return shed;
}

// Sheds the oldest block, or as many of its first slots as needed.
uint64_t BlockHeap::shed_oldest(uint64_t bytes) {
  const uint32_t slot = by_age_.begin()->second;
  const Block whole = blocks_[slot];
  const uint32_t count = bytes < whole.held_bytes ? slots_for(bytes) : slots_for(whole.held_bytes);
  remove_recycled(slot);
  uint64_t first_bytes = count * slot_bytes;
  if (first_bytes + large_from_bytes > whole.held_bytes) {
    first_bytes = whole.held_bytes;
  } else {
    insert_recycled(slot + count, whole.held_bytes - first_bytes, whole.stamp);
  }
  return_slots(slot, slots_for(first_bytes), first_bytes);
  return first_bytes;
}

// Live blocks return what exceeds their request: at least `bytes`, or all.
uint64_t BlockHeap::fit_live_locked(uint64_t bytes) {
  uint64_t returned = 0;
  for (uint32_t slot = 0; slot < highest_slot_ && returned < bytes; ++slot) {
    if (blocks_[slot].state == State::live) returned += fit_live(slot);
  }
  return returned;
}

uint64_t BlockHeap::fit_live(uint32_t slot) {
  Block& block = blocks_[slot];
  const uint64_t page = range_.page_bytes();
  const uint64_t exact_bytes = (block.bytes + page - 1) / page * page;
  const uint64_t before_bytes = block.held_bytes;
  if (before_bytes <= exact_bytes) return 0;
  const uint32_t count = slots_for(exact_bytes), before = slots_for(before_bytes);
  const uint64_t whole_bytes = count * slot_bytes;
  if (before > count) {
    return_slots(slot + count, before - count, before_bytes - whole_bytes);
    block.held_bytes = whole_bytes;
  }
  if (block.held_bytes > exact_bytes) {
    range_.discard(slot, exact_bytes, block.held_bytes);
    count_returned(block.held_bytes - exact_bytes);
    block.held_bytes = exact_bytes;
  }
  return before_bytes - exact_bytes;
}

void BlockHeap::return_slots(uint32_t slot, uint32_t count, uint64_t held_bytes) {
  range_.give_back(slot, count);
  count_returned(held_bytes);
  account_.returned_blocks.add();
}

void BlockHeap::count_returned(uint64_t bytes) {
  account_.held.subtract(bytes);
  account_.returned_bytes.add(bytes);
}

std::vector<LiveBlock> BlockHeap::live_blocks() {
  std::vector<LiveBlock> found;
  const std::lock_guard<std::mutex> guard(mutex_);
  found.reserve(live_count_);
  for (uint32_t slot = 0; slot < highest_slot_; ++slot) {
    const Block& block = blocks_[slot];
    if (block.state != State::live) continue;
    found.push_back({reinterpret_cast<uintptr_t>(range_.address(slot)), block.bytes,
                     block.held_bytes, block.stamp, block.label});
  }
  return found;
}

uint64_t BlockHeap::live_count() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return live_count_;
}

}  // namespace daf

#endif  // __linux__
