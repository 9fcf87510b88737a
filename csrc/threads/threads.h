// Splits blocks over threads; small ranges stay on the caller. No split changes the result.
#pragma once

#include <cstddef>
#include <functional>

namespace daf {

// Does [first, last) of a whole; returns true if all of it is good.
using RangeFunction = std::function<bool(size_t first, size_t last)>;

// Calls `function` on pieces of [0, blocks), on at most `threads` threads, the caller included;
// true if every call returned true.
bool run_ranges(const RangeFunction& function, size_t blocks, int threads);

// Threads of PyTorch's team for this caller; 0 if it cannot be joined. They spin while waiting, so
// another set would compete with them.
int team_threads();

// How many of `threads` threads `blocks` are worth; at least one.
size_t useful_threads(size_t blocks, int threads);

// Calls `function` on [i, i + 1) for each share, on threads of its own if possible, the caller
// included; true if every call returned true.
bool run_shares(const RangeFunction& function, size_t shares);

}  // namespace daf
