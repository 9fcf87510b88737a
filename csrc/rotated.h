// The `rotated` codec: docs/format.md, section 4. Include after a vector_*.h.
#pragma once

#include "block_io.h"
#include "philox.h"

namespace {

template <int bits>
struct RotatedTables {
  static constexpr int half = 1 << (bits - 1);
  alignas(64) float thresholds[half];  // the positive ones, ascending
  alignas(64) float levels[16];        // the positive ones, repeated

  RotatedTables(const float* positive_thresholds, const float* ascending_levels) {
    for (int i = 0; i < half - 1; ++i) thresholds[i] = positive_thresholds[i];
    for (int i = 0; i < 16; ++i) levels[i] = ascending_levels[half + (i & (half - 1))];
  }
};

// The threshold that decides the next bit of a magnitude's cell, given the bits found so far:
// the middle one of the `width` cells from `first` on.
template <int found, int bits>
DAF_INLINE V::F next_threshold(const RotatedTables<bits>& tables, const V::M* above, int first,
                               int width) {
  if constexpr (found == 0) {
    return V::set(tables.thresholds[first + width / 2 - 1]);
  } else {
    return V::select(above[0],
                     next_threshold<found - 1>(tables, above + 1, first + width / 2, width / 2),
                     next_threshold<found - 1>(tables, above + 1, first, width / 2));
  }
}

// One bit of every magnitude's cell, stored as it is; complement_planes makes it a code's bit.
template <int step, int bits>
DAF_INLINE V::I find_cell(V::F magnitude, V::I cell, const RotatedTables<bits>& tables, V::M* above,
                          uint16_t* const (&rows)[bits], int t) {
  if constexpr (step < bits - 1) {
    const auto threshold = next_threshold<step>(tables, above, 0, tables.half);
    above[step] = V::greater(magnitude, threshold);
    store_half(rows[step + 1] + t, V::mask_bits(above[step]));
    cell = V::add_where(cell, above[step], 1u << (bits - 2 - step));
    return find_cell<step + 1>(magnitude, cell, tables, above, rows, t);
  }
  return cell;
}

// Quantizes vector t: writes its bit of every plane, returns |c| * level.
template <int bits>
DAF_INLINE V::F quantize(V::F c, const RotatedTables<bits>& tables, uint16_t* const (&rows)[bits],
                         int t) {
  V::M above[bits];
  const auto magnitude = V::absolute(c);
  store_half(rows[0] + t, V::mask_bits(V::greater(c, V::set(0.0f))));
  const auto cell = find_cell<0>(magnitude, V::set_integer(0), tables, above, rows, t);
  if constexpr (bits == 1) return V::multiply(magnitude, V::set(tables.levels[0]));
  if constexpr (bits == 2)
    return V::multiply(magnitude,
                       V::select(above[0], V::set(tables.levels[1]), V::set(tables.levels[0])));
  return V::multiply(magnitude, V::lookup(tables.levels, cell));
}

// Codes ascend with c: below zero the bits of the cell are turned round.
template <int bits>
DAF_INLINE void complement_planes(uint16_t* const (&rows)[bits]) {
  uint32_t positive[words_per_block], cell[words_per_block];
  std::memcpy(positive, rows[0], sizeof positive);
  for (int plane = 1; plane < bits; ++plane) {
    std::memcpy(cell, rows[plane], sizeof cell);
    for (size_t i = 0; i < words_per_block; ++i) cell[i] = ~(cell[i] ^ positive[i]);
    std::memcpy(rows[plane], cell, sizeof cell);
  }
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
  return std::sqrt(V::tree_sum(fold([&](int t) { return V::multiply(block.x[t], block.x[t]); })));
}

// What the stages of a batch hand on, one entry for each block.
struct RotatedState {
  Prescale prescale[batch_blocks];
  float mean[batch_blocks];  // rounded and prescaled
  float norm[batch_blocks];
};

// Stage 2 of a block: the header's mean, from its prescaled sum.
DAF_INLINE float find_mean(const float* row, size_t valid, const Prescale& prescale,
                           uint16_t* header) {
  const auto factor = V::set(prescale.factor);
  const float sum =
      V::tree_sum(fold([&](int t) { return V::multiply(V::load(row + V::lanes * t), factor); }));
  header[0] = bfloat16_nearest(sum / float(valid) * prescale.inverse);
  return widen_bfloat16(header[0]) * prescale.factor;
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
DAF_INLINE void quantize_block(const float* row, float norm, float unscale,
                               const RotatedTables<bits>& tables, uint16_t* const (&rows)[bits],
                               uint16_t* header) {
  const auto reciprocal = V::set(1.0f / norm);
  const float product = V::tree_sum(fold([&](int t) {
    const auto unit = V::multiply(V::load(row + V::lanes * t), reciprocal);
    return quantize<bits>(unit, tables, rows, t);
  }));
  header[1] = bfloat16_nearest(norm / product * unscale);
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
    for (size_t i = 0; i < size; ++i) {
      batch.rows[i] = reader.fetch(start + i, batch.room[i]);
      state.prescale[i] = prescale_of(batch.rows[i]);
    }
    for (size_t i = 0; i < size; ++i) {
      state.mean[i] = find_mean(batch.rows[i], reader.valid(start + i), state.prescale[i],
                                job.headers + 2 * (start + i));
    }
    for (size_t i = 0; i < size; ++i) {
      Block block;
      reader.expect(start + batch_blocks + i);
      batch.load(block, i);
      state.norm[i] = centre_and_rotate(block, reader.valid(start + i), state.prescale[i].factor,
                                        state.mean[i], signs.of_block(start + i), job.rounds);
      batch.keep(block, i);
    }
    for (size_t i = 0; i < size; ++i) {
      const size_t index = start + i;
      uint16_t* rows[bits];
      plane_rows(rows, job.planes, blocks, index);
      quantize_block<bits>(batch.rows[i], state.norm[i], state.prescale[i].inverse, tables, rows,
                           job.headers + 2 * index);
    }
    for (size_t i = 0; i < size; ++i) {
      const size_t index = start + i;
      uint16_t* rows[bits];
      plane_rows(rows, job.planes, blocks, index);
      complement_planes<bits>(rows);
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
