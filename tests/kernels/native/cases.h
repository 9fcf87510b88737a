// One call of a kernel and the bytes that it must write.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace daf::vectors {

// Numbered as in tests/helpers/kernels/recorder.py, which writes the file.
enum class Operation : uint32_t {
  encode_rotated,
  decode_rotated,
  encode_minmax,
  decode_minmax,
  encode_steps,
  decode_steps,
  encode_mask,
  decode_mask,
  encode_derivative,
  decode_derivative,
  encode_integers,
  decode_integers,
  // Normalisations; `codec` says where the values come from.
  emit,
  sum_gradient,
  write_gradient,
  emit_rows,
  row_gradient,
};
constexpr uint32_t operation_count = 17;

enum class Codec : uint32_t { rotated, minmax, kept };

// As they lie in the file: little-endian, without gaps.
struct Parameters {
  uint32_t operation, type, bits, item_bytes, predicate, accumulate;
  uint64_t done;    // what the kernel must return; else its bytes count only with headers
  float low, high;  // decode_rotated: the levels' factor in `low`
  uint64_t count, key, base, channels, inner;
  // Of normalisations: those of the second and third affine, whether rows are centred, and what is
  // added under their root. Of rows, `second_inner` is the length.
  uint64_t second_channels, second_inner;
  uint32_t codec, centred;
  double epsilon;
};
static_assert(sizeof(Parameters) == 112);

// What a kernel reads and writes; operations use what they need.
// `gradient` is also an addend, `result` what is written in passing or a gradient.
enum Slot {
  input,
  headers,
  mask,
  scale,
  shift,
  table,
  thresholds,
  gradient,
  second_scale,
  second_shift,
  third_scale,
  third_shift,
  output,
  output_headers,
  result,
  result_mask,
  sums,
  products,
  slots
};
constexpr int first_output = output;

using Bytes = std::vector<uint8_t>;

struct Case {
  std::string name;
  Parameters parameters{};
  Bytes content[slots];  // of outputs: as expected
  Bytes before;          // of `output`, where it is accumulated onto

  Operation operation() const { return Operation(parameters.operation); }
};

// The next case of a file; false at its end. Throws where the file is cut off.
bool read_case(std::istream& file, Case& result);

}  // namespace daf::vectors
