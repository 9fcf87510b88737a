// The addresses and sizes of small blocks that are tensors.
//
// glibc serves blocks below 128 KiB; its header has their size but not their owner, and the torch
// libraries free strings through the same slot. So each small tensor's address is noted at birth.
// Only multiples of 64 can be tensors, which spares three quarters of other frees the look-up.
// Noting and forgetting cost about 30 ns each.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <utility>

namespace daf {

struct SmallBlock {
  uint64_t address = 0;  // 0: empty
  uint64_t bytes = 0;
};

constexpr uint64_t small_alignment = 64;

// One shard of the address-keyed hash table: open addressing, linear probing, no tombstones.
class SmallShard {
 public:
  ~SmallShard() { std::free(entries_); }

  // False if there is no memory for a larger table.
  bool insert(SmallBlock block) {
    if (2 * (count_ + 1) > capacity_ && !grow()) return false;
    SmallBlock& entry = entries_[find(block.address)];
    count_ += entry.address == 0;
    entry = block;
    return true;
  }

  // Removes and returns the entry of `address`; zeros if there is none.
  SmallBlock remove(uint64_t address) {
    if (count_ == 0) return {};
    uint64_t hole = find(address);
    const SmallBlock found = entries_[hole];
    if (found.address == 0) return {};
    // Close the gap, so that probing never has to skip a deleted entry.
    for (uint64_t next = step(hole); entries_[next].address != 0; next = step(next)) {
      const uint64_t home = hash(entries_[next].address);
      if (((next - home) & (capacity_ - 1)) < ((next - hole) & (capacity_ - 1))) continue;
      entries_[hole] = entries_[next];
      hole = next;
    }
    entries_[hole] = {};
    --count_;
    return found;
  }

  template <class Visit>
  void clear(Visit visit) {
    for (uint64_t index = 0; index < capacity_; ++index) {
      if (entries_[index].address) visit(entries_[index]);
    }
    std::free(entries_);
    entries_ = nullptr;
    capacity_ = count_ = 0;
  }

  uint64_t count() const { return count_; }
  std::mutex& mutex() { return mutex_; }

 private:
  uint64_t hash(uint64_t address) const {
    return (address * 0x9E3779B97F4A7C15ull >> 20) & (capacity_ - 1);
  }
  uint64_t step(uint64_t index) const { return (index + 1) & (capacity_ - 1); }

  // The place of `address`, or the empty place where it belongs.
  uint64_t find(uint64_t address) const {
    uint64_t index = hash(address);
    while (entries_[index].address != 0 && entries_[index].address != address) index = step(index);
    return index;
  }

  bool grow() {
    SmallShard larger;
    larger.capacity_ = capacity_ ? 2 * capacity_ : 64;
    larger.entries_ = static_cast<SmallBlock*>(std::calloc(larger.capacity_, sizeof(SmallBlock)));
    if (!larger.entries_) return false;
    for (uint64_t index = 0; index < capacity_; ++index) {
      if (entries_[index].address) larger.insert(entries_[index]);
    }
    std::swap(entries_, larger.entries_);
    std::swap(capacity_, larger.capacity_);
    return true;
  }

  std::mutex mutex_;
  SmallBlock* entries_ = nullptr;
  uint64_t capacity_ = 0;
  uint64_t count_ = 0;
};

class SmallBlocks {
 public:
  void open() { set_open(true); }
  // Removes every block, passing each to `visit`.
  template <class Visit>
  void close(Visit visit) {
    set_open(false);
    for (SmallShard& shard : shards_) {
      const std::lock_guard<std::mutex> lock(shard.mutex());
      shard.clear(visit);
    }
  }

  // False while closed, or without memory to note it.
  bool insert(SmallBlock block) {
    SmallShard& shard = shard_of(block.address);
    const std::lock_guard<std::mutex> lock(shard.mutex());
    return open_ && shard.insert(block);
  }
  SmallBlock remove(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (address % small_alignment != 0 || address == 0) return {};
    SmallShard& shard = shard_of(address);
    const std::lock_guard<std::mutex> lock(shard.mutex());
    return shard.remove(address);
  }
  uint64_t count() {
    uint64_t sum = 0;
    for (SmallShard& shard : shards_) {
      const std::lock_guard<std::mutex> lock(shard.mutex());
      sum += shard.count();
    }
    return sum;
  }

  // Notes no more; what is noted is still forgotten when it is freed. Under all locks.
  void close_locked() { open_ = false; }

  // Around fork, so that the child has no lock held by a missing thread.
  void lock() {
    for (SmallShard& shard : shards_) shard.mutex().lock();
  }
  void unlock() {
    for (SmallShard& shard : shards_) shard.mutex().unlock();
  }

 private:
  static constexpr uint64_t shard_count = 16;
  SmallShard& shard_of(uint64_t address) { return shards_[(address >> 12) % shard_count]; }
  void set_open(bool open) {
    lock();
    open_ = open;
    unlock();
  }

  SmallShard shards_[shard_count];
  bool open_ = false;  // read under any shard's lock, written under all
};

}  // namespace daf
