// Python's way to a normalisation's forward without a code, and to its backward;
// daf/kernels/cpu/channel_norm.py is the only caller and has checked every argument. Its forward
// with a code is an encoder's (pages_bind.cpp).

#include "bindings/bindings.h"

#include <nanobind/stl/string.h>

#include "bindings/job_arguments.h"
#include "bindings/norm_arguments.h"
#include "bindings/row_arguments.h"
#include "norms/norm_channels.h"

namespace nb = nanobind;

namespace daf {
namespace {

// (gradient, destination, of_value, of_gradient, sums): with sums the first pass, else the second.
template <class Job>
void run_gradient(Job job, Kernel<Job> kernel, const nb::tuple& fields, uint64_t count,
                  int threads) {
  const auto tuple = [&](int i) { return nb::cast<nb::tuple>(fields[i]); };
  const NormGradient gradient{at<const float>(nb::cast<uintptr_t>(fields[0])),
                              at<float>(nb::cast<uintptr_t>(fields[1])), make_affine(tuple(2)),
                              make_affine(tuple(3)), nullptr};
  target_of(job).count = count;
  target_of(job).gradient = &gradient;
  if (tuple(4).size() == 0) {
    run(job, kernel, count, threads);
    return;
  }
  const Sums sums = make_sums(tuple(4), count, threads);
  const nb::gil_scoped_release release;
  sum_gradient(job, kernel, gradient, sums);
}

void emit(const std::string& set, uintptr_t source, uint64_t count, int threads,
          const nb::tuple& affine, const nb::tuple& passing, const nb::tuple& mask,
          const nb::tuple& rows) {
  const Emission emission = make_emission(passing, count);
  const Pages pages = make_pages(mask);
  ReadBlocks job{make_source(source, int(ElementType::float32), count, make_affine(affine, rows))};
  job.source.emission = &emission;
  const KernelTable& table = table_named(set);
  const Kernel<ReadBlocks> kernel = table.read_blocks;
  if (pages.runs)
    run_source<PagesJob<ReadBlocks>>({job, kernel, pages, pages}, do_pages<ReadBlocks>, job.source,
                                     rows, table, threads);
  else
    run_source(job, kernel, job.source, rows, table, threads);
}

// Blocks [first, last) of what `emit` wrote, from the same source again; they lie at `destination`.
void derive(const std::string& set, uintptr_t source, uint64_t count, int threads,
            const nb::tuple& affine, uintptr_t destination, const nb::tuple& result,
            const nb::tuple& mask, bool accumulate, size_t first, size_t last) {
  constexpr int type = int(ElementType::float32);
  const Pages pages = make_pages(mask);
  const CopyBlocks job{
      make_source(source, type, count, make_affine(affine)),
      make_target(destination, type, count, make_affine(result), 0, accumulate, {first, last})};
  const Kernel<CopyBlocks> kernel = table_named(set).copy_blocks;
  if (pages.runs)
    run_part<PagesJob<CopyBlocks>>({job, kernel, pages, pages}, do_pages<CopyBlocks>, {first, last},
                                   threads);
  else
    run_part(job, kernel, {first, last}, threads);
}

void backward_kept(const std::string& set, uintptr_t source, uint64_t count, int threads,
                   const nb::tuple& affine, const nb::tuple& gradient, const nb::tuple& mask) {
  const Pages pages = make_pages(mask);
  const CopyBlocks job{make_source(source, int(ElementType::float32), count, make_affine(affine)),
                       {}};
  const Kernel<CopyBlocks> kernel = table_named(set).copy_blocks;
  if (pages.runs)
    run_gradient<PagesJob<CopyBlocks>>({job, kernel, pages, pages}, do_pages<CopyBlocks>, gradient,
                                       count, threads);
  else
    run_gradient(job, kernel, gradient, count, threads);
}

void backward_rotated(const std::string& set, const nb::tuple& fields, int rounds, uint64_t key,
                      uintptr_t levels, float level_factor, uintptr_t shorter_levels,
                      float shorter_level_factor, int threads, const nb::tuple& gradient,
                      const nb::tuple& mask) {
  const Pages pages = make_pages(fields);
  const DecodeRotated job{
      {}, pages.kept, rounds, key, nullptr, nullptr, at<const int8_t>(levels), level_factor};
  run_gradient<PagesJob<DecodeRotated>>(
      {job, table_named(set).decode_rotated, pages, make_pages(mask),
       at<const int8_t>(shorter_levels), shorter_level_factor},
      do_pages<DecodeRotated>, gradient, pages.count, threads);
}

void backward_minmax(const std::string& set, const nb::tuple& fields, int threads,
                     const nb::tuple& gradient, const nb::tuple& mask) {
  const Pages pages = make_pages(fields);
  const DecodeMinmax job{{}, pages.bits, nullptr, nullptr};
  run_gradient<PagesJob<DecodeMinmax>>(
      {job, table_named(set).decode_minmax, pages, make_pages(mask)}, do_pages<DecodeMinmax>,
      gradient, pages.count, threads);
}

// (sums, squares, mean, inverse deviation), then (mean, variance, momentum) of running ones or
// nothing.
void statistics_of_sums(uint64_t channels, uint64_t count, double epsilon, const nb::tuple& where,
                        const nb::tuple& running) {
  const auto address = [](const nb::tuple& of, int i) { return nb::cast<uintptr_t>(of[i]); };
  ChannelStatistics job{at<const double>(address(where, 0)),
                        at<const double>(address(where, 1)),
                        channels,
                        count,
                        epsilon,
                        at<float>(address(where, 2)),
                        at<float>(address(where, 3)),
                        nullptr,
                        nullptr,
                        0};
  if (running.size() != 0) {
    job.running_mean = at<float>(address(running, 0));
    job.running_variance = at<float>(address(running, 1));
    job.momentum = nb::cast<double>(running[2]);
  }
  finish_statistics(job);
}

// daf.kernels.GradientFactors, in its order.
void factors_of_sums(uint64_t channels, uint64_t count, const nb::tuple& where) {
  const auto address = [&](int i) { return nb::cast<uintptr_t>(where[i]); };
  finish_factors({at<const double>(address(0)), at<const double>(address(1)), channels, count,
                  at<const float>(address(2)), at<const float>(address(3)), at<float>(address(4)),
                  at<float>(address(5)), at<float>(address(6)), at<float>(address(7)),
                  at<float>(address(8))});
}

}  // namespace

void bind_norm(nb::module_& parent) {
  nb::module_ module = parent.def_submodule("norm");
  module.def("emit", &emit);
  module.def("derive", &derive);
  module.def("backward_kept", &backward_kept);
  module.def("backward_rotated", &backward_rotated);
  module.def("backward_minmax", &backward_minmax);
  module.def("statistics_of_sums", &statistics_of_sums);
  module.def("factors_of_sums", &factors_of_sums);
}

}  // namespace daf
