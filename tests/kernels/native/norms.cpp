// Normalisations: what is done while blocks are coded, decoded or only read.
#include <vector>

#include "call.h"
#include "norms/rows.h"

namespace daf::vectors {
namespace {

// Of the normalised values to the result, or the gradient's factor in the input's.
Affine second_affine(const Call& call) {
  return {call.given.second_channels, call.given.second_inner, call.at<const float>(second_scale),
          call.at<const float>(second_shift)};
}

// What codes a source, or only reads it; `affine` makes the values of it.
class Reader : public PlacedJob {
 public:
  Reader(const Call& call, const Affine& affine) : PlacedJob(call, output, output_headers) {
    job.source = {call.at<void>(input), ElementType(call.given.type), affine};
    job.emission.destination = call.at<float>(result);
    job.emission.addend = call.at<const float>(gradient);
    job.emission.affine = second_affine(call);
    job.emission.stream = call.buffers.stream;
    job.mask = call.at<uint32_t>(result_mask);
  }
};

Kernel reading_kernel(const Call& call) {
  switch (Codec(call.given.codec)) {
    case Codec::rotated: return call.kernels.encode_rotated;
    case Codec::minmax: return call.kernels.encode_minmax;
    default: return call.kernels.read_blocks;
  }
}

// What makes values of a code, or of what was kept; nothing is written of them.
class Writer : public PlacedJob {
 public:
  explicit Writer(const Call& call) : PlacedJob(call, input, headers) {
    job.mask = call.at<uint32_t>(mask);
    if (Codec(call.given.codec) == Codec::kept)
      job.source = {call.at<void>(input), ElementType(call.given.type), call.affine()};
  }
};

Kernel writing_kernel(const Call& call) {
  switch (Codec(call.given.codec)) {
    case Codec::rotated: return call.kernels.decode_rotated;
    case Codec::minmax: return call.kernels.decode_minmax;
    default: return call.kernels.copy_blocks;
  }
}

// Workspaces are the standard library's: only the sanitizers watch them.
using Workspace = std::vector<uint8_t>;

uintptr_t address(Workspace& workspace) { return reinterpret_cast<uintptr_t>(workspace.data()); }

}  // namespace

bool emit(const Call& call) { return Reader(call, call.affine()).run(reading_kernel(call)); }

bool sum_gradient(const Call& call) {
  const Parameters& given = call.given;
  const Channels channels{given.second_channels,
                          given.second_channels == 1 ? 1 : given.second_inner};
  const SumsPlan plan = plan_sums(given.count, channels, call.threads);
  Workspace workspace(workspace_bytes(plan));
  Writer writer(call);
  writer.job.gradient = {call.at<const float>(gradient), call.at<float>(result), {}, {}};
  return run_summing(
      writer.paged(writing_kernel(call)),
      lay_out(plan, address(workspace), call.at<double>(sums), call.at<double>(products)));
}

bool write_gradient(const Call& call) {
  const Affine of_value{call.given.second_channels, call.given.second_inner,
                        call.at<const float>(third_scale), call.at<const float>(third_shift)};
  Writer writer(call);
  writer.job.gradient = {call.at<const float>(gradient), call.at<float>(result), of_value,
                         second_affine(call)};
  return writer.run(writing_kernel(call));
}

bool emit_rows(const Call& call) {
  const Parameters& given = call.given;
  const MeasureRows rows{
      call.at<const float>(input), given.inner,          given.epsilon,
      given.centred != 0,          call.at<float>(sums), call.at<float>(products)};
  const Affine affine{given.count / given.inner, given.inner, rows.scale, rows.shift, true};
  Reader reader(call, affine);
  return run_rows(reader.paged(reading_kernel(call)), rows, call.kernels, call.threads);
}

bool row_gradient(const Call& call) {
  const Parameters& given = call.given;
  Workspace workspace(workspace_bytes(plan_rows(given.count, given.second_inner, call.threads)));
  Writer writer(call);
  writer.job.row_gradient = {given.second_inner,
                             given.centred != 0,
                             call.at<const float>(gradient),
                             call.at<float>(result),
                             call.at<const float>(second_scale),
                             call.at<const float>(third_scale),
                             call.at<double>(sums),
                             call.at<double>(products),
                             workspace.data()};
  return run_row_gradient(writer.paged(writing_kernel(call)), call.threads);
}

}  // namespace daf::vectors
