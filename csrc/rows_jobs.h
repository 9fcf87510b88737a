// Encoders that measure rows before they read them, a cacheful at a time, so that the tensor comes
// from memory once. Only for files compiled for every processor.
#pragma once

#include <numeric>

#include "bind_jobs.h"
#include "rows.h"

namespace daf {

template <class Job>
struct RowsCall {
  const Job& job;
  Kernel<Job> kernel;
  const MeasureRows& rows;
  Kernel<MeasureRows> measure;
  RowsPlan plan;
};

// Rows that begin and end with a block, and stay in the caches meanwhile where that can be.
inline uint64_t rows_at_a_time(uint64_t length) {
  constexpr uint64_t cached_elements = 32 << 10;
  const uint64_t least = block_elements / std::gcd(block_elements, size_t(length));
  return std::max<uint64_t>(1, cached_elements / (least * length)) * least;
}

template <class Job>
bool run_rows_share(const RowsCall<Job>& call, size_t share) {
  const RowsPlan& plan = call.plan;
  const Extent spans = share_of(plan.spans, share, plan.shares);
  const uint64_t end = std::min(plan.rows, uint64_t(spans.last) * rows_per_span);
  const uint64_t step = rows_at_a_time(plan.length);
  bool good = true;
  for (uint64_t row = spans.first * rows_per_span; row < end; row += step) {
    const uint64_t last = std::min(end, row + step);
    call.measure(call.rows, row, last);
    const size_t first_block = row * plan.length / block_elements;
    good = call.kernel(call.job, first_block, block_count(last * plan.length)) && good;
  }
  return good;
}

// The rows of a source, whose affine is written first; `rows` is (epsilon, centred).
template <class Job>
bool run_rows(const Job& job, Kernel<Job> kernel, const Source& source, const nanobind::tuple& rows,
              const KernelTable& table, int threads) {
  const MeasureRows measured{
      static_cast<const float*>(source.data),  source.affine.inner,
      nanobind::cast<double>(rows[0]),         nanobind::cast<bool>(rows[1]),
      const_cast<float*>(source.affine.scale), const_cast<float*>(source.affine.shift)};
  const RowsCall<Job> call{job, kernel, measured, table.measure_rows,
                           plan_rows(source.count, measured.length, threads)};
  const nanobind::gil_scoped_release release;
  return run_shares(
      [](const void* opaque, size_t share, size_t) {
        return run_rows_share(*static_cast<const RowsCall<Job>*>(opaque), share);
      },
      &call, call.plan.shares);
}

// All blocks; where `rows` is not empty, their rows are measured on the way.
template <class Job>
bool run_source(const Job& job, Kernel<Job> kernel, const Source& source,
                const nanobind::tuple& rows, const KernelTable& table, int threads) {
  if (rows.size() == 0) return run(job, kernel, source.count, threads);
  return run_rows(job, kernel, source, rows, table, threads);
}

}  // namespace daf
