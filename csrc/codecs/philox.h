// Philox4x32-10 on eight counters at once (Salmon et al., SC 2011), in 64-bit lanes:
// docs/format.md, section 3. Include after a vector_*.h.
#pragma once

#include "arguments/job.h"

namespace {

using daf::block_elements;

constexpr uint32_t sign_stream = 0, dither_stream = 1;

struct PhiloxState {
  Vector::I word[4];
};

struct PhiloxKeys {
  uint32_t low[10], high[10];

  explicit PhiloxKeys(uint64_t key) {
    for (uint32_t round = 0; round < 10; ++round) {
      low[round] = uint32_t(key) + round * 0x9E3779B9u;
      high[round] = uint32_t(key >> 32) + round * 0xBB67AE85u;
    }
  }
};

DAF_INLINE void philox_rounds(PhiloxState& state, const PhiloxKeys& keys) {
  DAF_UNROLLED for (int round = 0; round < 10; ++round) {
    const auto first = Vector::multiply_wide(state.word[0], 0xD2511F53u);
    const auto second = Vector::multiply_wide(state.word[2], 0xCD9E8D57u);
    const auto third = Vector::high_words(second), fourth = Vector::high_words(first);
    state.word[0] = Vector::exclusive_or(third, state.word[1], keys.low[round]);
    state.word[1] = second;
    state.word[2] = Vector::exclusive_or(fourth, state.word[3], keys.high[round]);
    state.word[3] = first;
  }
}

// The sign patterns of one round of consecutive blocks, made by eight Philox calls at a time.
class Signs {
 public:
  Signs(uint64_t key, unsigned round) : keys_(key) {
    for (unsigned lane = 0; lane < 8; ++lane) {
      offset_[2 * lane] = lane / 2;
      call_[2 * lane] = 2 * round + lane % 2;
    }
  }

  // Eight words.
  DAF_MEMBER_INLINE const uint32_t* of_block(uint64_t block) {
    const uint64_t first = block & ~uint64_t{3};
    if (first != first_) refill(first);
    return reinterpret_cast<const uint32_t*>(words_) + (block - first) * 8;
  }

 private:
  // `first` is a multiple of the blocks made at a time, so adding the offset never carries.
  DAF_NEVER_INLINE void refill(uint64_t first) {
    PhiloxState state = {
        {Vector::add_integer(Vector::set_integer(uint32_t(first)), Vector::load(offset_)),
         Vector::set_integer(uint32_t(first >> 32)), Vector::load(call_),
         Vector::set_integer(sign_stream)}};
    philox_rounds(state, keys_);
    alignas(64) uint64_t pairs[2][8];
    for (int half = 0; half < 2; ++half)
      Vector::store(reinterpret_cast<uint32_t*>(pairs[half]),
                    Vector::pack_pairs(state.word[2 * half], state.word[2 * half + 1]));
    for (int lane = 0; lane < 8; ++lane) {
      words_[2 * lane] = pairs[0][lane];
      words_[2 * lane + 1] = pairs[1][lane];
    }
    first_ = first;
  }

  const PhiloxKeys keys_;
  uint64_t first_ = ~uint64_t{0};
  alignas(64) uint32_t offset_[16] = {};
  alignas(64) uint32_t call_[16] = {};
  alignas(64) uint64_t words_[16];
};

// A number in [1, 2) whose fraction is the lower 23 bits of a word.
DAF_INLINE Vector::F one_and_fraction(Vector::I words) {
  return Vector::as_float(Vector::bit_and_or(words, 0x007FFFFF, 0x3F800000));
}

// A block's dither: sixteen vectors of numbers in [1, 2), eight from each of two states.
DAF_INLINE void dither(const PhiloxKeys& keys, uint64_t block, Vector::F (&result)[2][8]) {
  alignas(64) static constexpr uint32_t calls[2][16] = {
      {0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0},
      {8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15, 0}};
  DAF_UNROLLED for (int group = 0; group < 2; ++group) {
    PhiloxState state = {{Vector::set_integer(uint32_t(block)),
                          Vector::set_integer(uint32_t(block >> 32)), Vector::load(calls[group]),
                          Vector::set_integer(dither_stream)}};
    philox_rounds(state, keys);
    DAF_UNROLLED for (int pair = 0; pair < 2; ++pair) {
      const auto words = Vector::pack_pairs(state.word[2 * pair], state.word[2 * pair + 1]);
      auto* four = result[group] + 4 * pair;
      four[0] = one_and_fraction(words);
      four[1] = one_and_fraction(Vector::rotate_left<8>(words));
      four[2] = one_and_fraction(Vector::rotate_left<16>(words));
      four[3] = one_and_fraction(Vector::rotate_left<24>(words));
    }
  }
}

}  // namespace
