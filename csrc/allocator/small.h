// The addresses and sizes of small blocks that are tensors.
//
// glibc serves blocks below 128 KiB; its header has their size but not their owner, and the torch
// libraries free strings through the same slot. So each small tensor's address is noted at birth.
// Only multiples of 64 can be tensors, which spares three quarters of other frees the look-up.
#pragma once

#include <cstdint>
#include <mutex>
#include <new>
#include <unordered_map>

namespace daf {

struct SmallBlock {
  uint64_t address = 0;  // 0: none
  uint64_t bytes = 0;
};

constexpr uint64_t small_alignment = 64;

class SmallBlocks {
 public:
  void open() { set_open(true); }
  // Removes every block, passing each to `visit`.
  template <class Visit> void close(Visit visit) {
    set_open(false);
    for (Shard& shard : shards_) {
      const std::lock_guard<std::mutex> lock(shard.mutex);
      for (const auto& [address, bytes] : shard.blocks) visit(SmallBlock{address, bytes});
      shard.blocks = {};
    }
  }

  // False while closed, or without memory to note it.
  bool insert(SmallBlock block) {
    Shard& shard = shard_of(block.address);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    if (!open_) return false;
    try {
      shard.blocks[block.address] = block.bytes;
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }
  SmallBlock remove(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (address % small_alignment != 0 || address == 0) return {};
    Shard& shard = shard_of(address);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    const auto found = shard.blocks.find(address);
    if (found == shard.blocks.end()) return {};
    const SmallBlock block{address, found->second};
    shard.blocks.erase(found);
    return block;
  }
  uint64_t count() {
    uint64_t sum = 0;
    for (Shard& shard : shards_) {
      const std::lock_guard<std::mutex> lock(shard.mutex);
      sum += shard.blocks.size();
    }
    return sum;
  }

  // Notes no more; what is noted is still forgotten when it is freed. Under all locks.
  void close_locked() { open_ = false; }

  // Around fork, so that the child has no lock held by a missing thread.
  void lock() {
    for (Shard& shard : shards_) shard.mutex.lock();
  }
  void unlock() {
    for (Shard& shard : shards_) shard.mutex.unlock();
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::unordered_map<uint64_t, uint64_t> blocks;  // bytes by address
  };
  static constexpr uint64_t shard_count = 16;
  Shard& shard_of(uint64_t address) { return shards_[(address >> 12) % shard_count]; }
  void set_open(bool open) {
    lock();
    open_ = open;
    unlock();
  }

  Shard shards_[shard_count];
  bool open_ = false;  // read under any shard's lock, written under all
};

}  // namespace daf
