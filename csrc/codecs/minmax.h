// The `minmax` codec: docs/format.md, section 5. Include after a vector_*.h.
#pragma once

#include "codecs/block_io.h"
#include "codecs/philox.h"

namespace {

// The greatest bf16 not above `value`, which is never -0.
DAF_INLINE uint16_t bfloat16_floor(float value) {
  return uint16_t((to_bits(value) + (value < 0.0f ? 0xFFFFu : 0u)) >> 16);
}

// The least bf16 not below `value`, for numbers from +0 upward.
DAF_INLINE uint16_t bfloat16_ceiling(float value) {
  return uint16_t((to_bits(value) + 0xFFFFu) >> 16);
}

// Blocks whose greatest magnitude lies between these need no prescaling.
constexpr float least_ordinary_magnitude = 0x1p-30f, greatest_ordinary_magnitude = 0x1p30f;

struct Range {
  float low, high;
  bool ordered;  // no NaN among them
};

DAF_INLINE Range range_of(const float* row) {
  auto low = V::load(row), high = low;
  auto unordered = V::mask_from(0);
  DAF_UNROLLED for (int t = 0; t < block_vectors; t += 2) {
    const auto x = V::load(row + V::lanes * t), y = V::load(row + V::lanes * (t + 1));
    low = V::least(low, V::least(x, y));
    high = V::greatest(high, V::greatest(x, y));
    unordered = V::either(unordered, V::unordered(x, y));
  }
  return {V::reduce_least(low) + 0.0f, V::reduce_greatest(high) + 0.0f,
          V::mask_bits(unordered) == 0};
}

// Padding repeats the first element, which leaves the range unchanged.
DAF_NEVER_INLINE Range range_of_tail(const float* row, size_t valid) {
  alignas(64) float copy[block_elements];
  for (size_t i = 0; i < block_elements; ++i) copy[i] = row[i < valid ? i : 0];
  return range_of(copy);
}

struct Grid {
  float prescale, origin, reciprocal;  // the latter two for prescaled values
  bool finite;
};

DAF_INLINE Grid make_grid(Range range, float last, uint16_t* header) {
  const float greatest = std::fmax(std::fabs(range.low), std::fabs(range.high));
  const bool ordinary =
      greatest >= least_ordinary_magnitude && greatest <= greatest_ordinary_magnitude;
  const Prescale prescale = ordinary ? Prescale{} : prescale_for(greatest);
  header[0] = bfloat16_floor(range.low);
  const float origin = widen_bfloat16(header[0]) * prescale.factor;
  const float ideal = (range.high * prescale.factor - origin) / last;
  header[1] = bfloat16_ceiling(ideal * prescale.inverse);
  if (header[1] == 0 && ideal > 0.0f) header[1] = 1;
  const float step = widen_bfloat16(header[1]) * prescale.factor;
  const bool finite = is_finite_bfloat16(header[0]) && is_finite_bfloat16(header[1]);
  return {prescale.factor, origin, header[1] == 0 ? 0.0f : 1.0f / step,
          finite && prescale.finite && range.ordered};
}

// Converts four vectors of grid positions, counted from one, to codes.
template <int bits> DAF_INLINE V::Bytes codes_of(const V::I (&positions)[4]) {
  if constexpr (bits < 8)
    return V::least_bytes(V::subtract_bytes(V::pack_bytes(positions), V::set_bytes(1)),
                          V::set_bytes((1 << bits) - 1));
  // 256, one beyond the last position, fits no byte.
  V::I codes[4];
  DAF_UNROLLED for (int i = 0; i < 4; ++i) codes[i] =
      V::least_integer(V::add_integer(positions[i], V::set_integer(~0u)), V::set_integer(255));
  return V::pack_bytes(codes);
}

// Clamps to [0, last]; NaN becomes 0.
DAF_INLINE V::F clamped_to(V::F position, V::F last) {
  const auto zero = V::set(0.0f);
  position = V::select(V::greater(position, zero), position, zero);
  return V::select(V::greater(last, position), position, last);
}

template <int bits, bool whole, bool clamps = false>
DAF_INLINE void write_minmax_codes(const float* row, size_t valid, Grid grid,
                                   const PhiloxKeys& keys, uint64_t index,
                                   uint16_t* const (&rows)[bits]) {
  const auto origin = V::set(grid.origin), reciprocal = V::set(grid.reciprocal);
  V::F offset[2][8];
  dither(keys, index, offset);
  DAF_UNROLLED for (int group = 0; group < 2; ++group) {
    DAF_UNROLLED for (int q = 0; q < 2; ++q) {
      V::I positions[4];
      DAF_UNROLLED for (int i = 0; i < 4; ++i) {
        const int t = 8 * group + 4 * q + i;
        auto position = V::load(row + V::lanes * t);
        if (clamps)
          position = clamped_to(position, V::set(float((1 << bits) - 1)));
        else
          position = V::multiply(V::subtract(position, origin), reciprocal);
        position = V::add(position, offset[group][4 * q + i]);
        if (!whole)
          position = V::select(V::mask_from(real_lanes(valid, t)), position, V::set(1.0f));
        positions[i] = V::truncate(position);
      }
      write_plane<bits, 0>(rows, 2 * group + q, codes_of<bits>(positions));
    }
  }
}

template <int bits>
DAF_NEVER_INLINE void write_minmax_tail(const float* row, size_t valid, const Grid& grid,
                                        const PhiloxKeys& keys, uint64_t index,
                                        uint16_t* const (&rows)[bits]) {
  write_minmax_codes<bits, false>(row, valid, grid, keys, index, rows);
}

template <int bits> bool encode_minmax_range(const Job& job, size_t first, size_t last) {
  const PhiloxKeys keys(job.key);
  Reader reader(job);
  Batch batch;
  Grid grids[batch_blocks];
  bool finite = true;
  for (size_t start = first; start < last; start += batch_blocks) {
    const size_t size = last - start < batch_blocks ? last - start : batch_blocks;
    for (size_t i = 0; i < size; ++i) {
      batch.rows[i] = reader.fetch(start + i, batch.room[i]);
      const size_t valid = reader.valid(start + i);
      const Range range =
          valid == block_elements ? range_of(batch.rows[i]) : range_of_tail(batch.rows[i], valid);
      uint16_t* header = job.headers + 2 * (start + i);
      grids[i] = make_grid(range, float((1 << bits) - 1), header);
      if (grids[i].prescale != 1.0f) batch.scale(i, grids[i].prescale);
    }
    for (size_t i = 0; i < size; ++i) {
      const size_t index = start + i;
      uint16_t* rows[bits];
      if (grids[i].finite) {
        const size_t valid = reader.valid(index);
        plane_rows(rows, job, index);
        reader.expect(index + batch_blocks);
        if (valid == block_elements)
          write_minmax_codes<bits, true>(batch.rows[i], valid, grids[i], keys, index, rows);
        else
          write_minmax_tail<bits>(batch.rows[i], valid, grids[i], keys, index, rows);
      } else {
        clear_planes(job, index);
        mark_non_finite(job.headers + 2 * index);
        finite = false;
      }
    }
  }
  return finite;
}

// Without a grid, values are numbers of steps.
template <int bits, bool has_grid = true>
bool decode_minmax_range(const Job& job, size_t first, size_t last) {
  Writer writer(job);
  for (size_t index = first; index < last; ++index) {
    Block block;
    const uint16_t* rows[bits];
    const uint16_t* header = has_grid ? job.headers + 2 * index : nullptr;
    plane_rows(rows, job, index);
    if (!has_grid || (is_finite_bfloat16(header[0]) && is_finite_bfloat16(header[1]))) {
      const auto least = V::set(has_grid ? widen_bfloat16(header[0]) : 0.0f);
      const auto step = V::set(has_grid ? widen_bfloat16(header[1]) : 1.0f);
      DAF_UNROLLED for (int q = 0; q < 4; ++q) {
        V::I codes[4];
        read_codes<bits>(rows, q, codes);
        DAF_UNROLLED for (int i = 0; i < 4; ++i) {
          const auto steps = V::to_float(codes[i]);
          block.x[4 * q + i] = has_grid ? V::add(least, V::multiply(steps, step)) : steps;
        }
      }
    } else {
      fill_with_nan(block);
    }
    writer.write(block, index);
  }
  return true;
}

// Codes of steps, whose range is known already.

template <int bits>
DAF_NEVER_INLINE void write_steps(const Job& job, const float* row, size_t valid,
                                  const PhiloxKeys& keys, uint64_t index) {
  uint16_t* rows[bits];
  plane_rows(rows, job, index);
  if (valid == block_elements)
    write_minmax_codes<bits, true, true>(row, valid, {}, keys, index, rows);
  else
    write_minmax_codes<bits, false, true>(row, valid, {}, keys, index, rows);
}

template <int bits> bool encode_steps_range(const Job& job, size_t first, size_t last) {
  const PhiloxKeys keys(job.key);
  Reader reader(job);
  alignas(64) float room[block_elements];
  for (size_t index = first; index < last; ++index) {
    const float* row = reader.fetch(index, room);
    write_steps<bits>(job, row, reader.valid(index), keys, index);
  }
  return true;
}

template <int bits> constexpr Kernel decode_steps_range = decode_minmax_range<bits, false>;

}  // namespace
