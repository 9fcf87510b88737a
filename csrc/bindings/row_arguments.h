// Encoders and emissions whose rows are measured on the way, from Python's numbers.
// Only for files compiled for every processor.
#pragma once

#include "bindings/job_arguments.h"
#include "bindings/norm_arguments.h"

namespace daf {

// All blocks; where `rows`, (epsilon, centred), is not empty, the source's affine is written before
// it is read.
template <class Job>
bool run_source(const Job& job, Kernel<Job> kernel, const Source& source,
                const nanobind::tuple& rows, const KernelTable& table, int threads) {
  if (rows.size() == 0) return run(job, kernel, source.count, threads);
  const MeasureRows measured{
      static_cast<const float*>(source.data),  source.affine.inner,
      nanobind::cast<double>(rows[0]),         nanobind::cast<bool>(rows[1]),
      const_cast<float*>(source.affine.scale), const_cast<float*>(source.affine.shift)};
  const nanobind::gil_scoped_release release;
  return read_rows(job, kernel, measured, table.measure_rows, source.count, threads);
}

}  // namespace daf
