// Blocks in from memory and out to memory: element types, tails, affine, accumulate, mask, and what
// is done in passing.
// Include after a vector_*.h.
#pragma once

#include "norms/row_norm.h"

namespace {

// --- in ----------------------------------------------------------------------------------------

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

// The first `valid` elements stay, the others become `filling`.
DAF_INLINE void fill_padding(Block& block, size_t valid, float filling) {
  const auto other = V::set(filling);
  DAF_EACH_VECTOR block.x[t] = V::select(V::mask_from(real_lanes(valid, t)), block.x[t], other);
}

// Reads blocks of a source one after the other; padding is 0.
class Reader {
 public:
  explicit Reader(const Source& source)
      : source_(source), rows_(source.affine), emitter_(source.emission) {
    as_they_are_ = source.type == ElementType::float32 && !rows_.used();
  }

  size_t valid(size_t index) const {
    const uint64_t left = source_.count - index * block_elements;
    return left < block_elements ? size_t(left) : block_elements;
  }

  // The block's 256 values: in the source itself where they lie there as they are, else in
  // `room` (256 floats).
  const float* fetch(size_t index, float* room) {
    const float* row = room;
    if (as_they_are_ && valid(index) == block_elements)
      row = reinterpret_cast<const float*>(locate(index, reinterpret_cast<char*>(room)));
    else
      copy_any(room, index);
    if (source_.sums) add_to_sums(row, index);
    if (source_.emission) emitter_.emit(row, index, valid(index));
    return row;
  }

  // Asks for a block of the next batch while this one is worked on; any index will do.
  DAF_MEMBER_INLINE void expect(size_t index) const {
    if (source_.view.dimensions) return;
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
  DAF_MEMBER_INLINE void copy_any(float* room, size_t index) {
    Block block;
    read_any(block, index);
    DAF_EACH_VECTOR V::store(room + V::lanes * t, block.x[t]);
  }

  DAF_NEVER_INLINE void add_to_sums(const float* row, size_t index) {
    enter_block(*source_.sums, index);
    const SumsPlan& plan = source_.sums->whole->plan;
    add_block(*source_.sums, plan.channels, plan.slots, row, index * block_elements, valid(index));
  }

  // The block's elements, one after the other: in the source if they lie so there, else in `room`.
  const char* locate(size_t index, char* room) const {
    const char* data = static_cast<const char*>(source_.data);
    const size_t bytes = element_bytes(source_.type);
    if (source_.view.dimensions == 0) return data + index * block_elements * bytes;
    return gather(source_.view, data, bytes, index * block_elements, valid(index), room);
  }

  DAF_NEVER_INLINE void read_any(Block& block, size_t index) {
    const size_t bytes = element_bytes(source_.type), here = valid(index);
    const char* from = locate(index, gathered_);
    if (here < block_elements) from = copy_tail(from, here * bytes);
    load_elements(block, from, source_.type);
    if (rows_.used()) {
      rows_.move_to(index, here);  // behind the end may lie a row that another thread measures
      apply_affine(block, rows_);
      if (here < block_elements) fill_padding(block, here, 0.0f);
    }
  }

  const char* copy_tail(const char* from, size_t bytes) {
    std::memset(tail_, 0, sizeof tail_);
    std::memcpy(tail_, from, bytes);
    return tail_;
  }

  const Source source_;
  AffineRows rows_;
  Emitter emitter_;
  bool as_they_are_;  // float32, no affine
  alignas(64) char tail_[block_elements * 4];
  alignas(64) char gathered_[block_elements * 4];
};

// --- out ---------------------------------------------------------------------------------------

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
  explicit Writer(const Target& target)
      : target_(target), rows_(target.affine), gradient_(target.gradient) {
    const bool aligned = reinterpret_cast<uintptr_t>(target.data) % 64 == 0;
    plain_ = target.type == ElementType::float32 && !rows_.used() && !target.accumulate &&
             !target.mask && !target.gradient && !target.rows;
    streams_ = plain_ && target.stream && aligned;
  }
  ~Writer() {
    if (streams_) V::stream_fence();
  }

  // As Reader::read: the common case inline, the others through memory.
  DAF_MEMBER_INLINE void write(const Block& block, size_t index) {
    const bool whole = target_.count - index * block_elements >= block_elements;
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
    const uint64_t left = target_.count - index * block_elements;
    if (target_.gradient) return gradient_.take(block, index, left, target_.mask);
    if (target_.rows) return take_row_values(*target_.rows, block, left);
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
    if (target_.mask) apply_mask(block, target_.mask + index * words_per_block);
  }

  const Target target_;
  AffineRows rows_;
  GradientTaker gradient_;
  bool plain_, streams_;
  alignas(64) char tail_[block_elements * 4];
};

}  // namespace
