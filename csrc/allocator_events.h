// A record of who asked for what and when: off unless started, and then bounded.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace daf {

struct Event {
  int64_t time_ns;    // CLOCK_MONOTONIC, which Python's time.monotonic_ns reads too
  uint64_t address;
  int64_t bytes;      // negative: freed
  uint32_t label;     // what the thread that asked had set
};

class EventRecorder {
 public:
  // At most `capacity` events; later ones are only counted.
  void start(size_t capacity) {
    const std::lock_guard<std::mutex> guard(mutex_);
    events_.clear();
    events_.reserve(capacity);
    dropped_ = 0;
    on_.store(true);
  }
  std::vector<Event> stop(uint64_t* dropped) {
    const std::lock_guard<std::mutex> guard(mutex_);
    on_.store(false);
    *dropped = dropped_;
    return std::move(events_);
  }
  bool is_on() const { return on_.load(std::memory_order_relaxed); }

  void note(const void* pointer, int64_t bytes, uint32_t label) {
    if (!is_on()) return;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!on_.load()) return;
    if (events_.size() == events_.capacity()) {
      ++dropped_;
      return;
    }
    events_.push_back({now.tv_sec * 1000000000ll + now.tv_nsec,
                       reinterpret_cast<uintptr_t>(pointer), bytes, label});
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<Event> events_;
  uint64_t dropped_ = 0;
};

}  // namespace daf
