// Python bindings of the kernels: raw addresses, no Python objects touched while one runs.
// daf/kernels/cpu/*.py check every argument.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/records.h"
#include "instruction_sets/dispatch.h"
#include "norms/norm_channels.h"
#include "norms/rows.h"
#include "reductions/ranges.h"
#include "threads/passes.h"
#include "threads/threads.h"

namespace nb = nanobind;

namespace daf {
namespace {

// Larger results bypass the caches: they would leave them before being read.
constexpr uint64_t stream_from_bytes = 8 << 20;

const KernelTable& table_named(const std::string& name) {
  const KernelTable* table = name.empty() ? available_tables().front() : find_table(name);
  if (!table) throw nb::value_error("no such instruction set on this processor");
  return *table;
}

// The target holds the elements of `blocks` only.
void place_target(Job& job, Extent blocks) {
  job.target.type = job.source.type;
  auto* data = static_cast<char*>(job.target.data);
  const size_t item = job.item_bytes ? job.item_bytes : element_bytes(job.target.type);
  job.target.data = origin(data, blocks.first, block_elements * item);
  const uint64_t written_bytes = (blocks.last - blocks.first) * block_elements * sizeof(float);
  job.target.stream = !job.target.accumulate && written_bytes >= stream_from_bytes;
  job.emission.stream = job.count * sizeof(float) >= stream_from_bytes;
}

Call read_call(const nb::tuple& record) {
  Call call;
  call.blocks.last = block_count(nb::cast<uint64_t>(record[1]));
  Fields from(record);
  read_record(from, call);
  place_target(call.paged.job, call.blocks);
  return call;
}

Sums sums_of(const Call& call) {
  const SumsPlan plan = plan_sums(call.paged.job.count, call.channels, call.threads);
  const auto workspace = reinterpret_cast<uintptr_t>(call.workspace);
  return lay_out(plan, workspace, call.sums.sums, call.sums.squares);
}

MeasureRows rows_of(const Call& call) {
  const Source& source = call.paged.job.source;
  return {static_cast<const float*>(source.data),
          source.affine.inner,
          call.moments.epsilon,
          call.moments.centred,
          const_cast<float*>(source.affine.scale),
          const_cast<float*>(source.affine.shift)};
}

bool run(Call& call, const KernelTable& table) {
  const nb::gil_scoped_release release;
  if (call.paged.job.row_gradient.length) return run_row_gradient(call.paged, call.threads);
  if (call.sums.sums) return run_summing(call.paged, sums_of(call));
  if (call.moments.epsilon < 0) return run_blocks(call.paged, call.blocks, call.threads);
  call.paged.job.source.affine.growing = true;
  return run_rows(call.paged, rows_of(call), table, call.threads);
}

template <Kernel KernelTable::* kernel, bool has_headers = false>
bool run_kernel(const std::string& set, const nb::tuple& record) {
  Call call = read_call(record);
  const KernelTable& table = table_named(set);
  call.paged.kernel = table.*kernel;
  call.paged.has_headers = has_headers;
  return run(call, table);
}

RangesPlan plan_of(uint64_t count, uint64_t channels, uint64_t inner, int threads, int strategy) {
  return plan_ranges(count, columns(channels, inner), threads, RangeStrategy(strategy));
}

int range_strategy(uint64_t count, uint64_t channels, uint64_t inner, int threads) {
  return int(cheapest_strategy(plan_of(count, channels, inner, threads, 0), count));
}

uint64_t ranges_workspace_bytes(uint64_t count, uint64_t channels, uint64_t inner, int threads,
                                int strategy) {
  return workspace_bytes(plan_of(count, channels, inner, threads, strategy));
}

uint64_t sums_workspace_bytes(uint64_t count, uint64_t channels, uint64_t inner, int threads) {
  return workspace_bytes(plan_sums(count, columns(channels, inner), threads));
}

void measure_ranges(const std::string& set, const nb::tuple& record, uintptr_t least,
                    uintptr_t greatest, int strategy) {
  const Call call = read_call(record);
  const RangesPlan plan =
      plan_ranges(call.paged.job.count, call.channels, call.threads, RangeStrategy(strategy));
  MeasureRanges job = lay_out(plan, reinterpret_cast<uintptr_t>(call.workspace));
  job.elements = call.paged.job;
  job.least = reinterpret_cast<float*>(least);
  job.greatest = reinterpret_cast<float*>(greatest);
  const auto kernel = table_named(set).measure_ranges;
  const nb::gil_scoped_release release;
  clear_cells(job);
  run_shares([&](size_t first, size_t last) { return kernel(job, first, last); }, job.plan.shares);
  finish_ranges(job);
}

// (sums, squares, mean, inverse deviation), then daf.kernels.normalisation.RunningStatistics or
// None.
void statistics_of_sums(uint64_t channels, uint64_t count, double epsilon, const nb::tuple& where,
                        nb::object running) {
  ChannelStatistics job{};
  job.channels = channels;
  job.count = count;
  job.epsilon = epsilon;
  Fields(where).read(job.sums, job.squares, job.mean, job.inverse_deviation);
  if (!running.is_none())
    Fields(nb::cast<nb::tuple>(running)).read(job.running_mean, job.running_variance, job.momentum);
  finish_statistics(job);
}

// (sums, products, inverse deviation, gamma, value scale, value shift, gradient scale, of gamma, of
// beta); None for no gamma and what is not wanted.
void factors_of_sums(uint64_t channels, uint64_t count, const nb::tuple& where) {
  ChannelFactors job{};
  job.channels = channels;
  job.count = count;
  Fields(where).read(job.sums, job.products, job.inverse_deviation, job.gamma, job.value_scale,
                     job.value_shift, job.gradient_scale, job.of_gamma, job.of_beta);
  finish_factors(job);
}

uint64_t rows_workspace_bytes(uint64_t count, uint64_t length, int threads) {
  return workspace_bytes(plan_rows(count, length, threads));
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
  return names;
}

// For benchmarks: the KernelTable of one instruction set; 0 if it is not available.
uintptr_t kernel_table(const std::string& set) {
  return reinterpret_cast<uintptr_t>(find_table(set));
}

}  // namespace

void bind_kernels(nb::module_& module) {
  module.def("instruction_sets", &instruction_sets);
  module.def("kernel_table", &kernel_table);
  module.attr("KERNEL_TABLE_BYTES") = sizeof(KernelTable);
  module.def("encode_rotated", &run_kernel<&KernelTable::encode_rotated, true>);
  module.def("decode_rotated", &run_kernel<&KernelTable::decode_rotated, true>);
  module.def("encode_minmax", &run_kernel<&KernelTable::encode_minmax, true>);
  module.def("decode_minmax", &run_kernel<&KernelTable::decode_minmax, true>);
  module.def("encode_steps", &run_kernel<&KernelTable::encode_steps>);
  module.def("decode_steps", &run_kernel<&KernelTable::decode_steps>);
  module.def("encode_mask", &run_kernel<&KernelTable::encode_mask>);
  module.def("decode_mask", &run_kernel<&KernelTable::decode_mask>);
  module.def("encode_derivative", &run_kernel<&KernelTable::encode_derivative>);
  module.def("decode_derivative", &run_kernel<&KernelTable::decode_derivative>);
  module.def("encode_integers", &run_kernel<&KernelTable::encode_integers>);
  module.def("decode_integers", &run_kernel<&KernelTable::decode_integers>);
  module.def("read_blocks", &run_kernel<&KernelTable::read_blocks>);
  module.def("copy_blocks", &run_kernel<&KernelTable::copy_blocks>);
  module.def("range_strategy", &range_strategy);
  module.def("ranges_workspace_bytes", &ranges_workspace_bytes);
  module.def("sums_workspace_bytes", &sums_workspace_bytes);
  module.def("rows_workspace_bytes", &rows_workspace_bytes);
  module.def("measure_ranges", &measure_ranges);
  module.def("statistics_of_sums", &statistics_of_sums, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none());
  module.def("factors_of_sums", &factors_of_sums);
}

}  // namespace daf
