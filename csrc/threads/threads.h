// Splits blocks over threads; small ranges stay on the caller. No split changes the result.
#pragma once

#include <cstddef>

namespace daf {

using RangeFunction = bool (*)(const void* data, size_t first, size_t last);

// Calls `function` on pieces of [0, blocks), on at most `threads` threads, the caller included;
// true if every call returned true.
bool run_ranges(RangeFunction function, const void* data, size_t blocks, int threads);

// Threads of PyTorch's team for this caller; 0 if it cannot be joined. They spin while waiting, so
// another set would compete with them.
int team_threads();

// How many of `threads` threads `blocks` are worth; at least one.
size_t useful_threads(size_t blocks, int threads);

// Calls `function` on [i, i + 1) for each share, on threads of its own if possible, the caller
// included; true if every call returned true.
bool run_shares(RangeFunction function, const void* data, size_t shares);

template <class Function>
bool run_ranges(const Function& function, size_t blocks, int threads) {
  return run_ranges([](const void* data, size_t first,
                       size_t last) { return (*static_cast<const Function*>(data))(first, last); },
                    &function, blocks, threads);
}

template <class Function>
bool run_shares(const Function& function, size_t shares) {
  return run_shares([](const void* data, size_t share,
                       size_t) { return (*static_cast<const Function*>(data))(share); },
                    &function, shares);
}

}  // namespace daf
