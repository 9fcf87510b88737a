// Least and greatest element for each channel: docs/format.md, section 8.
//
// Floats are compared as unsigned keys in the same order: any order of comparing gives the same
// bits, and NaN is never lost. A row has two halves, each for all channels: the greatest keys, and
// the greatest complements, those of the least keys. 0 is below both.
#pragma once

#include <atomic>

#include "arguments/job.h"

namespace daf {

// How partial results are combined; the result is the same.
enum class RangeStrategy : int {
  tree = 0,     // shares reduce in lanes of their own; then their rows are folded
  atomics = 1,  // each element is compared with its channel's shared cell
  hybrid = 2,   // shares reduce in lanes of their own, then raise the shared cells
};

struct RangesPlan {
  Channels channels;
  uint64_t slots;
  size_t blocks, shares;
  RangeStrategy strategy;
};

struct MeasureRanges {
  Job elements;  // count and source
  RangesPlan plan;
  std::atomic<uint32_t>* cells;  // one row
  uint32_t* lanes;               // shares × two halves × slots × lanes
  uint32_t* rows;                // shares × one row
  float *least, *greatest;       // the results, one for each channel
  uintptr_t end;                 // of the workspace
};

RangesPlan plan_ranges(uint64_t count, Channels channels, int threads, RangeStrategy strategy);
// The strategy of the measured rule, whatever the plan's own.
RangeStrategy cheapest_strategy(const RangesPlan& plan, uint64_t count);
MeasureRanges lay_out(const RangesPlan& plan, uintptr_t workspace);

// The accumulators of one share; all zero at first.
struct RangeLanes {
  uint32_t *greatest, *complement;  // slots × lanes
};

void clear_cells(const MeasureRanges& job);
RangeLanes begin_share(const MeasureRanges& job, size_t share);
void finish_share(const MeasureRanges& job, size_t share);
void raise_cells(const MeasureRanges& job, const float* row, uint64_t first, size_t valid);
void finish_ranges(const MeasureRanges& job);

}  // namespace daf
