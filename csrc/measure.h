// Ranges and sums of a source on their own; the encoders take sums in passing (block_io.h).
// Include after a vector_*.h.
#pragma once

#include "block_io.h"

namespace {

inline void measure_share(const MeasureRanges& job, Reader& reader, size_t share) {
  const RangesPlan& plan = job.plan;
  const Extent blocks = share_of(plan.blocks, share, plan.shares);
  alignas(64) float room[block_elements];
  const RangeLanes lanes = begin_share(job, share);
  for (size_t index = blocks.first; index < blocks.last; ++index)
    add_block(lanes, plan.channels, plan.slots, reader.fetch(index, room), index * block_elements,
              reader.valid(index));
  finish_share(job, share);
}

inline void compare_share(const MeasureRanges& job, Reader& reader, size_t share) {
  const Extent blocks = share_of(job.plan.blocks, share, job.plan.shares);
  alignas(64) float room[block_elements];
  for (size_t index = blocks.first; index < blocks.last; ++index)
    raise_cells(job, reader.fetch(index, room), index * block_elements, reader.valid(index));
}

// Shares, not blocks, are counted here.
inline bool measure_ranges_shares(const MeasureRanges& job, size_t first, size_t last) {
  Reader reader(job.source);
  for (size_t share = first; share < last; ++share)
    job.plan.strategy == RangeStrategy::atomics ? compare_share(job, reader, share)
                                                : measure_share(job, reader, share);
  return true;
}

// Whoever fetches a block adds it to the source's sums.
inline bool measure_sums_range(const MeasureSums& job, size_t first, size_t last) {
  Reader reader(job.source);
  alignas(64) float room[block_elements];
  for (size_t index = first; index < last; ++index) reader.fetch(index, room);
  return true;
}

}  // namespace
