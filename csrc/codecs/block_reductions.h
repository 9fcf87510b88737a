// Ranges and sums of a source; blocks read for an emission. Include after a vector_*.h.
#pragma once

#include "codecs/block_io.h"

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

// `first` and `last` count shares, not blocks.
inline bool measure_ranges_shares(const MeasureRanges& job, size_t first, size_t last) {
  Reader reader(job.elements);
  for (size_t share = first; share < last; ++share)
    job.plan.strategy == RangeStrategy::atomics ? compare_share(job, reader, share)
                                                : measure_share(job, reader, share);
  return true;
}

DAF_INLINE void add_to_sums(RunningSums& sums, const float* row, size_t index, size_t valid) {
  enter_block(sums, index);
  const SumsPlan& plan = sums.whole->plan;
  add_block(sums, plan.channels, plan.slots, row, index * block_elements, valid);
}

// Fetching a block performs the job's emission.
inline bool read_blocks_range(const Job& job, size_t first, size_t last) {
  Reader reader(job);
  alignas(64) float room[block_elements];
  for (size_t index = first; index < last; ++index) {
    const float* row = reader.fetch(index, room);
    if (job.sums) add_to_sums(*job.sums, row, index, reader.valid(index));
  }
  return true;
}

inline bool copy_blocks_range(const Job& job, size_t first, size_t last) {
  Reader reader(job);
  Writer writer(job);
  for (size_t index = first; index < last; ++index) {
    Block block;
    reader.read(block, index);
    writer.write(block, index);
  }
  return true;
}

}  // namespace
