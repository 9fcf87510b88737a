// A bounded record of allocations and frees; off unless started.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace daf {

struct Event {
  int64_t time_ns;  // steady clock, as Python's time.monotonic_ns
  uint64_t address;
  int64_t bytes;   // -1: freed
  uint32_t label;  // the label set by the requesting thread
};

class EventRecorder {
 public:
  // Records at most `capacity` events; later ones are only counted.
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
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const int64_t time_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!on_.load()) return;
    if (events_.size() == events_.capacity()) {
      ++dropped_;
      return;
    }
    events_.push_back({time_ns, reinterpret_cast<uintptr_t>(pointer), bytes, label});
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
