// Rows that are normalised one by one, and sums over all rows for each place along them, in an
// order that no split changes: docs/format.md, section 11.
#pragma once

#include "arguments/channels.h"

namespace daf {

constexpr uint64_t rows_per_span = 256;  // `length` blocks of elements, whatever `length` is

struct RowsPlan {
  uint64_t length, rows;
  size_t spans, shares;
};

struct RowSums {
  RowsPlan plan;
  float *beta, *gamma;  // spans × padded length
  float* values;        // shares × (padded length + a block)
  uintptr_t end;        // of the workspace
};

// The current row of one share of the threads; blocks come in ascending order.
struct RunningRows {
  const RowSums* whole;
  float* values;  // those of the row so far
  size_t filled;  // how many
  uint64_t row;   // its index
};

RowsPlan plan_rows(uint64_t count, uint64_t length, int threads);
uint64_t padded_length(const RowsPlan& plan);
RowSums lay_out(const RowsPlan& plan, uintptr_t workspace);

// Spans are never split: a share ends where a span ends.
Extent share_blocks(const RowsPlan& plan, size_t share);
RunningRows begin_share(const RowSums& whole, size_t share);
inline void finish_share(RunningRows&) {}

// After all shares: writes the sums of the gradient and of its products, (length,) each.
void finish_rows(const RowSums& whole, double* beta, double* gamma);

}  // namespace daf
