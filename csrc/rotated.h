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

// What the stages of a batch hand on, one entry for each block.
struct RotatedState {
  Prescale prescale[batch_blocks];
  float mean[batch_blocks];  // rounded and prescaled
  float norm[batch_blocks];
};

// Stage 2 of a block: the header's mean, from its prescaled sum.
DAF_INLINE void find_mean(Block& block, size_t valid, const Prescale& prescale, float& mean,
                          uint16_t* header) {
  multiply_all(block, prescale.factor);
  header[0] = bfloat16_nearest(tree_sum(block) / float(valid) * prescale.inverse);
  mean = widen_bfloat16(header[0]) * prescale.factor;
}

// Stage 3: centred and rotated; returns its norm.
DAF_INLINE float centre_and_rotate(Block& block, size_t valid, float factor, float mean,
                                   const uint16_t* signs, int rounds) {
  const auto prescale = V::set(factor), middle = V::set(mean);
  DAF_EACH_VECTOR block.x[t] = V::subtract(V::multiply(block.x[t], prescale), middle);
  if (valid < block_elements) fill_padding(block, valid, 0.0f);
  const float norm = norm_of(block);
  rotate(block, signs, rounds);
  return norm;
}

// Stage 4: the codes, and the header's scale.
template <int bits>
DAF_INLINE void quantize_block(Block& block, float norm, float unscale,
                               const RotatedTables<bits>& tables, uint16_t* const (&rows)[bits],
                               uint16_t* header) {
  multiply_all(block, 1.0f / norm);
  DAF_EACH_VECTOR block.x[t] = quantize<bits>(block.x[t], tables, rows, t);
  header[1] = bfloat16_nearest(norm / tree_sum(block) * unscale);
}

// A block of equal values has no scale, a broken one no codes.
DAF_INLINE void finish_block(const EncodeRotated& job, size_t blocks, size_t index, bool finite,
                             float norm) {
  uint16_t* header = job.headers + 2 * index;
  if (norm == 0.0f) header[1] = 0;
  finite = finite && is_finite_bfloat16(header[0]) && is_finite_bfloat16(header[1]);
  if (finite && norm != 0.0f) return;
  clear_planes(job.planes, blocks, job.bits, index);
  if (!finite) mark_non_finite(header);
}

template <int bits>
bool encode_rotated_range(const EncodeRotated& job, size_t first, size_t last) {
  const size_t blocks = block_count(job.source.count);
  const RotatedTables<bits> tables(job.thresholds, job.levels);
  Reader reader(job.source);
  Signs signs(job.key, job.rounds);
  Batch batch;
  RotatedState state;
  for (size_t start = first; start < last; start += batch_blocks) {
    const size_t size = last - start < batch_blocks ? last - start : batch_blocks;
    Block block;
    for (size_t i = 0; i < size; ++i) {
      batch.rows[i] = reader.fetch(start + i, batch.room[i]);
      batch.load(block, i);
      state.prescale[i] = prescale_of(block);
    }
    for (size_t i = 0; i < size; ++i) {
      batch.load(block, i);
      find_mean(block, reader.valid(start + i), state.prescale[i], state.mean[i],
                job.headers + 2 * (start + i));
    }
    for (size_t i = 0; i < size; ++i) {
      batch.load(block, i);
      state.norm[i] = centre_and_rotate(block, reader.valid(start + i), state.prescale[i].factor,
                                        state.mean[i], signs.of_block(start + i), job.rounds);
      batch.keep(block, i);
    }
    for (size_t i = 0; i < size; ++i) {
      const size_t index = start + i;
      uint16_t* rows[bits];
      plane_rows(rows, job.planes, blocks, index);
      batch.load(block, i);
      quantize_block<bits>(block, state.norm[i], state.prescale[i].inverse, tables, rows,
                           job.headers + 2 * index);
      finish_block(job, blocks, index, state.prescale[i].finite, state.norm[i]);
    }
  }
  return true;
}

template <int kept_bits>
DAF_INLINE void read_levels(Block& block, const uint16_t* const (&rows)[kept_bits],
                            const float* levels) {
  if constexpr (kept_bits == 1) {
    const auto low = V::set(levels[0]), high = V::set(levels[1]);
    DAF_EACH_VECTOR block.x[t] = V::select(V::mask_from(load_half(rows[0] + t)), high, low);
  } else {
    DAF_UNROLLED for (int q = 0; q < 4; ++q) {
      V::I codes[4];
      read_codes<kept_bits>(rows, q, codes);
      DAF_UNROLLED for (int i = 0; i < 4; ++i) block.x[4 * q + i] = V::lookup(levels, codes[i]);
    }
  }
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
      read_levels<kept_bits>(block, rows, levels);
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
