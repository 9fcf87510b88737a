// The `rotated` codec: docs/format.md, section 4. Include after a vector_*.h.
#pragma once

#include "codecs/block_io.h"
#include "codecs/philox.h"
#include "codecs/rotated_constants.h"

namespace {

// A key's rotations: of one round, or of two for blocks that are peaked.
struct Rotations {
  Signs first, second;

  explicit Rotations(uint64_t key) : first(key, 0), second(key, 1) {}

  // By value, and apart from the usual path, whose blocks stay in registers.
  DAF_NEVER_INLINE V::Shorts transformed_twice(V::Shorts shorts, uint64_t block) {
    V::hadamard_shorts(shorts);
    V::shift_shorts<between_rounds_shift>(shorts);
    V::flip_shorts(shorts, second.of_block(block));
    V::hadamard_shorts(shorts);
    return shorts;
  }

  DAF_MEMBER_INLINE void apply(V::Shorts shorts, V::Shorts& rotated, uint64_t block, bool peaked) {
    V::flip_shorts(shorts, first.of_block(block));
    if (peaked) {
      rotated = transformed_twice(shorts, block);
    } else {
      V::hadamard_shorts(shorts);
      rotated = shorts;
    }
  }

  DAF_MEMBER_INLINE void apply_back(V::Shorts shorts, V::Shorts& restored, uint64_t block,
                                    bool peaked) {
    if (peaked) {
      restored = transformed_twice(shorts, block);
      V::flip_shorts(restored, first.of_block(block));
    } else {
      V::hadamard_shorts(shorts);
      V::flip_shorts(shorts, first.of_block(block));
      restored = shorts;
    }
  }
};

template <int bits> struct RotatedTables {
  V::Bytes thresholds[bits];  // of each step, by the cell so far
  V::Bytes levels;            // by cell

  DAF_MEMBER_INLINE RotatedTables(const int8_t* all_thresholds, const int8_t* all_levels)
      : levels(V::load_table(all_levels)) {
    for (int step = 0; step < bits; ++step)
      thresholds[step] = V::load_table(all_thresholds + 16 * step);
  }
};

// State between the stages of a batch, one entry for each block.
struct RotatedState {
  Prescale prescale[batch_blocks];
  float mean[batch_blocks];  // rounded and prescaled
  float norm[batch_blocks];
  bool peaked[batch_blocks];
  V::Shorts rotated[batch_blocks];
  int32_t product[batch_blocks];  // of the rotated numbers and their levels
};

DAF_INLINE float sum_of(const float* row) {
  return V::tree_sum(fold([&](int t) { return V::load(row + V::lanes * t); }));
}

DAF_INLINE float greatest_magnitude_of(const float* row) {
  auto greatest = V::set(0.0f);
  DAF_EACH_VECTOR greatest = V::greatest_magnitude(greatest, V::load(row + V::lanes * t));
  return V::reduce_greatest(greatest);
}

// Stage 1 of a block: writes its mean to the header and pads with it.
DAF_INLINE void find_mean(Batch& batch, RotatedState& state, size_t i, size_t valid,
                          uint16_t* header) {
  const Prescale& prescale = state.prescale[i];
  header[0] = bfloat16_nearest(sum_of(batch.rows[i]) / float(valid) * prescale.inverse);
  state.mean[i] = widen_bfloat16(header[0]) * prescale.factor;
  if (valid < block_elements) batch.pad(i, valid, state.mean[i]);
}

// A block around its mean: its energy, and whether few elements hold it.
struct Spread {
  float energy;
  bool peaked;
};

DAF_INLINE Spread spread_around(const float* row, float mean) {
  const auto middle = V::set(mean);
  const auto square = [&](int t) {
    const auto centred = V::subtract(V::load(row + V::lanes * t), middle);
    return V::multiply(centred, centred);
  };
  // Sums of every 64th square, and of their squares; two at a time, so few vectors are alive.
  const auto two = [&](int t) {
    const auto first = fold<4>(square, t), second = fold<4>(square, t + 2);
    return std::pair(V::add(first, second),
                     V::add(V::multiply(first, first), V::multiply(second, second)));
  };
  const auto even = two(0), odd = two(1);
  const auto [energy, peak] =
      V::tree_sums(V::add(even.first, odd.first), V::add(even.second, odd.second));
  return {energy, peak * peaked_factor > energy * energy};
}

DAF_NEVER_INLINE Spread spread_after_prescaling(Batch& batch, RotatedState& state, size_t i,
                                                size_t valid, uint16_t* header) {
  if (valid < block_elements) batch.pad(i, valid, 0.0f);
  state.prescale[i] = prescale_for(greatest_magnitude_of(batch.rows[i]));
  batch.scale(i, state.prescale[i].factor);
  find_mean(batch, state, i, valid, header);
  return spread_around(batch.rows[i], state.mean[i]);
}

// Stage 2.
DAF_INLINE float find_norm(Batch& batch, RotatedState& state, size_t i, size_t valid,
                           uint16_t* header) {
  Spread spread = spread_around(batch.rows[i], state.mean[i]);
  if (!(spread.energy >= least_ordinary_energy && spread.energy <= greatest_ordinary_energy))
    spread = spread_after_prescaling(batch, state, i, valid, header);
  state.peaked[i] = spread.peaked;
  return std::sqrt(spread.energy);
}

// Stage 3.
DAF_INLINE void round_centred(V::Shorts& shorts, const float* row, V::F mean, V::F factor) {
  const auto rounded = [&](int t) {
    return V::round(V::multiply(V::subtract(V::load(row + V::lanes * t), mean), factor));
  };
  for_constants<block_vectors / 2>(
      [&](auto pair) { V::put_shorts<pair>(shorts, rounded(2 * pair), rounded(2 * pair + 1)); });
}

// One byte for each coefficient of a block, 64 in each.
struct Quarters {
  V::Bytes of[4];
};

// Finds all coefficients' cells bit by bit, most significant first; each bit goes to its plane.
template <int bits>
DAF_INLINE void find_cells(const Quarters& coefficients, const RotatedTables<bits>& tables,
                           Quarters& cells, uint16_t* const (&rows)[bits]) {
  for_constants<bits>([&](auto step) {
    DAF_UNROLLED for (int q = 0; q < 4; ++q) {
      auto threshold = tables.thresholds[step];
      if (step > 0) threshold = V::lookup_bytes(threshold, cells.of[q]);
      const uint64_t word =
          V::add_where_greater<(8 >> step)>(cells.of[q], coefficients.of[q], threshold);
      std::memcpy(rows[step] + 4 * q, &word, 8);
    }
  });
}

// Stage 4: writes all planes; returns the products of coefficients with their levels.
template <int bits>
DAF_INLINE V::I quantize(const V::Shorts& shorts, const RotatedTables<bits>& tables,
                         uint16_t* const (&rows)[bits]) {
  Quarters coefficients, cells = {V::no_bytes(), V::no_bytes(), V::no_bytes(), V::no_bytes()};
  for_constants<4>(
      [&](auto q) { coefficients.of[q] = V::narrow_shorts<coefficient_multiplier, q>(shorts); });
  find_cells<bits>(coefficients, tables, cells, rows);
  auto products = V::set_integer(0);
  for_constants<4>([&](auto q) {
    products = V::add_products<q>(products, shorts, V::lookup_bytes(tables.levels, cells.of[q]));
  });
  return products;
}

// Stage 5: writes the header's scale, its sign set where there were two rounds; a block of equal
// values has none, a non-finite one no codes. False for the latter.
DAF_INLINE bool finish_block(const Job& job, const RotatedState& state, size_t i, size_t index) {
  uint16_t* header = job.headers + 2 * index;
  const float norm = state.norm[i], product = float(state.product[i]);
  const float scale = norm * (integer_length * scale_unit) / product * state.prescale[i].inverse;
  const uint16_t sign = state.peaked[i] ? bfloat16_sign : 0;
  header[1] = norm == 0.0f ? 0 : uint16_t(bfloat16_nearest(scale) | sign);
  // The greatest magnitude may miss a NaN; the norm does not.
  const bool finite = state.prescale[i].finite && norm == norm && is_finite_bfloat16(header[0]) &&
                      is_finite_bfloat16(header[1]);
  if (finite && norm != 0.0f) return true;
  clear_planes(job, index);
  if (!finite) mark_non_finite(header);
  return finite;
}

template <int bits> bool encode_rotated_range(const Job& job, size_t first, size_t last) {
  const RotatedTables<bits> tables(job.thresholds, job.levels);
  Reader reader(job);
  Rotations rotations(job.key);
  Batch batch;
  RotatedState state;
  bool finite = true;
  for (size_t start = first; start < last; start += batch_blocks) {
    const size_t size = last - start < batch_blocks ? last - start : batch_blocks;
    for (size_t i = 0; i < size; ++i) {
      batch.rows[i] = reader.fetch(start + i, batch.room[i]);
      state.prescale[i] = {};
      find_mean(batch, state, i, reader.valid(start + i), job.headers + 2 * (start + i));
    }
    for (size_t i = 0; i < size; ++i) {
      state.norm[i] =
          find_norm(batch, state, i, reader.valid(start + i), job.headers + 2 * (start + i));
    }
    for (size_t i = 0; i < size; ++i) {
      reader.expect(start + batch_blocks + i);
      V::Shorts shorts;
      round_centred(shorts, batch.rows[i], V::set(state.mean[i]),
                    V::set(integer_length / state.norm[i]));
      rotations.apply(shorts, state.rotated[i], start + i, state.peaked[i]);
    }
    for (size_t i = 0; i < size; ++i) {
      uint16_t* rows[bits];
      plane_rows(rows, job, start + i);
      const auto products = quantize<bits>(state.rotated[i], tables, rows);
      state.product[i] = V::reduce_add(products);
    }
    for (size_t i = 0; i < size; ++i) finite &= finish_block(job, state, i, start + i);
  }
  return finite;
}

template <int kept_bits>
DAF_INLINE void read_levels(V::Shorts& shorts, const uint16_t* const (&rows)[kept_bits],
                            V::Bytes levels) {
  for_constants<4>([&](auto q) {
    auto cells = V::no_bytes();
    read_planes<3>(rows, q, cells);
    V::put_bytes<q>(shorts, V::lookup_bytes(levels, cells));
  });
}

DAF_INLINE void scale_shorts(Block& block, const V::Shorts& shorts, V::F mean, V::F factor) {
  for_constants<block_vectors>([&](auto t) {
    block.x[t] = V::add(mean, V::multiply(factor, V::shorts_to_float<t>(shorts)));
  });
}

template <int kept_bits> bool decode_rotated_range(const Job& job, size_t first, size_t last) {
  const auto levels = V::load_table(job.levels);
  Writer writer(job);
  Rotations rotations(job.key);
  V::Shorts shorts[batch_blocks];
  for (size_t start = first; start < last; start += batch_blocks) {
    const size_t size = last - start < batch_blocks ? last - start : batch_blocks;
    for (size_t i = 0; i < size; ++i) {
      const uint16_t* rows[kept_bits];
      plane_rows(rows, job, start + i);
      V::Shorts here;
      read_levels<kept_bits>(here, rows, levels);
      const uint16_t scale = job.headers[2 * (start + i) + 1];
      rotations.apply_back(here, shorts[i], start + i, (scale & bfloat16_sign) != 0);
    }
    for (size_t i = 0; i < size; ++i) {
      const uint16_t* header = job.headers + 2 * (start + i);
      Block block;
      if (is_finite_bfloat16(header[0]) && is_finite_bfloat16(header[1])) {
        scale_shorts(block, shorts[i], V::set(widen_bfloat16(header[0])),
                     V::set(std::fabs(widen_bfloat16(header[1])) * job.level_factor));
      } else {
        fill_with_nan(block);
      }
      writer.write(block, start + i);
    }
  }
  return true;
}

}  // namespace
