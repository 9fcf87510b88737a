// The account that the limit bounds. Atomic counters: a small allocation costs two additions.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace daf {

constexpr uint64_t no_limit = ~uint64_t(0);

inline void raise_to(std::atomic<uint64_t>& peak, uint64_t value) {
  uint64_t seen = peak.load(std::memory_order_relaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

// A number of bytes or blocks and its maximum.
class Gauge {
 public:
  uint64_t add(uint64_t amount) {
    const uint64_t now = current_.fetch_add(amount, std::memory_order_relaxed) + amount;
    raise_to(peak_, now);
    return now;
  }
  void subtract(uint64_t amount) { current_.fetch_sub(amount, std::memory_order_relaxed); }
  // Adds if the sum stays within `bound`; else adds nothing and returns false.
  bool add_within(uint64_t amount, uint64_t bound) {
    uint64_t seen = current();
    do {
      if (seen > bound || amount > bound - seen) return false;
    } while (!current_.compare_exchange_weak(seen, seen + amount, std::memory_order_relaxed));
    raise_to(peak_, seen + amount);
    return true;
  }
  uint64_t current() const { return current_.load(std::memory_order_relaxed); }
  uint64_t peak() const { return peak_.load(std::memory_order_relaxed); }
  void reset_peak() { peak_.store(current(), std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> current_{0};
  std::atomic<uint64_t> peak_{0};
};

class Counter {
 public:
  void add(uint64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct Account {
  // Bytes requested and not yet freed: all tensors and scratch of the redirected libraries.
  Gauge live;
  // Bounded by `limit`: pages of large blocks (live, recycled), small blocks, external charges.
  Gauge held;
  Gauge recycled;  // part of held: freed, kept for reuse
  Gauge small;     // part of held: blocks that glibc serves
  Gauge external;  // part of held: charged by the pool
  std::atomic<uint64_t> limit{no_limit};
  std::atomic<uint64_t> watermark{0};  // the most in use since it was taken

  Counter allocations;  // of 128 KiB and more
  Counter small_allocations;
  Counter frees;           // of 128 KiB and more
  Counter hits;            // served from one recycled block, without a system call
  Counter assembled;       // served by moving pages of several recycled blocks
  Counter moved_bytes;     // pages moved for those
  Counter resized;         // served in place by a recycled block of another size
  Counter fresh_bytes;     // taken from the system
  Counter returned_bytes;  // given back to the system
  Counter returned_blocks;
  Counter emptied;   // times the limit evicted recycled blocks
  Counter reclaims;  // times the pool was asked for bytes
  Counter refusals;  // allocations that failed at the limit
  // Served beyond the limit, because failing would be a crash, or for a small object.
  Counter overdrafts;
  Counter overdraft_bytes;

  // Enters held bytes and returns 0, or returns by how many they would pass the limit.
  uint64_t hold(uint64_t bytes) {
    for (;;) {
      const uint64_t most = limit.load();
      if (held.add_within(bytes, most)) return 0;
      const uint64_t wanted = held.current() + bytes;
      if (wanted > most) return wanted - most;  // else another thread freed something in between
    }
  }
  void overdraw(uint64_t bytes) {
    held.add(bytes);
    overdrafts.add();
    overdraft_bytes.add(bytes);
  }

  void note_watermark() { raise_to(watermark, in_use()); }
  // Held and not recycled.
  uint64_t in_use() const {
    const uint64_t idle = recycled.current(), all = held.current();
    return all > idle ? all - idle : 0;
  }
  void reset_peaks() {
    for (Gauge* gauge : {&live, &held, &recycled, &small, &external}) gauge->reset_peak();
    note_watermark();
  }
};

}  // namespace daf
