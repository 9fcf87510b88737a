// The `rotated` codec: docs/format.md, section 4. Include after a vector_*.h.
#pragma once

#include "block.h"
#include "philox.h"

namespace {

template <int bits>
struct RotatedTables {
  static constexpr int half = 1 << (bits - 1);
  // For the search: at step s the threshold that the s bits found so far select.
  alignas(64) float search[bits][16] = {};
  alignas(64) float positive_levels[16];

  RotatedTables(const float* thresholds, const float* levels) {
    for (int step = 0; step < bits - 1; ++step)
      for (int found = 0; found < 16; ++found) {
        const int known = found & ((1 << step) - 1);
        const int width = half >> step;
        search[step][found] = thresholds[known * width + width / 2 - 1];
      }
    for (int i = 0; i < 16; ++i) positive_levels[i] = levels[half + (i & (half - 1))];
  }
};

// Quantizes vector t: writes its bit of every plane, returns |c| * level.
template <int bits>
DAF_INLINE V::F quantize(V::F c, const RotatedTables<bits>& tables, uint16_t* const (&rows)[bits],
                         int t) {
  const auto positive = V::greater(c, V::set(0.0f));
  store_half(rows[0] + t, V::mask_bits(positive));
  const auto magnitude = V::absolute(c);
  auto cell = V::set_integer(0);
  DAF_UNROLLED for (int step = 0; step < bits - 1; ++step) {
    const auto threshold =
        step == 0 ? V::set(tables.search[0][0]) : V::lookup(tables.search[step], cell);
    const auto above = V::greater(magnitude, threshold);
    store_half(rows[step + 1] + t, V::mask_bits(V::same(positive, above)));
    cell = V::add_where(V::shift_left<1>(cell), above, 1);
  }
  const auto level =
      bits == 1 ? V::set(tables.positive_levels[0]) : V::lookup(tables.positive_levels, cell);
  return V::multiply(magnitude, level);
}

DAF_INLINE void rotate(Block& block, const uint16_t* signs, int rounds) {
  flip_signs(block, signs);
  hadamard(block);
  if (rounds == 2) {
    multiply_all(block, 0.0625f);
    flip_signs(block, signs + block_vectors);
    hadamard(block);
  }
}

DAF_INLINE void rotate_back(Block& block, const uint16_t* signs, int rounds) {
  hadamard(block);
  if (rounds == 2) {
    multiply_all(block, 0.0625f);
    flip_signs(block, signs + block_vectors);
    hadamard(block);
  }
  flip_signs(block, signs);
}

DAF_INLINE float norm_of(const Block& block) {
  Block squares;
  DAF_EACH_VECTOR squares.x[t] = V::multiply(block.x[t], block.x[t]);
  return std::sqrt(tree_sum(squares));
}

enum class Outcome { coded, flat, non_finite };

template <int bits>
DAF_INLINE Outcome encode_rotated_block(Block& block, size_t valid, const uint16_t* signs,
                                        int rounds, const RotatedTables<bits>& tables,
                                        uint16_t* const (&rows)[bits], uint16_t* header) {
  const Prescale prescale = prescale_of(block);
  if (!prescale.finite) return Outcome::non_finite;
  multiply_all(block, prescale.factor);
  Block copy = block;
  header[0] = bfloat16_nearest(tree_sum(copy) / float(valid) * prescale.inverse);
  if (!is_finite_bfloat16(header[0])) return Outcome::non_finite;
  const auto mean = V::set(widen_bfloat16(header[0]) * prescale.factor);
  DAF_EACH_VECTOR block.x[t] = V::subtract(block.x[t], mean);
  if (valid < block_elements) fill_padding(block, valid, 0.0f);
  const float norm = norm_of(block);
  if (norm == 0.0f) return Outcome::flat;
  rotate(block, signs, rounds);
  multiply_all(block, 1.0f / norm);
  DAF_EACH_VECTOR block.x[t] = quantize<bits>(block.x[t], tables, rows, t);
  header[1] = bfloat16_nearest(norm / tree_sum(block) * prescale.inverse);
  return is_finite_bfloat16(header[1]) ? Outcome::coded : Outcome::non_finite;
}

template <int bits>
bool encode_rotated_range(const EncodeRotated& job, size_t first, size_t last) {
  const size_t blocks = block_count(job.source.count);
  const RotatedTables<bits> tables(job.thresholds, job.levels);
  Reader reader(job.source);
  Signs signs(job.key, job.rounds);
  for (size_t index = first; index < last; ++index) {
    Block block;
    uint16_t* rows[bits];
    uint16_t* header = job.headers + 2 * index;
    plane_rows(rows, job.planes, blocks, index);
    reader.read(block, index);
    const Outcome outcome = encode_rotated_block<bits>(
        block, reader.valid(index), signs.of_block(index), job.rounds, tables, rows, header);
    if (outcome == Outcome::coded) continue;
    clear_planes(job.planes, blocks, bits, index);
    header[1] = 0;
    if (outcome == Outcome::non_finite) mark_non_finite(header);
  }
  return true;
}

template <int kept_bits>
bool decode_rotated_range(const DecodeRotated& job, size_t first, size_t last) {
  const size_t blocks = block_count(job.target.count);
  alignas(64) float levels[16];
  for (int i = 0; i < 16; ++i) levels[i] = job.levels[i & ((1 << kept_bits) - 1)];
  Writer writer(job.target);
  Signs signs(job.key, job.rounds);
  for (size_t index = first; index < last; ++index) {
    Block block;
    const uint16_t* rows[kept_bits];
    const uint16_t* header = job.headers + 2 * index;
    plane_rows(rows, job.planes, blocks, index);
    if (is_finite_bfloat16(header[0]) && is_finite_bfloat16(header[1])) {
      DAF_EACH_VECTOR block.x[t] = V::lookup(levels, read_codes<kept_bits>(rows, t));
      rotate_back(block, signs.of_block(index), job.rounds);
      const auto mean = V::set(widen_bfloat16(header[0]));
      const auto scale = V::set(widen_bfloat16(header[1]));
      DAF_EACH_VECTOR block.x[t] = V::add(mean, V::multiply(scale, block.x[t]));
    } else {
      fill_with_nan(block);
    }
    writer.write(block, index);
  }
  return true;
}

}  // namespace
