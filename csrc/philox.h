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

DAF_INLINE void philox_rounds(PhiloxState& state, uint64_t key) {
  uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const auto first = Vector::multiply_wide(state.word[0], 0xD2511F53u);
    const auto second = Vector::multiply_wide(state.word[2], 0xCD9E8D57u);
    state.word[0] = Vector::exclusive_or(Vector::high_words(second), state.word[1], low);
    state.word[1] = second;
    state.word[2] = Vector::exclusive_or(Vector::high_words(first), state.word[3], high);
    state.word[3] = first;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
}

// The patterns of signs of consecutive blocks, made eight calls at a time.
class Signs {
 public:
  Signs(uint64_t key, int rounds) : key_(key), calls_(2 * rounds) {}

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
    philox_rounds(state, key_);
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

  uint64_t key_, first_ = ~uint64_t{0};
  unsigned calls_;
  alignas(64) uint16_t halves_[64];
};

// Dither of elements 64 g … 64 g + 63 of a block, as four vectors of numbers in (1, 2).
DAF_INLINE void dither(uint64_t key, uint64_t block, uint32_t group, Vector::F (&result)[4]) {
  alignas(64) uint32_t call[16];
  for (uint32_t lane = 0; lane < 16; ++lane) call[lane] = 8 * group + lane / 2;
  PhiloxState state = {{Vector::set_integer(uint32_t(block)),
                        Vector::set_integer(uint32_t(block >> 32)), Vector::load(call),
                        Vector::set_integer(dither_stream)}};
  philox_rounds(state, key);
  const auto bits = Vector::set_integer(0x007FFF80), base = Vector::set_integer(0x3F800040);
  for (int pair = 0; pair < 2; ++pair) {
    const auto words = Vector::pack_pairs(state.word[2 * pair], state.word[2 * pair + 1]);
    const auto low = Vector::bit_and(Vector::shift_left<7>(words), bits);
    const auto high = Vector::bit_and(Vector::shift_right<9>(words), bits);
    result[2 * pair] = Vector::as_float(Vector::bit_or(low, base));
    result[2 * pair + 1] = Vector::as_float(Vector::bit_or(high, base));
  }
}

}  // namespace
