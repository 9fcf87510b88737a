#include "runner.h"

#include "call.h"

namespace daf::vectors {

PlacedJob::PlacedJob(const Call& call, Slot planes, Slot headers) : call_(call) {
  const Parameters& given = call.given;
  const size_t plane_words = words_per_block * block_count(given.count);
  for (uint32_t plane = 0; plane < given.bits; ++plane)
    starts_[plane] = call.at<uint32_t>(planes) + plane * plane_words;
  job.count = given.count;
  job.bits = int(given.bits);
  job.planes = starts_;
  job.headers = call.at<uint16_t>(headers);
  job.key = given.key;
  job.thresholds = call.at<int8_t>(thresholds);
  job.levels = call.at<int8_t>(table);
  job.level_factor = given.low;
  job.predicate = Predicate(given.predicate);
  job.low = given.low;
  job.high = given.high;
  job.table = call.at<float>(table);
  job.item_bytes = int(given.item_bytes);
  job.base = given.base;
}

bool PlacedJob::run(Kernel kernel) {
  return run_blocks(paged(kernel), {0, block_count(job.count)}, call_.threads);
}

namespace {

bool encode(const Call& call, Kernel kernel) {
  PlacedJob placed(call, output, output_headers);
  placed.job.source = {call.at<void>(input), ElementType(call.given.type), call.affine()};
  return placed.run(kernel);
}

bool decode(const Call& call, Kernel kernel) {
  PlacedJob placed(call, input, headers);
  placed.job.target = {call.at<void>(output), ElementType(call.given.type), call.affine(),
                       call.given.accumulate != 0, call.buffers.stream};
  placed.job.mask = call.at<uint32_t>(mask);
  return placed.run(kernel);
}

bool run_operation(const Call& call) {
  const KernelTable& kernels = call.kernels;
  switch (Operation(call.given.operation)) {
    case Operation::encode_rotated: return encode(call, kernels.encode_rotated);
    case Operation::decode_rotated: return decode(call, kernels.decode_rotated);
    case Operation::encode_minmax: return encode(call, kernels.encode_minmax);
    case Operation::decode_minmax: return decode(call, kernels.decode_minmax);
    case Operation::encode_steps: return encode(call, kernels.encode_steps);
    case Operation::decode_steps: return decode(call, kernels.decode_steps);
    case Operation::encode_mask: return encode(call, kernels.encode_mask);
    case Operation::decode_mask: return decode(call, kernels.decode_mask);
    case Operation::encode_derivative: return encode(call, kernels.encode_derivative);
    case Operation::decode_derivative: return decode(call, kernels.decode_derivative);
    case Operation::encode_integers: return encode(call, kernels.encode_integers);
    case Operation::decode_integers: return decode(call, kernels.decode_integers);
    case Operation::emit: return emit(call);
    case Operation::sum_gradient: return sum_gradient(call);
    case Operation::write_gradient: return write_gradient(call);
    case Operation::emit_rows: return emit_rows(call);
    case Operation::row_gradient: return row_gradient(call);
  }
  return false;
}

}  // namespace

bool run_case(const Case& given, const Buffers& buffers, const KernelTable& kernels, int threads) {
  return run_operation(Call{given.parameters, buffers, kernels, threads});
}

}  // namespace daf::vectors
