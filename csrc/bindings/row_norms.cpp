// Python's way to the backward of a normalisation of rows; daf/kernels/cpu/row_norm.py is the only
// caller and has checked every argument. Its forward is an encoder's or an emission's
// (rows_jobs.h).

#include "bindings/bindings.h"

#include <nanobind/stl/string.h>

#include "bindings/job_arguments.h"
#include "bindings/norm_arguments.h"

namespace nb = nanobind;

namespace daf {
namespace {

// (length, centred, gradient, destination, gamma, scale, sums of beta, of gamma, workspace).
template <class Job>
void run_backward(Job job, Kernel<Job> kernel, const nb::tuple& fields, uint64_t count,
                  int threads) {
  const auto place = [&](int i) { return nb::cast<uintptr_t>(fields[i]); };
  const RowsPlan plan = plan_rows(count, nb::cast<uint64_t>(fields[0]), threads);
  const RowSums sums = lay_out(plan, place(8));
  const RowGradient gradient{at<const float>(place(2)), at<float>(place(3)),
                             at<const float>(place(4)), at<const float>(place(5)),
                             nb::cast<bool>(fields[1]), place(6) != 0};
  target_of(job).count = count;
  const nb::gil_scoped_release release;
  take_row_gradient(job, kernel, gradient, sums, at<double>(place(6)), at<double>(place(7)));
}

void backward_kept(const std::string& set, uintptr_t source, uint64_t count, int threads,
                   const nb::tuple& affine, const nb::tuple& gradient) {
  const CopyBlocks job{make_source(source, int(ElementType::float32), count, make_affine(affine)),
                       {}};
  run_backward(job, table_named(set).copy_blocks, gradient, count, threads);
}

void backward_rotated(const std::string& set, const nb::tuple& fields, int rounds, uint64_t key,
                      uintptr_t levels, float level_factor, uintptr_t shorter_levels,
                      float shorter_level_factor, int threads, const nb::tuple& gradient) {
  const Pages pages = make_pages(fields);
  const DecodeRotated job{
      {}, pages.kept, rounds, key, nullptr, nullptr, at<const int8_t>(levels), level_factor};
  run_backward<PagesJob<DecodeRotated>>({job,
                                         table_named(set).decode_rotated,
                                         pages,
                                         {},
                                         at<const int8_t>(shorter_levels),
                                         shorter_level_factor},
                                        do_pages<DecodeRotated>, gradient, pages.count, threads);
}

void backward_minmax(const std::string& set, const nb::tuple& fields, int threads,
                     const nb::tuple& gradient) {
  const Pages pages = make_pages(fields);
  const DecodeMinmax job{{}, pages.bits, nullptr, nullptr};
  run_backward<PagesJob<DecodeMinmax>>({job, table_named(set).decode_minmax, pages},
                                       do_pages<DecodeMinmax>, gradient, pages.count, threads);
}

uint64_t workspace_bytes_for(uint64_t count, uint64_t length, int threads) {
  return workspace_bytes(plan_rows(count, length, threads));
}

}  // namespace

void bind_rows(nb::module_& parent) {
  nb::module_ module = parent.def_submodule("rows");
  module.def("workspace_bytes", &workspace_bytes_for);
  module.def("backward_kept", &backward_kept);
  module.def("backward_rotated", &backward_rotated);
  module.def("backward_minmax", &backward_minmax);
}

}  // namespace daf
