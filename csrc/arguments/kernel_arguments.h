// What a kernel is asked to do: plain values, filled by bind.cpp, read by every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "arguments/channels.h"
#include "arguments/strided.h"

namespace daf {

constexpr size_t block_elements = 256;
constexpr size_t words_per_block = 8;
constexpr uint16_t non_finite_header = 0x7FC0;

enum class ElementType : int { float32 = 0, bfloat16 = 1, float16 = 2 };
enum class Predicate : int { inside = 0, above = 1 };

inline size_t element_bytes(ElementType type) { return type == ElementType::float32 ? 4 : 2; }

// value * scale[c] + shift[c], c = (i / inner) % channels; none where channels is 0.
struct Affine {
  uint64_t channels = 0;
  uint64_t inner = 1;
  const float* scale = nullptr;
  const float* shift = nullptr;
  bool growing = false;  // written while it is read, elsewhere
};

struct RunningSums;

// What a reader of blocks writes in passing: its value * scale[c] + shift[c], plus the addend's
// element; with a mask, what is not above 0 becomes 0, what is not below `most` (NaN: no bound)
// becomes that, and the others set their bit.
struct Emission {
  float* destination;
  Affine affine;
  const float* addend = nullptr;
  uint32_t* mask = nullptr;
  bool stream = false;  // write around the caches
  float most = std::numeric_limits<float>::quiet_NaN();
};

// What a writer of blocks does with normalised values instead of writing them. With `sums`: of the
// gradient, zero where the target's mask is clear, and of its product with the value, perhaps
// writing that gradient down. Without: writes gradient * of_gradient[c] + (value * scale[c] +
// shift[c]), the latter two those of `of_value`.
struct NormGradient {
  const float* gradient;
  float* destination = nullptr;
  Affine of_value, of_gradient;
  RunningSums* sums = nullptr;
};

struct RunningRows;

// What a writer of blocks does with normalised values of rows: docs/format.md, section 11.
struct RowGradient {
  const float* gradient;
  float* destination = nullptr;  // none: only the sums are taken
  const float* gamma = nullptr;  // one for each place along a row; none: 1
  const float* scale = nullptr;  // one for each row
  bool centred = true;
  bool sums = true;  // along the rows' places
  RunningRows* running = nullptr;
};

struct Source {
  const void* data = nullptr;
  ElementType type = ElementType::float32;
  uint64_t count = 0;
  Affine affine;
  View view;                    // none: the elements follow each other
  RunningSums* sums = nullptr;  // whoever reads a block adds it, after the affine
  const Emission* emission = nullptr;
};

struct Target {
  void* data = nullptr;
  ElementType type = ElementType::float32;
  uint64_t count = 0;
  Affine affine;
  const uint32_t* mask = nullptr;
  bool accumulate = false;
  bool stream = false;  // write around the caches
  const NormGradient* gradient = nullptr;
  const RowGradient* rows = nullptr;
};

// Where the planes of a code lie: one after the other from `first` on, or plane p where starts[p]
// says, if planes lie in pages (pages.h). A start is the place of block 0.
template <class Word>
struct Planes {
  constexpr Planes(Word* flat) : first(flat), starts(nullptr) {}

  Word* first;
  Word* const* starts;
};

struct EncodeRotated {
  Source source;
  int bits, rounds;
  uint64_t key;
  Planes<uint32_t> planes;
  uint16_t* headers;
  const int8_t* thresholds;  // [bits][16]: of each step, by the cell found so far
  const int8_t* levels;      // [16], by cell
};

struct DecodeRotated {
  Target target;
  int kept_bits, rounds;
  uint64_t key;
  Planes<const uint32_t> planes;
  const uint16_t* headers;
  const int8_t* levels;  // [16], by cell
  float level_factor;    // of one level, in units of the header's scale
};

struct EncodeMinmax {
  Source source;
  int bits;
  uint64_t key;
  Planes<uint32_t> planes;
  uint16_t* headers;
};

struct DecodeMinmax {
  Target target;
  int bits;
  Planes<const uint32_t> planes;
  const uint16_t* headers;
};

// Of what `source.affine` made numbers of steps.
struct EncodeSteps {
  Source source;
  int bits;
  uint64_t key;
  Planes<uint32_t> planes;
};

struct DecodeSteps {
  Target target;
  int bits;
  Planes<const uint32_t> planes;
};

struct EncodeMask {
  Source source;
  Predicate predicate;
  float low, high;
  Planes<uint32_t> words;
};

struct DecodeMask {
  Target target;
  Planes<const uint32_t> words;
  float off_value, on_value;
};

struct EncodeDerivative {
  Source source;
  int bits;
  const float* borders;  // 2^bits - 1, ascending
  Planes<uint32_t> planes;
};

struct DecodeDerivative {
  Target target;
  int bits;
  const float* levels;  // 2^bits
  Planes<const uint32_t> planes;
};

struct EncodeIntegers {
  const void* source;
  int item_bytes;
  uint64_t count;
  int bits;
  uint64_t base;
  Planes<uint32_t> planes;
};

struct DecodeIntegers {
  Planes<const uint32_t> planes;
  uint64_t count;
  int bits;
  uint64_t base;
  void* destination;
  int item_bytes;
};

struct MeasureRanges;  // ranges.h

// Only for what is done in passing: sums, an emission.
struct ReadBlocks {
  Source source;
};

struct CopyBlocks {
  Source source;
  Target target;
};

// Rows of `length` elements, and what makes normalised values of each: written.
struct MeasureRows {
  const float* data;
  uint64_t length;
  double epsilon;
  bool centred;
  float *scale, *shift;
};

// One entry for each operation and instruction set: does blocks [first, last) and says
// whether they could be done (derivative: all finite; integers: all fit).
template <class Job>
using Kernel = bool (*)(const Job&, size_t first, size_t last);

struct KernelTable {
  const char* name;
  Kernel<EncodeRotated> encode_rotated;
  Kernel<DecodeRotated> decode_rotated;
  Kernel<EncodeMinmax> encode_minmax;
  Kernel<DecodeMinmax> decode_minmax;
  Kernel<EncodeSteps> encode_steps;
  Kernel<DecodeSteps> decode_steps;
  Kernel<EncodeMask> encode_mask;
  Kernel<DecodeMask> decode_mask;
  Kernel<EncodeDerivative> encode_derivative;
  Kernel<DecodeDerivative> decode_derivative;
  Kernel<EncodeIntegers> encode_integers;
  Kernel<DecodeIntegers> decode_integers;
  Kernel<MeasureRanges> measure_ranges;  // does shares of the plan, not blocks
  Kernel<ReadBlocks> read_blocks;
  Kernel<CopyBlocks> copy_blocks;
  Kernel<MeasureRows> measure_rows;  // does rows, not blocks
};

inline size_t block_count(uint64_t count) { return (count + block_elements - 1) / block_elements; }

}  // namespace daf
