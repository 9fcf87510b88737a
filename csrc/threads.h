// Splits ranges of blocks over threads. Small ranges stay on the calling thread; the result
// never depends on the split, because every block is coded on its own.
#pragma once

#include <cstddef>

namespace daf {

using RangeFunction = bool (*)(const void* job, size_t first, size_t last);

// Calls `function` on pieces that cover [0, blocks), on at most `threads` threads, the caller
// being one of them; true if every call returned true.
bool run_ranges(RangeFunction function, const void* job, size_t blocks, int threads);

}  // namespace daf
