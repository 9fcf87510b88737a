// Philox4x32-10 on eight counters at once (Salmon et al., SC 2011), in 64-bit lanes.
// Include after a vector_*.h; see docs/format.md, section 3.
#pragma once

#include "jobs.h"

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

// The patterns of signs of consecutive blocks, made eight calls at a time.
class Signs {
 public:
  Signs(uint64_t key, int rounds) : keys_(key), calls_(2 * rounds) {}

  // 16 halfwords for each round: element i of the block is bit i % 16 of halfword i / 16.
  const uint16_t* of_block(uint64_t block) {
    if (block < first_ || block >= first_ + 8 / calls_) refill(block);
    return halves_ + (block - first_) * calls_ * 8;
  }

 private:
  void refill(uint64_t block) {
    alignas(64) uint32_t low[16] = {}, high[16] = {}, call[16] = {};
    for (unsigned lane = 0; lane < 8; ++lane) {
      const uint64_t of_lane = block + lane / calls_;
      low[2 * lane] = uint32_t(of_lane);
      high[2 * lane] = uint32_t(of_lane >> 32);
      call[2 * lane] = lane % calls_;
    }
    PhiloxState state = {{Vector::load(low), Vector::load(high), Vector::load(call),
                          Vector::set_integer(sign_stream)}};
    philox_rounds(state, keys_);
    alignas(64) uint64_t pairs[2][8];
    for (int half = 0; half < 2; ++half)
      Vector::store(reinterpret_cast<uint32_t*>(pairs[half]),
                    Vector::pack_pairs(state.word[2 * half], state.word[2 * half + 1]));
    for (unsigned lane = 0; lane < 8; ++lane) {
      std::memcpy(halves_ + 8 * lane, &pairs[0][lane], 8);
      std::memcpy(halves_ + 8 * lane + 4, &pairs[1][lane], 8);
    }
    first_ = block;
  }

  const PhiloxKeys keys_;
  uint64_t first_ = ~uint64_t{0};
  unsigned calls_;
  alignas(64) uint16_t halves_[64];
};

// The upper 23 bits of every word behind the leading one of a number in [1, 2).
DAF_INLINE Vector::F one_and_fraction(Vector::I words) {
  const auto one = Vector::set_integer(0x3F800000);
  return Vector::as_float(Vector::bit_or(Vector::shift_right<9>(words), one));
}

// Dither of elements 128 g … 128 g + 127 of a block, as eight vectors of numbers in [1, 2).
DAF_INLINE void dither(const PhiloxKeys& keys, uint64_t block, uint32_t group,
                       Vector::F (&result)[8]) {
  alignas(64) uint32_t call[16];
  for (uint32_t lane = 0; lane < 16; ++lane) call[lane] = 8 * group + lane / 2;
  PhiloxState state = {{Vector::set_integer(uint32_t(block)),
                        Vector::set_integer(uint32_t(block >> 32)), Vector::load(call),
                        Vector::set_integer(dither_stream)}};
  philox_rounds(state, keys);
  DAF_UNROLLED for (int pair = 0; pair < 2; ++pair) {
    const auto words = Vector::pack_pairs(state.word[2 * pair], state.word[2 * pair + 1]);
    result[4 * pair] = one_and_fraction(words);
    result[4 * pair + 1] = one_and_fraction(Vector::rotate_left<8>(words));
    result[4 * pair + 2] = one_and_fraction(Vector::rotate_left<16>(words));
    result[4 * pair + 3] = one_and_fraction(Vector::rotate_left<24>(words));
  }
}

}  // namespace
