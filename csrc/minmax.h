// The `minmax` codec: docs/format.md, section 5. Include after a vector_*.h.
#pragma once

#include "block.h"
#include "philox.h"

namespace {

// Greatest bf16 not above; the input is never -0.
DAF_INLINE uint16_t bfloat16_floor(float value) {
  return uint16_t((to_bits(value) + (value < 0.0f ? 0xFFFFu : 0u)) >> 16);
}

// Least bf16 not below, for numbers from +0 upward.
DAF_INLINE uint16_t bfloat16_ceiling(float value) {
  return uint16_t((to_bits(value) + 0xFFFFu) >> 16);
}

struct Range {
  float low, high;
};

DAF_INLINE Range range_of(const Block& block) {
  auto low = block.x[0], high = block.x[0];
  DAF_UNROLLED for (int t = 1; t < block_vectors; ++t) {
    low = V::least(low, block.x[t]);
    high = V::greatest(high, block.x[t]);
  }
  return {V::reduce_least(low) + 0.0f, V::reduce_greatest(high) + 0.0f};
}

// Padding takes the first element's value, which changes neither end of the range.
DAF_INLINE Range range_of_valid(Block block, size_t valid) {
  if (valid < block_elements) {
    alignas(64) float first[V::lanes];
    V::store(first, block.x[0]);
    fill_padding(block, valid, first[0]);
  }
  return range_of(block);
}

struct Grid {
  float origin, reciprocal;  // both for prescaled values
  bool finite;
};

DAF_INLINE Grid make_grid(Range range, const Prescale& prescale, float last, uint16_t* header) {
  header[0] = bfloat16_floor(range.low);
  const float origin = widen_bfloat16(header[0]) * prescale.factor;
  const float ideal = (range.high * prescale.factor - origin) / last;
  header[1] = bfloat16_ceiling(ideal * prescale.inverse);
  if (header[1] == 0 && ideal > 0.0f) header[1] = 1;
  const float step = widen_bfloat16(header[1]) * prescale.factor;
  const bool finite = is_finite_bfloat16(header[0]) && is_finite_bfloat16(header[1]);
  return {origin, header[1] == 0 ? 0.0f : 1.0f / step, finite};
}

template <int bits>
DAF_INLINE void write_minmax_codes(const Block& block, size_t valid, float factor, Grid grid,
                                   uint64_t key, uint64_t index, uint16_t* const (&rows)[bits]) {
  const auto prescale = V::set(factor), origin = V::set(grid.origin);
  const auto reciprocal = V::set(grid.reciprocal);
  const auto last = V::set_integer((1u << bits) - 1), minus_one = V::set_integer(~0u);
  Block position;
  DAF_UNROLLED for (int group = 0; group < 4; ++group) {
    V::F offset[4];
    dither(key, index, group, offset);
    DAF_UNROLLED for (int i = 0; i < 4; ++i) {
      const auto centred = V::subtract(V::multiply(block.x[4 * group + i], prescale), origin);
      position.x[4 * group + i] = V::add(V::multiply(centred, reciprocal), offset[i]);
    }
  }
  if (valid < block_elements) fill_padding(position, valid, 1.0f);
  DAF_EACH_VECTOR {
    const auto code = V::add_integer(V::truncate(position.x[t]), minus_one);
    write_codes<bits>(rows, t, V::least_integer(code, last));
  }
}

template <int bits>
bool encode_minmax_range(const EncodeMinmax& job, size_t first, size_t last) {
  const size_t blocks = block_count(job.source.count);
  Reader reader(job.source);
  for (size_t index = first; index < last; ++index) {
    Block block;
    uint16_t* rows[bits];
    uint16_t* header = job.headers + 2 * index;
    const size_t valid = reader.valid(index);
    plane_rows(rows, job.planes, blocks, index);
    reader.read(block, index);
    const Prescale prescale = prescale_of(block);
    const Grid grid =
        make_grid(range_of_valid(block, valid), prescale, float((1 << bits) - 1), header);
    if (prescale.finite && grid.finite) {
      write_minmax_codes<bits>(block, valid, prescale.factor, grid, job.key, index, rows);
    } else {
      clear_planes(job.planes, blocks, bits, index);
      mark_non_finite(header);
    }
  }
  return true;
}

template <int bits>
bool decode_minmax_range(const DecodeMinmax& job, size_t first, size_t last) {
  const size_t blocks = block_count(job.target.count);
  Writer writer(job.target);
  for (size_t index = first; index < last; ++index) {
    Block block;
    const uint16_t* rows[bits];
    const uint16_t* header = job.headers + 2 * index;
    plane_rows(rows, job.planes, blocks, index);
    if (is_finite_bfloat16(header[0]) && is_finite_bfloat16(header[1])) {
      const auto least = V::set(widen_bfloat16(header[0]));
      const auto step = V::set(widen_bfloat16(header[1]));
      DAF_EACH_VECTOR {
        const auto code = V::to_float(read_codes<bits>(rows, t));
        block.x[t] = V::add(least, V::multiply(code, step));
      }
    } else {
      fill_with_nan(block);
    }
    writer.write(block, index);
  }
  return true;
}

}  // namespace
