// Normalisations: what is done while blocks are coded, decoded or only read.
#include <vector>

#include "bindings/norm_arguments.h"
#include "call.h"

namespace daf::vectors {
namespace {

// Of the normalised values to the result, or the gradient's factor in the input's.
Affine second_affine(const Call& call) {
  return {call.given.second_channels, call.given.second_inner, call.at<const float>(second_scale),
          call.at<const float>(second_shift)};
}

Emission emission_of(const Call& call) {
  return {call.at<float>(result), second_affine(call), call.at<const float>(gradient),
          call.at<uint32_t>(result_mask), call.buffers.stream};
}

EncodeRotated rotated_encoder(const Call& call, const Source& source) {
  return {source,
          int(call.given.bits),
          int(call.given.rounds),
          call.given.key,
          call.at<uint32_t>(output),
          call.at<uint16_t>(output_headers),
          call.at<int8_t>(thresholds),
          call.at<int8_t>(table)};
}

EncodeMinmax minmax_encoder(const Call& call, const Source& source) {
  return {source, int(call.given.bits), call.given.key, call.at<uint32_t>(output),
          call.at<uint16_t>(output_headers)};
}

// Calls read(job, kernel) for what the codec makes of a source.
template <class Read>
bool with_reader(const Call& call, const Source& source, Read&& read) {
  switch (Codec(call.given.codec)) {
    case Codec::rotated: return read(rotated_encoder(call, source), call.kernels.encode_rotated);
    case Codec::minmax: return read(minmax_encoder(call, source), call.kernels.encode_minmax);
    default: return read(ReadBlocks{source}, call.kernels.read_blocks);
  }
}

// Calls write(job, kernel) for what the codec makes values of; the job's target is empty.
template <class Write>
bool with_writer(const Call& call, Write&& write) {
  Target target;
  target.count = call.given.count;
  target.mask = call.at<const uint32_t>(mask);
  switch (Codec(call.given.codec)) {
    case Codec::rotated:
      return write(
          DecodeRotated{target, int(call.given.bits), int(call.given.rounds), call.given.key,
                        call.at<uint32_t>(input), call.at<uint16_t>(headers),
                        call.at<int8_t>(table), call.given.low},
          call.kernels.decode_rotated);
    case Codec::minmax:
      return write(DecodeMinmax{target, int(call.given.bits), call.at<uint32_t>(input),
                                call.at<uint16_t>(headers)},
                   call.kernels.decode_minmax);
    default: return write(CopyBlocks{call.source(), target}, call.kernels.copy_blocks);
  }
}

// Workspaces are the standard library's: only the sanitizers watch them.
using Workspace = std::vector<uint8_t>;

uintptr_t address(Workspace& workspace) { return reinterpret_cast<uintptr_t>(workspace.data()); }

}  // namespace

bool emit(const Call& call) {
  const Emission emission = emission_of(call);
  Source source = call.source();
  source.emission = &emission;
  return with_reader(call, source,
                     [&](const auto& job, auto kernel) { return call.run(job, kernel); });
}

bool sum_gradient(const Call& call) {
  const Parameters& given = call.given;
  const Channels channels{given.second_channels,
                          given.second_channels == 1 ? 1 : given.second_inner};
  const SumsPlan plan = plan_sums(given.count, channels, call.threads);
  Workspace workspace(workspace_bytes(plan));
  const Sums all =
      lay_out(plan, address(workspace), call.at<double>(sums), call.at<double>(products));
  const NormGradient taken{call.at<const float>(gradient), call.at<float>(result), {}, {}};
  return with_writer(call, [&](const auto& job, auto kernel) {
    daf::sum_gradient(job, kernel, taken, all);
    return true;
  });
}

bool write_gradient(const Call& call) {
  const Affine of_value{call.given.second_channels, call.given.second_inner,
                        call.at<const float>(third_scale), call.at<const float>(third_shift)};
  const Affine of_gradient = second_affine(call);
  const NormGradient taken{call.at<const float>(gradient), call.at<float>(result), of_value,
                           of_gradient};
  return with_writer(call, [&](auto job, auto kernel) {
    job.target.gradient = &taken;
    return call.run(job, kernel);
  });
}

bool emit_rows(const Call& call) {
  const Parameters& given = call.given;
  const Emission emission = emission_of(call);
  const MeasureRows rows{
      call.at<const float>(input), given.inner,          given.epsilon,
      given.centred != 0,          call.at<float>(sums), call.at<float>(products)};
  Source source = call.source();
  source.affine = {given.count / given.inner, given.inner, rows.scale, rows.shift};
  source.emission = &emission;
  return with_reader(call, source, [&](const auto& job, auto kernel) {
    return read_rows(job, kernel, rows, call.kernels.measure_rows, given.count, call.threads);
  });
}

bool row_gradient(const Call& call) {
  const Parameters& given = call.given;
  const RowsPlan plan = plan_rows(given.count, given.second_inner, call.threads);
  Workspace workspace(workspace_bytes(plan));
  const RowSums all = lay_out(plan, address(workspace));
  const RowGradient taken{call.at<const float>(gradient), call.at<float>(result),
                          call.at<const float>(second_scale), call.at<const float>(third_scale),
                          given.centred != 0};
  return with_writer(call, [&](const auto& job, auto kernel) {
    take_row_gradient(job, kernel, taken, all, call.at<double>(sums), call.at<double>(products));
    return true;
  });
}

}  // namespace daf::vectors
