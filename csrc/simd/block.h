// A block of 256 elements in sixteen vectors. Include after a vector_*.h. All is inlined into one
// translation unit for each instruction set, so no wider code leaks into others.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "arguments/job.h"

namespace {

using namespace daf;
using V = Vector;

constexpr int block_vectors = int(block_elements) / V::lanes;

struct Block {
  V::F x[block_vectors];
};

#define DAF_EACH_VECTOR DAF_UNROLLED for (int t = 0; t < block_vectors; ++t)

DAF_INLINE float from_bits(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

DAF_INLINE uint32_t to_bits(float value) {
  uint32_t result;
  std::memcpy(&result, &value, 4);
  return result;
}

DAF_INLINE float widen_bfloat16(uint16_t half) { return from_bits(uint32_t(half) << 16); }

// Rounds to nearest even; -0 becomes +0; too large becomes infinite.
DAF_INLINE uint16_t bfloat16_nearest(float value) {
  const uint32_t u = to_bits(value + 0.0f);
  return uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

DAF_INLINE bool is_finite_bfloat16(uint16_t half) { return (half & 0x7F80) != 0x7F80; }

// The sum of leaf(0) … leaf(15) by halving strides; depth first, so few vectors are alive at once.
template <int width = 1, class Leaf> DAF_INLINE V::F fold(Leaf&& leaf, int t = 0) {
  if constexpr (width == block_vectors)
    return leaf(t);
  else
    return V::add(fold<2 * width>(leaf, t), fold<2 * width>(leaf, t + width));
}

// Calls each(0) … each(count - 1); the indices are constants, so that templates may have them.
template <int count, int i = 0, class Each> DAF_INLINE void for_constants(Each&& each) {
  if constexpr (i < count) {
    each(std::integral_constant<int, i>{});
    for_constants<count, i + 1>(each);
  }
}

DAF_INLINE void multiply_all(Block& block, float factor) {
  const auto everywhere = V::set(factor);
  DAF_EACH_VECTOR block.x[t] = V::multiply(block.x[t], everywhere);
}

DAF_INLINE bool all_finite(const float* row) {
  // Twice the bit pattern drops the sign and keeps the order.
  auto greatest = V::set_integer(0);
  DAF_EACH_VECTOR {
    const auto bits = V::as_integer(V::load(row + V::lanes * t));
    greatest = V::greatest_integer(greatest, V::shift_left<1>(bits));
  }
  return V::reduce_greatest(greatest) < 0xFF000000;
}

// The power of two that brings a block near 1, and its inverse.
struct Prescale {
  float factor = 1.0f, inverse = 1.0f;
  bool finite = true;
};

DAF_INLINE Prescale prescale_for(float greatest_magnitude) {
  const uint32_t bits = to_bits(greatest_magnitude);
  uint32_t exponent = bits >> 23;
  if (exponent < 1) exponent = 1;
  if (exponent > 253) exponent = 253;
  return {from_bits((254 - exponent) << 23), from_bits(exponent << 23), bits < 0x7F800000};
}

// Block `index` of a plane, as 16 halfwords (little-endian words).
DAF_INLINE uint16_t* plane_block(const Job& job, int plane, size_t index) {
  return reinterpret_cast<uint16_t*>(job.planes[plane] + index * words_per_block);
}

DAF_INLINE void clear_planes(const Job& job, size_t index) {
  for (int plane = 0; plane < job.bits; ++plane)
    std::memset(plane_block(job, plane, index), 0, 4 * words_per_block);
}

DAF_INLINE uint16_t load_half(const uint16_t* from) {
  uint16_t result;
  std::memcpy(&result, from, 2);
  return result;
}

DAF_INLINE void store_half(uint16_t* to, uint16_t value) { std::memcpy(to, &value, 2); }

// Adds the planes to bytes, the first as bit `top`.
template <int top, int planes, int plane = 0>
DAF_INLINE void read_planes(const uint16_t* const (&rows)[planes], int q, V::Bytes& bytes) {
  uint64_t word;
  std::memcpy(&word, rows[plane] + 4 * q, 8);
  bytes = V::add_bit_to_bytes<top - plane>(bytes, word);
  if constexpr (plane + 1 < planes) read_planes<top, planes, plane + 1>(rows, q, bytes);
}

template <int bits, int plane>
DAF_INLINE void write_plane(uint16_t* const (&rows)[bits], int q, V::Bytes bytes) {
  const uint64_t word = V::bit_of_bytes<bits - 1 - plane>(bytes);
  std::memcpy(rows[plane] + 4 * q, &word, 8);
  if constexpr (plane + 1 < bits) write_plane<bits, plane + 1>(rows, q, bytes);
}

// Codes of vectors 4 q … 4 q + 3 of a block.
template <int bits>
DAF_INLINE void read_codes(const uint16_t* const (&rows)[bits], int q, V::I (&codes)[4]) {
  auto bytes = V::no_bytes();
  read_planes<bits - 1>(rows, q, bytes);
  for_constants<4>([&](auto i) { codes[i] = V::widen_bytes<i>(bytes); });
}

template <int bits, class Half>
DAF_INLINE void plane_rows(Half* (&rows)[bits], const Job& job, size_t index) {
  for (int plane = 0; plane < bits; ++plane) rows[plane] = plane_block(job, plane, index);
}

DAF_INLINE void mark_non_finite(uint16_t* header) {
  header[0] = non_finite_header;
  header[1] = non_finite_header;
}

DAF_INLINE void fill_with_nan(Block& block) {
  DAF_EACH_VECTOR block.x[t] = V::as_float(V::set_integer(0x7FC00000));
}

// Batches are encoded stage by stage: while one block waits for a sum or a root, the next ones run.
constexpr size_t batch_blocks = 8;

struct Batch {
  const float* rows[batch_blocks];
  alignas(64) float room[batch_blocks][block_elements];

  // Multiplies row i by a power of two.
  DAF_NEVER_INLINE void scale(size_t i, float factor) {
    Block block;
    DAF_EACH_VECTOR block.x[t] = V::load(rows[i] + V::lanes * t);
    multiply_all(block, factor);
    DAF_EACH_VECTOR V::store(room[i] + V::lanes * t, block.x[t]);
    rows[i] = room[i];
  }

  // Pads row i, which lies in its room, with `filling`.
  void pad(size_t i, size_t valid, float filling) {
    for (size_t place = valid; place < block_elements; ++place) room[i][place] = filling;
  }
};

}  // namespace
