// The table of one instruction set; its file (kernels.in) includes its vectors, then this.
#pragma once

#include "codecs/bit_codecs.h"
#include "codecs/block_reductions.h"
#include "codecs/minmax.h"
#include "codecs/rotated.h"

namespace {

#define DAF_FOUR_WIDTHS(kernel) kernel<1>, kernel<2>, kernel<3>, kernel<4>
#define DAF_EIGHT_WIDTHS(kernel) DAF_FOUR_WIDTHS(kernel), kernel<5>, kernel<6>, kernel<7>, kernel<8>

// A kernel of any width, from one for each.
#define DAF_BY_WIDTH(kernel, widths)                                    \
  inline bool kernel##_any(const Job& job, size_t first, size_t last) { \
    constexpr Kernel by_bits[] = {widths(kernel##_range)};              \
    return by_bits[job.bits - 1](job, first, last);                     \
  }

DAF_BY_WIDTH(encode_rotated, DAF_FOUR_WIDTHS)
DAF_BY_WIDTH(decode_rotated, DAF_FOUR_WIDTHS)
DAF_BY_WIDTH(encode_minmax, DAF_EIGHT_WIDTHS)
DAF_BY_WIDTH(decode_minmax, DAF_EIGHT_WIDTHS)
DAF_BY_WIDTH(encode_steps, DAF_EIGHT_WIDTHS)
DAF_BY_WIDTH(decode_steps, DAF_EIGHT_WIDTHS)
DAF_BY_WIDTH(encode_derivative, DAF_EIGHT_WIDTHS)

// A kernel of items of any size, from one for each.
#define DAF_BY_ITEM(kernel, item)                                       \
  inline bool kernel##_any(const Job& job, size_t first, size_t last) { \
    switch (job.item_bytes) {                                           \
      case 1: return kernel##_of<item##8_t>(job, first, last);          \
      case 2: return kernel##_of<item##16_t>(job, first, last);         \
      case 4: return kernel##_of<item##32_t>(job, first, last);         \
      default: return kernel##_of<item##64_t>(job, first, last);        \
    }                                                                   \
  }

DAF_BY_ITEM(encode_integers, int)
DAF_BY_ITEM(decode_integers, uint)

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
          encode_derivative_any,
          decode_derivative_range,
          encode_integers_any,
          decode_integers_any,
          read_blocks_range,
          copy_blocks_range,
          measure_ranges_shares,
          measure_rows_range};
}

}  // namespace
