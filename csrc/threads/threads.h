// Splits ranges of blocks over threads. Small ranges stay on the calling thread; the result
// never depends on the split, because every block is coded on its own.
#pragma once

#include <cstddef>

namespace daf {

using RangeFunction = bool (*)(const void* data, size_t first, size_t last);

// Calls `function` on pieces that cover [0, blocks), on at most `threads` threads, the caller
// being one of them; true if every call returned true.
bool run_ranges(RangeFunction function, const void* data, size_t blocks, int threads);

// How many of `threads` threads so many blocks are worth; at least one.
size_t useful_threads(size_t blocks, int threads);

// Calls `function` on [i, i + 1) for each of the shares, each on a thread of its own where the
// system gives one, the caller being one of them; true if every call returned true.
bool run_shares(RangeFunction function, const void* data, size_t shares);

// The same for what is called with (first, last).
template <class Function>
bool run_ranges(const Function& function, size_t blocks, int threads) {
  return run_ranges([](const void* data, size_t first,
                       size_t last) { return (*static_cast<const Function*>(data))(first, last); },
                    &function, blocks, threads);
}

// The same for what is called with the number of a share.
template <class Function>
bool run_shares(const Function& function, size_t shares) {
  return run_shares([](const void* data, size_t share,
                       size_t) { return (*static_cast<const Function*>(data))(share); },
                    &function, shares);
}

}  // namespace daf
