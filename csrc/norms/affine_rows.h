// Per-channel scales and shifts, spread over a block's elements. Include after a vector_*.h.
#pragma once

#include "simd/block.h"

namespace {

// The 256 scales and shifts of one block; in the tables themselves where they are contiguous.
class AffineRows {
 public:
  explicit AffineRows(const Affine& affine) : affine_(affine) {}

  bool used() const { return affine_.channels != 0; }
  const float* scale() const { return scale_; }
  const float* shift() const { return shift_; }

  // Moves to a block of which the first `valid` elements count; reads nothing for the others.
  void move_to(uint64_t block, size_t valid = block_elements) {
    const uint64_t first = block * block_elements;
    const uint64_t channel = first / affine_.inner % affine_.channels;
    if (affine_.inner != 1) {
      if (!still_right(channel)) fill(first, channel, valid);
    } else if (affine_.channels % block_elements == 0) {
      scale_ = affine_.scale + channel;
      shift_ = affine_.shift + channel;
    } else if (affine_.channels <= most_continued && !affine_.growing) {
      if (!filled_) continue_tables();
      scale_ = scale_row_ + channel;
      shift_ = shift_row_ + channel;
    } else {
      wrap(channel, valid);
    }
  }

 private:
  static constexpr uint64_t most_continued = 2048;

  // True if the last block had the same one channel.
  bool still_right(uint64_t channel) {
    const bool right = affine_.inner % block_elements == 0 && filled_ && channel == channel_;
    filled_ = true;
    channel_ = channel;
    return right;
  }

  // Repeats the channels behind the last one, so that a block may begin with any of them.
  void continue_tables() {
    const uint64_t length = affine_.channels + block_elements;
    for (uint64_t place = 0; place < length; place += affine_.channels) {
      const uint64_t left = length - place;
      copy(place, 0, left < affine_.channels ? left : affine_.channels);
    }
    filled_ = true;
  }

  void wrap(uint64_t channel, size_t valid) {
    scale_ = scale_row_;
    shift_ = shift_row_;
    const uint64_t left = affine_.channels - channel;
    const uint64_t before = left < valid ? left : valid;
    copy(0, channel, before);
    copy(before, 0, valid - before);
  }

  void fill(uint64_t first, uint64_t channel, size_t valid) {
    scale_ = scale_row_;
    shift_ = shift_row_;
    uint64_t within = first % affine_.inner;
    for (uint64_t place = 0; place < valid;) {
      uint64_t run = affine_.inner - within;
      if (run > block_elements - place) run = block_elements - place;
      repeat(place, channel, run);
      place += run;
      within = 0;
      if (++channel == affine_.channels) channel = 0;
    }
  }

  void copy(uint64_t place, uint64_t channel, uint64_t run) {
    std::memcpy(scale_row_ + place, affine_.scale + channel, 4 * run);
    std::memcpy(shift_row_ + place, affine_.shift + channel, 4 * run);
  }

  void repeat(uint64_t place, uint64_t channel, uint64_t run) {
    const float scale = affine_.scale[channel], shift = affine_.shift[channel];
    for (uint64_t i = place; i < place + run; ++i) {
      scale_row_[i] = scale;
      shift_row_[i] = shift;
    }
  }

  const Affine affine_;
  const float *scale_ = nullptr, *shift_ = nullptr;
  uint64_t channel_ = 0;
  bool filled_ = false;
  alignas(64) float scale_row_[most_continued + block_elements];
  alignas(64) float shift_row_[most_continued + block_elements];
};

DAF_INLINE void apply_affine(Block& block, const AffineRows& rows) {
  DAF_EACH_VECTOR {
    const auto product = V::multiply(block.x[t], V::load(rows.scale() + V::lanes * t));
    block.x[t] = V::add(product, V::load(rows.shift() + V::lanes * t));
  }
}

}  // namespace
