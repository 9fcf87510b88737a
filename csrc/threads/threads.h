// Splits ranges of blocks over threads. Small ranges stay on the calling thread; the result
// never depends on the split, because every block is coded on its own.
#pragma once

#include <cstddef>

namespace daf {

using RangeFunction = bool (*)(const void* job, size_t first, size_t last);

// Calls `function` on pieces that cover [0, blocks), on at most `threads` threads, the caller
// being one of them; true if every call returned true.
bool run_ranges(RangeFunction function, const void* job, size_t blocks, int threads);

// How many of `threads` threads so many blocks are worth; at least one.
size_t useful_threads(size_t blocks, int threads);

// Calls `function` on [i, i + 1) for each of the shares, each on a thread of its own where the
// system gives one, the caller being one of them; true if every call returned true.
bool run_shares(RangeFunction function, const void* job, size_t shares);

// The same for a kernel of jobs.h.
template <class Job>
bool run_kernel(const Job& job, bool (*kernel)(const Job&, size_t, size_t), size_t blocks,
                int threads) {
  struct Call {
    const Job& job;
    decltype(kernel) function;
  } const call{job, kernel};
  const RangeFunction function = [](const void* opaque, size_t first, size_t last) {
    const auto& here = *static_cast<const Call*>(opaque);
    return here.function(here.job, first, last);
  };
  return run_ranges(function, &call, blocks, threads);
}

}  // namespace daf
