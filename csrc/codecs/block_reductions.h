// Ranges and sums of a source on their own; the encoders take sums in passing (block_io.h).
// And blocks read and written for the sake of what is done in passing.
// Include after a vector_*.h.
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

// Shares, not blocks, are counted here.
inline bool measure_ranges_shares(const MeasureRanges& job, size_t first, size_t last) {
  Reader reader(job.source);
  for (size_t share = first; share < last; ++share)
    job.plan.strategy == RangeStrategy::atomics ? compare_share(job, reader, share)
                                                : measure_share(job, reader, share);
  return true;
}

// Whoever fetches a block does what the source asks for in passing.
inline bool read_blocks_range(const ReadBlocks& job, size_t first, size_t last) {
  Reader reader(job.source);
  alignas(64) float room[block_elements];
  for (size_t index = first; index < last; ++index) reader.fetch(index, room);
  return true;
}

inline bool copy_blocks_range(const CopyBlocks& job, size_t first, size_t last) {
  Reader reader(job.source);
  Writer writer(job.target);
  for (size_t index = first; index < last; ++index) {
    Block block;
    reader.read(block, index);
    writer.write(block, index);
  }
  return true;
}

}  // namespace
