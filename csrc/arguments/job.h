// A kernel's arguments: plain values, read by every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "arguments/channels.h"

namespace daf {

constexpr size_t block_elements = 256;
constexpr size_t words_per_block = 8;
constexpr uint16_t non_finite_header = 0x7FC0;

enum class ElementType : int { float32 = 0, bfloat16 = 1, float16 = 2 };
enum class Predicate : int { inside = 0, above = 1 };

inline size_t element_bytes(ElementType type) { return type == ElementType::float32 ? 4 : 2; }

// value * scale[c] + shift[c], c = (i / inner) % channels; channels 0: none.
struct Affine {
  uint64_t channels = 0;
  uint64_t inner = 1;
  const float* scale = nullptr;
  const float* shift = nullptr;
  bool growing = false;  // another thread writes it meanwhile
};

// What a reader of blocks also writes: daf.kernels.normalisation.NormOutput, whose `most` is NaN
// for no bound.
struct Emission {
  float* destination = nullptr;  // none: no emission
  const float* addend = nullptr;
  Affine affine;
  float most = std::numeric_limits<float>::quiet_NaN();
  bool stream = false;  // write around the caches
};

// What a writer of blocks does with normalised values instead of writing them:
// section 10 of docs/format.md.
struct NormGradient {
  const float* gradient = nullptr;  // none: values are written
  float* destination = nullptr;
  Affine of_value, of_gradient;
};

// The same for rows of normalised values: docs/format.md, section 11.
struct RowGradient {
  uint64_t length = 0;  // 0: values are written
  bool centred = true;
  const float* gradient = nullptr;
  float* destination = nullptr;                 // none: only sums
  const float* gamma = nullptr;                 // one for each place along a row; none: 1
  const float* scale = nullptr;                 // one for each row
  double *beta = nullptr, *of_gamma = nullptr;  // sums along the rows' places; none: not taken
  void* workspace = nullptr;
};

struct Source {
  const void* data = nullptr;
  ElementType type = ElementType::float32;
  Affine affine;
};

struct Target {
  void* data = nullptr;
  ElementType type = ElementType::float32;
  Affine affine;
  bool accumulate = false;
  bool stream = false;  // write around the caches
};

struct RunningSums;  // reductions/sums.h
struct RunningRows;  // norms/rows.h

// A kernel's job. Encoders read a source, decoders write a target; comments name a field's codecs.
struct Job {
  uint64_t count = 0;  // elements of the tensor
  Source source;
  Target target;
  uint32_t* mask = nullptr;  // written by an emission, applied to a target or a gradient

  int bits = 0;                        // planes written or read
  uint32_t* const* planes = nullptr;   // [bits]: where the plane's part of block 0 lies
  uint16_t* headers = nullptr;         // rotated, minmax
  uint64_t key = 0;                    // of signs and dither
  const int8_t* thresholds = nullptr;  // rotated, [bits][16]: of each step, by the cell so far
  const int8_t* levels = nullptr;      // rotated, [16]: by cell
  float level_factor = 0;              // rotated: of one level, in units of the header's scale
  Predicate predicate = Predicate::above;
  float low = 0, high = 0;       // mask: its bounds; decoded: what a clear and a set bit stand for
  const float* table = nullptr;  // derivative: 15 borders, 16 scales and shifts; decoded: levels
  int item_bytes = 0;            // integers
  uint64_t base = 0;             // integers

  Emission emission;
  NormGradient gradient;
  RowGradient row_gradient;
  RunningSums* sums = nullptr;
  RunningRows* running_rows = nullptr;
};

struct MeasureRanges;  // reductions/ranges.h

// Rows of `length` elements; writes the scale and shift that normalise each.
struct MeasureRows {
  const float* data = nullptr;
  uint64_t length = 0;
  double epsilon = 0;
  bool centred = true;
  float *scale = nullptr, *shift = nullptr;
};

// Does blocks [first, last); false if one cannot be coded (not finite, out of range).
using Kernel = bool (*)(const Job&, size_t first, size_t last);

// The kernels of one instruction set.
struct KernelTable {
  const char* name;
  Kernel encode_rotated, decode_rotated;
  Kernel encode_minmax, decode_minmax;
  Kernel encode_steps, decode_steps;  // the source's affine has made numbers of steps
  Kernel encode_mask, decode_mask;
  Kernel encode_derivative, decode_derivative;
  Kernel encode_integers, decode_integers;
  Kernel read_blocks;  // for an emission, or for sums
  Kernel copy_blocks;
  bool (*measure_ranges)(const MeasureRanges&, size_t first_share, size_t last_share);
  bool (*measure_rows)(const MeasureRows&, size_t first_row, size_t last_row);
};

inline size_t block_count(uint64_t count) { return (count + block_elements - 1) / block_elements; }

}  // namespace daf
