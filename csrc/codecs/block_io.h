// Reads and writes blocks: types, tails, affine, mask, emission. Include after a vector_*.h.
#pragma once

#include "norms/row_norm.h"

namespace {

DAF_INLINE void load_elements(Block& block, const void* from, ElementType type) {
  const auto* halves = static_cast<const uint16_t*>(from);
  if (type == ElementType::float32) {
    DAF_EACH_VECTOR block.x[t] = V::load(static_cast<const float*>(from) + V::lanes * t);
  } else if (type == ElementType::bfloat16) {
    DAF_EACH_VECTOR block.x[t] = V::load_bfloat16(halves + V::lanes * t);
  } else {
    DAF_EACH_VECTOR block.x[t] = V::load_float16(halves + V::lanes * t);
  }
}

// Keeps the first `valid` elements and sets the others to `filling`.
DAF_INLINE void fill_padding(Block& block, size_t valid, float filling) {
  const auto other = V::set(filling);
  DAF_EACH_VECTOR block.x[t] = V::select(V::mask_from(real_lanes(valid, t)), block.x[t], other);
}

// Reads a source's blocks in ascending order; padding is 0.
class Reader {
 public:
  explicit Reader(const Job& job)
      : source_(job.source), count_(job.count), rows_(job.source.affine), emitter_(job) {
    as_they_are_ = source_.type == ElementType::float32 && !rows_.used();
  }

  size_t valid(size_t index) const {
    const uint64_t left = count_ - index * block_elements;
    return left < block_elements ? size_t(left) : block_elements;
  }

  // Returns the block's 256 values: in the source if unchanged, else in `room` (256 floats).
  const float* fetch(size_t index, float* room) {
    const float* row = room;
    if (as_they_are_ && valid(index) == block_elements)
      row = static_cast<const float*>(source_.data) + index * block_elements;
    else
      copy_any(room, index);
    if (emitter_.used()) emitter_.emit(row, index, valid(index));
    return row;
  }

  // Prefetches a block of the next batch; any index is allowed.
  DAF_MEMBER_INLINE void expect(size_t index) const {
    const size_t bytes = block_elements * element_bytes(source_.type);
    const char* from = static_cast<const char*>(source_.data) + index * bytes;
    for (size_t line = 0; line < bytes; line += 64) V::prefetch(from + line);
  }

  void read(Block& block, size_t index) {
    alignas(64) float room[block_elements];
    const float* from = fetch(index, room);
    DAF_EACH_VECTOR block.x[t] = V::load(from + V::lanes * t);
  }

 private:
  DAF_NEVER_INLINE void copy_any(float* room, size_t index) {
    Block block;
    const size_t bytes = element_bytes(source_.type), here = valid(index);
    const char* from = static_cast<const char*>(source_.data) + index * block_elements * bytes;
    if (here < block_elements) from = copy_tail(from, here * bytes);
    load_elements(block, from, source_.type);
    if (rows_.used()) {
      rows_.move_to(index, here);  // another thread may be measuring a row behind the end
      apply_affine(block, rows_);
      if (here < block_elements) fill_padding(block, here, 0.0f);
    }
    DAF_EACH_VECTOR V::store(room + V::lanes * t, block.x[t]);
  }

  const char* copy_tail(const char* from, size_t bytes) {
    std::memset(tail_, 0, sizeof tail_);
    std::memcpy(tail_, from, bytes);
    return tail_;
  }

  const Source source_;
  const uint64_t count_;
  AffineRows rows_;
  Emitter emitter_;
  bool as_they_are_;  // float32, no affine
  alignas(64) char tail_[block_elements * 4];
};

DAF_INLINE void store_elements(const Block& block, void* to, ElementType type) {
  auto* halves = static_cast<uint16_t*>(to);
  if (type == ElementType::float32) {
    DAF_EACH_VECTOR V::store(static_cast<float*>(to) + V::lanes * t, block.x[t]);
  } else if (type == ElementType::bfloat16) {
    DAF_EACH_VECTOR V::store_bfloat16(halves + V::lanes * t, block.x[t]);
  } else {
    DAF_EACH_VECTOR V::store_float16(halves + V::lanes * t, block.x[t]);
  }
}

// Writes blocks of a target: affine, accumulate, mask, rounding (docs/format.md, section 7).
class Writer {
 public:
  explicit Writer(const Job& job)
      : job_(job), target_(job_.target), rows_(job.target.affine), gradient_(job) {
    const bool aligned = reinterpret_cast<uintptr_t>(target_.data) % 64 == 0;
    plain_ = target_.type == ElementType::float32 && !rows_.used() && !target_.accumulate &&
             !job.mask && !gradient_.used() && !job.row_gradient.length;
    streams_ = plain_ && target_.stream && aligned;
  }
  ~Writer() {
    if (streams_) V::stream_fence();
  }

  // The common case is inline; others go through memory.
  DAF_MEMBER_INLINE void write(const Block& block, size_t index) {
    const bool whole = job_.count - index * block_elements >= block_elements;
    if (plain_ && whole) {
      float* to = static_cast<float*>(target_.data) + index * block_elements;
      if (streams_) {
        DAF_EACH_VECTOR V::stream(to + V::lanes * t, block.x[t]);
      } else {
        DAF_EACH_VECTOR V::store(to + V::lanes * t, block.x[t]);
      }
    } else {
      Block other = block;
      write_any(other, index);
    }
  }

 private:
  DAF_NEVER_INLINE void write_any(Block& block, size_t index) {
    const uint64_t left = job_.count - index * block_elements;
    if (gradient_.used()) return gradient_.take(block, index, left);
    if (job_.row_gradient.length) return take_row_values(job_, block, left);
    const size_t bytes = element_bytes(target_.type);
    char* to = static_cast<char*>(target_.data) + index * block_elements * bytes;
    if (left >= block_elements) {
      finish(block, index, to);
      store_elements(block, to, target_.type);
    } else {
      std::memset(tail_, 0, sizeof tail_);
      std::memcpy(tail_, to, left * bytes);
      finish(block, index, tail_);
      store_elements(block, tail_, target_.type);
      std::memcpy(to, tail_, left * bytes);
    }
  }

  DAF_MEMBER_INLINE void finish(Block& block, size_t index, const char* old) {
    if (rows_.used()) {
      rows_.move_to(index);
      apply_affine(block, rows_);
    }
    if (target_.accumulate) {
      Block before;
      load_elements(before, old, target_.type);
      DAF_EACH_VECTOR block.x[t] = V::add(before.x[t], block.x[t]);
    }
    if (rows_.used() || target_.accumulate) {
      DAF_EACH_VECTOR block.x[t] = canonical(block.x[t]);
    }
    if (job_.mask) apply_mask(block, job_.mask + index * words_per_block);
  }

  const Job job_;
  const Target& target_;
  AffineRows rows_;
  GradientTaker gradient_;
  bool plain_, streams_;
  alignas(64) char tail_[block_elements * 4];
};

}  // namespace
