#include "runner.h"

#include "call.h"

namespace daf::vectors {
namespace {

bool encode_rotated(const Call& call) {
  const EncodeRotated job{call.source(),
                          int(call.given.bits),
                          int(call.given.rounds),
                          call.given.key,
                          call.at<uint32_t>(output),
                          call.at<uint16_t>(output_headers),
                          call.at<int8_t>(thresholds),
                          call.at<int8_t>(table)};
  return call.run(job, call.kernels.encode_rotated);
}

bool decode_rotated(const Call& call) {
  const DecodeRotated job{call.target(),
                          int(call.given.bits),
                          int(call.given.rounds),
                          call.given.key,
                          call.at<uint32_t>(input),
                          call.at<uint16_t>(headers),
                          call.at<int8_t>(table),
                          call.given.low};
  return call.run(job, call.kernels.decode_rotated);
}

bool encode_minmax(const Call& call) {
  const EncodeMinmax job{call.source(), int(call.given.bits), call.given.key,
                         call.at<uint32_t>(output), call.at<uint16_t>(output_headers)};
  return call.run(job, call.kernels.encode_minmax);
}

bool decode_minmax(const Call& call) {
  const DecodeMinmax job{call.target(), int(call.given.bits), call.at<uint32_t>(input),
                         call.at<uint16_t>(headers)};
  return call.run(job, call.kernels.decode_minmax);
}

bool encode_steps(const Call& call) {
  const EncodeSteps job{call.source(), int(call.given.bits), call.given.key,
                        call.at<uint32_t>(output)};
  return call.run(job, call.kernels.encode_steps);
}

bool decode_steps(const Call& call) {
  const DecodeSteps job{call.target(), int(call.given.bits), call.at<uint32_t>(input)};
  return call.run(job, call.kernels.decode_steps);
}

bool encode_mask(const Call& call) {
  const EncodeMask job{call.source(), Predicate(call.given.predicate), call.given.low,
                       call.given.high, call.at<uint32_t>(output)};
  return call.run(job, call.kernels.encode_mask);
}

bool decode_mask(const Call& call) {
  const DecodeMask job{call.target(), call.at<uint32_t>(input), call.given.low, call.given.high};
  return call.run(job, call.kernels.decode_mask);
}

bool encode_derivative(const Call& call) {
  const EncodeDerivative job{call.source(), int(call.given.bits), call.at<float>(table),
                             call.at<uint32_t>(output)};
  return call.run(job, call.kernels.encode_derivative);
}

bool decode_derivative(const Call& call) {
  const DecodeDerivative job{call.target(), int(call.given.bits), call.at<float>(table),
                             call.at<uint32_t>(input)};
  return call.run(job, call.kernels.decode_derivative);
}

bool encode_integers(const Call& call) {
  const Parameters& given = call.given;
  const EncodeIntegers job{call.at<void>(input), int(given.item_bytes),
                           given.count,          int(given.bits),
                           given.base,           call.at<uint32_t>(output)};
  return call.run(job, call.kernels.encode_integers);
}

bool decode_integers(const Call& call) {
  const Parameters& given = call.given;
  const DecodeIntegers job{call.at<uint32_t>(input), given.count,
                           int(given.bits),          given.base,
                           call.at<void>(output),    int(given.item_bytes)};
  return call.run(job, call.kernels.decode_integers);
}

// In the order of Operation.
using Runner = bool (*)(const Call&);
constexpr Runner runners[] = {
    encode_rotated,  decode_rotated,  encode_minmax, decode_minmax,     encode_steps,
    decode_steps,    encode_mask,     decode_mask,   encode_derivative, decode_derivative,
    encode_integers, decode_integers, emit,          sum_gradient,      write_gradient,
    emit_rows,       row_gradient};
static_assert(sizeof runners / sizeof *runners == operation_count);

}  // namespace

bool run_case(const Case& given, const Buffers& buffers, const KernelTable& kernels, int threads) {
  return runners[given.parameters.operation](Call{given.parameters, buffers, kernels, threads});
}

}  // namespace daf::vectors
