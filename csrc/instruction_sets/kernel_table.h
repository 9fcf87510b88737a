// The table of one instruction set; each kernels_*.cpp includes it last.
#pragma once

#include "codecs/bit_codecs.h"
#include "codecs/block_reductions.h"
#include "codecs/minmax.h"
#include "codecs/rotated.h"

namespace {

inline bool encode_rotated_any(const Job& job, size_t first, size_t last) {
  constexpr Kernel by_bits[] = {encode_rotated_range<1>, encode_rotated_range<2>,
                                encode_rotated_range<3>, encode_rotated_range<4>};
  return by_bits[job.bits - 1](job, first, last);
}

inline bool decode_rotated_any(const Job& job, size_t first, size_t last) {
  constexpr Kernel by_bits[] = {decode_rotated_range<1>, decode_rotated_range<2>,
                                decode_rotated_range<3>, decode_rotated_range<4>};
  return by_bits[job.bits - 1](job, first, last);
}

#define DAF_BY_EIGHT_WIDTHS(name) \
  {name<1>, name<2>, name<3>, name<4>, name<5>, name<6>, name<7>, name<8>}

inline bool encode_minmax_any(const Job& job, size_t first, size_t last) {
  constexpr Kernel by_bits[] = DAF_BY_EIGHT_WIDTHS(encode_minmax_range);
  return by_bits[job.bits - 1](job, first, last);
}

inline bool decode_minmax_any(const Job& job, size_t first, size_t last) {
  constexpr Kernel by_bits[] = DAF_BY_EIGHT_WIDTHS(decode_minmax_range);
  return by_bits[job.bits - 1](job, first, last);
}

inline bool encode_steps_any(const Job& job, size_t first, size_t last) {
  constexpr Kernel by_bits[] = DAF_BY_EIGHT_WIDTHS(encode_steps_range);
  return by_bits[job.bits - 1](job, first, last);
}

inline bool decode_steps_any(const Job& job, size_t first, size_t last) {
  constexpr Kernel by_bits[] = DAF_BY_EIGHT_WIDTHS(decode_steps_range);
  return by_bits[job.bits - 1](job, first, last);
}

inline bool encode_integers_any(const Job& job, size_t first, size_t last) {
  switch (job.item_bytes) {
    case 1: return encode_integers_of<int8_t>(job, first, last);
    case 2: return encode_integers_of<int16_t>(job, first, last);
    case 4: return encode_integers_of<int32_t>(job, first, last);
    default: return encode_integers_of<int64_t>(job, first, last);
  }
}

inline bool decode_integers_any(const Job& job, size_t first, size_t last) {
  switch (job.item_bytes) {
    case 1: return decode_integers_of<uint8_t>(job, first, last);
    case 2: return decode_integers_of<uint16_t>(job, first, last);
    case 4: return decode_integers_of<uint32_t>(job, first, last);
    default: return decode_integers_of<uint64_t>(job, first, last);
  }
}

constexpr KernelTable make_table(const char* name) {
  return {name,
          encode_rotated_any,
          decode_rotated_any,
          encode_minmax_any,
          decode_minmax_any,
          encode_steps_any,
          decode_steps_any,
          encode_mask_range,
          decode_mask_range,
          encode_derivative_range,
          decode_derivative_range,
          encode_integers_any,
          decode_integers_any,
          read_blocks_range,
          copy_blocks_range,
          measure_ranges_shares,
          measure_rows_range};
}

}  // namespace
