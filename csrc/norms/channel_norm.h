// A normalisation's forward and backward, inside another codec's pass over its normalised values:
// docs/format.md, section 10. Include after a vector_*.h.
#pragma once

#include "norms/affine_rows.h"
#include "reductions/lanes.h"

namespace {

DAF_INLINE V::F canonical(V::F x) {
  return V::select(V::unordered(x, x), V::as_float(V::set_integer(0x7FC00000)), x);
}

// Elements whose bit is clear become 0.
DAF_INLINE void apply_mask(Block& block, const uint32_t* words) {
  DAF_EACH_VECTOR {
    const auto chosen = V::mask_from(uint16_t(words[t / 2] >> (t % 2 * 16)));
    block.x[t] = V::select(chosen, block.x[t], V::set(0.0f));
  }
}

DAF_INLINE void load_floats(Block& block, const float* from, size_t valid) {
  if (valid >= block_elements) {
    DAF_EACH_VECTOR block.x[t] = V::load(from + V::lanes * t);
    return;
  }
  alignas(64) float room[block_elements] = {};
  std::memcpy(room, from, valid * sizeof(float));
  DAF_EACH_VECTOR block.x[t] = V::load(room + V::lanes * t);
}

DAF_INLINE void store_floats(const Block& block, float* to, size_t valid) {
  if (valid >= block_elements) {
    DAF_EACH_VECTOR V::store(to + V::lanes * t, block.x[t]);
    return;
  }
  alignas(64) float room[block_elements];
  DAF_EACH_VECTOR V::store(room + V::lanes * t, block.x[t]);
  std::memcpy(to, room, valid * sizeof(float));
}

class Emitter {
 public:
  explicit Emitter(const Job& job)
      : emission_(job.emission), mask_(job.mask), rows_(emission_.affine) {
    streams_ = emission_.stream && reinterpret_cast<uintptr_t>(emission_.destination) % 64 == 0;
  }
  ~Emitter() {
    if (streams_) V::stream_fence();
  }

  bool used() const { return emission_.destination; }

  // Emits block `index` of normalised values, of which the first `valid` count.
  DAF_NEVER_INLINE void emit(const float* row, size_t index, size_t valid) {
    const size_t first = index * block_elements;
    Block block;
    DAF_EACH_VECTOR block.x[t] = V::load(row + V::lanes * t);
    if (rows_.used()) {
      rows_.move_to(index);
      apply_affine(block, rows_);
    }
    if (emission_.addend) {
      Block addend;
      load_floats(addend, emission_.addend + first, valid);
      DAF_EACH_VECTOR block.x[t] = V::add(block.x[t], addend.x[t]);
    }
    if (mask_) rectify(block, mask_ + index * words_per_block, valid);
    DAF_EACH_VECTOR block.x[t] = canonical(block.x[t]);
    if (streams_ && valid == block_elements) {
      DAF_EACH_VECTOR V::stream(emission_.destination + first + V::lanes * t, block.x[t]);
    } else {
      store_floats(block, emission_.destination + first, valid);
    }
  }

 private:
  DAF_MEMBER_INLINE void rectify(Block& block, uint32_t* words, size_t valid) {
    auto* halves = reinterpret_cast<uint16_t*>(words);
    const auto zero = V::set(0.0f), most = V::set(emission_.most);
    DAF_EACH_VECTOR {
      const auto above = V::less_equal(most, block.x[t]);
      const auto positive = uint16_t(~V::mask_bits(V::less_equal(block.x[t], zero)));
      const auto passing = uint16_t(positive & ~V::mask_bits(above));
      store_half(halves + t, passing & real_lanes(valid, t));
      const auto bounded = V::select(above, most, block.x[t]);
      block.x[t] = V::select(V::mask_from(positive), bounded, zero);
    }
  }

  const Emission emission_;
  uint32_t* const mask_;
  AffineRows rows_;
  bool streams_;
};

class GradientTaker {
 public:
  explicit GradientTaker(const Job& job)
      : job_(job.gradient),
        mask_(job.mask),
        sums_(job.sums),
        value_rows_(job_.of_value),
        gradient_rows_(job_.of_gradient) {}

  bool used() const { return job_.gradient; }

  // Takes block `index` of normalised values, of which `left` are the tensor's.
  DAF_MEMBER_INLINE void take(Block& value, size_t index, uint64_t left) {
    const size_t first = index * block_elements;
    const size_t valid = left < block_elements ? size_t(left) : block_elements;
    Block gradient;
    load_floats(gradient, job_.gradient + first, valid);
    if (mask_) apply_mask(gradient, mask_ + index * words_per_block);
    if (sums_) return add_to_sums(value, gradient, index, valid);
    value_rows_.move_to(index);
    gradient_rows_.move_to(index);
    apply_affine(value, value_rows_);
    DAF_EACH_VECTOR {
      const auto scale = V::load(gradient_rows_.scale() + V::lanes * t);
      value.x[t] = canonical(V::add(V::multiply(gradient.x[t], scale), value.x[t]));
    }
    store_floats(value, job_.destination + first, valid);
  }

 private:
  DAF_MEMBER_INLINE void add_to_sums(const Block& value, const Block& gradient, size_t index,
                                     size_t valid) {
    const size_t first = index * block_elements;
    if (job_.destination) store_floats(gradient, job_.destination + first, valid);
    DAF_EACH_VECTOR {
      V::store(room_ + V::lanes * t, gradient.x[t]);
      V::store(room_ + block_elements + V::lanes * t, value.x[t]);
    }
    enter_block(*sums_, index);
    const SumsPlan& plan = sums_->whole->plan;
    add_block(RunningProducts{*sums_}, plan.channels, plan.slots, room_, first, valid);
  }

  const NormGradient job_;
  const uint32_t* const mask_;
  RunningSums* const sums_;
  AffineRows value_rows_, gradient_rows_;
  alignas(64) float room_[2 * block_elements];
};

}  // namespace
