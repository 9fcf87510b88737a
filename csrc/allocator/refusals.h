// What is refused at the limit, what is served beyond it all the same, and what the error says.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "allocator/account.h"

namespace daf {

class Refusals {
 public:
  explicit Refusals(Account& account) : account_(account) {}

  // Counts a refusal; returns what posix_memalign returns then.
  int refuse() {
    account_.refusals.add();
    std::snprintf(text_, sizeof(text_),
                  "DAF's limit: %.1f of %.1f MB for tensors are held; raise the budget, close its "
                  "session, or run less at once (session.evaluate cuts what it can)",
                  1e-6 * double(account_.held.current()), 1e-6 * double(account_.limit.load()));
    return ENOMEM;
  }
  // GNU's strerror_r for PyTorch, which puts it into a refused allocation's error: it was ours.
  static char* words(int code, char* buffer, size_t size) {
    if (code != ENOMEM || text_[0] == 0) return ::strerror_r(code, buffer, size);
    std::snprintf(buffer, size, "%s", text_);
    text_[0] = 0;
    return buffer;
  }

  // For who has words of its own, or this thread's next error of PyTorch's would say them.
  static void forget_words() { text_[0] = 0; }

  // True for what is made on the way out of a refusal (random states, scalars): objects of up to
  // 16 KiB, 1 MiB of them since the limit was set, a part of what budgets spare.
  bool may_overdraw(uint64_t bytes) {
    constexpr uint64_t object_bytes = 16384, most_bytes = 1 << 20;
    return bytes <= object_bytes && overdrawn_.fetch_add(bytes) + bytes <= most_bytes;
  }
  void forget_overdrafts() { overdrawn_.store(0); }

  // Names one of the requests to come, by how many precede it; -1: none. Returns what was left.
  int64_t name(int64_t requests) { return requests_left_.exchange(requests); }
  // Counts a request; true for the named one.
  bool is_named() {
    return requests_left_.load(std::memory_order_relaxed) >= 0 && requests_left_.fetch_sub(1) == 0;
  }

 private:
  static inline thread_local char text_[192] = "";  // until `words` has read it

  Account& account_;
  std::atomic<uint64_t> overdrawn_{0};
  std::atomic<int64_t> requests_left_{-1};
};

}  // namespace daf
