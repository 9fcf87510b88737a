// Python's way to the reductions; daf/kernels/cpu/reductions.py is the only caller.

#include "bindings/bindings.h"

#include <nanobind/stl/string.h>

#include "bindings/job_arguments.h"
#include "reductions/ranges.h"

namespace nb = nanobind;

namespace daf {
namespace {

// A negative strategy leaves the choice to the rule.
RangesPlan make_ranges_plan(uint64_t count, uint64_t channels, uint64_t inner, int threads,
                            int strategy) {
  const Channels geometry = make_channels(channels, inner);
  return strategy < 0 ? plan_ranges(count, geometry, threads)
                      : plan_ranges(count, geometry, threads, RangeStrategy(strategy));
}

int range_strategy(uint64_t count, uint64_t channels, uint64_t inner, int threads) {
  return int(make_ranges_plan(count, channels, inner, threads, -1).strategy);
}

uint64_t ranges_workspace_bytes(uint64_t count, uint64_t channels, uint64_t inner, int threads,
                                int strategy) {
  return workspace_bytes(make_ranges_plan(count, channels, inner, threads, strategy));
}

uint64_t sums_workspace_bytes(uint64_t count, uint64_t channels, uint64_t inner, int threads) {
  return workspace_bytes(plan_sums(count, make_channels(channels, inner), threads));
}

void measure_ranges(const std::string& set, uintptr_t source, int type, uint64_t count,
                    uint64_t channels, uint64_t inner, uintptr_t least, uintptr_t greatest,
                    uintptr_t workspace, int threads, int strategy) {
  MeasureRanges job =
      lay_out(make_ranges_plan(count, channels, inner, threads, strategy), workspace);
  job.source = make_source(source, type, count, {});
  job.least = at<float>(least);
  job.greatest = at<float>(greatest);
  const Call<MeasureRanges> call{job, table_named(set).measure_ranges, 0};
  const nb::gil_scoped_release release;
  clear_cells(job);
  run_shares(
      [](const void* opaque, size_t first, size_t last) {
        const auto& here = *static_cast<const Call<MeasureRanges>*>(opaque);
        return here.kernel(here.job, first, last);
      },
      &call, job.plan.shares);
  finish_ranges(job);
}

void measure_sums(const std::string& set, uintptr_t source, int type, uint64_t count,
                  const nb::tuple& sums, int threads) {
  const ReadBlocks job{make_source(source, type, count, {})};
  run_summing(job, table_named(set).read_blocks, make_sums(sums, count, threads));
}

}  // namespace

void bind_measure(nb::module_& module) {
  module.def("range_strategy", &range_strategy);
  module.def("ranges_workspace_bytes", &ranges_workspace_bytes);
  module.def("sums_workspace_bytes", &sums_workspace_bytes);
  module.def("measure_ranges", &measure_ranges);
  module.def("measure_sums", &measure_sums);
}

}  // namespace daf
