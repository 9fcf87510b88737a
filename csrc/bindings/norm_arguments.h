// Passes of a normalisation's backward over all blocks of a job, on threads, and forward passes
// that measure rows before they read them. Only for files compiled for every processor.
#pragma once

#include <numeric>

#include "arguments/pages.h"
#include "norms/rows.h"
#include "reductions/sums.h"
#include "threads/threads.h"

namespace daf {

template <class Job>
Target& target_of(Job& job) {
  return job.target;
}
template <class Job>
Target& target_of(PagesJob<Job>& job) {
  return job.job.target;
}

// --- channels: sums of the gradient and of its products -----------------------------------------

template <class Job>
struct SumsCall {
  const Job& job;
  Kernel<Job> kernel;
  const NormGradient& gradient;
  const Sums& sums;
};

template <class Job>
bool sum_share(const SumsCall<Job>& call, size_t share) {
  const Extent blocks = share_blocks(call.sums.plan, share);
  if (blocks.first >= blocks.last) return true;
  RunningSums running = begin_share(call.sums, share);
  NormGradient gradient = call.gradient;
  gradient.sums = &running;
  Job job = call.job;
  target_of(job).gradient = &gradient;
  const bool good = call.kernel(job, blocks.first, blocks.last);
  finish_share(running);
  return good;
}

template <class Job>
void sum_gradient(const Job& job, Kernel<Job> kernel, const NormGradient& gradient,
                  const Sums& sums) {
  const SumsCall<Job> call{job, kernel, gradient, sums};
  run_shares([](const void* opaque, size_t share,
                size_t) { return sum_share(*static_cast<const SumsCall<Job>*>(opaque), share); },
             &call, sums.plan.shares);
  run_shares(
      [](const void* opaque, size_t, size_t) {
        finish_sums(static_cast<const SumsCall<Job>*>(opaque)->sums);
        return true;
      },
      &call, 1);
}

// --- rows: forward ------------------------------------------------------------------------------

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
bool read_rows_share(const RowsCall<Job>& call, size_t share) {
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

// All blocks of a job whose source's affine the rows' statistics are.
template <class Job>
bool read_rows(const Job& job, Kernel<Job> kernel, const MeasureRows& rows,
               Kernel<MeasureRows> measure, uint64_t count, int threads) {
  const RowsCall<Job> call{job, kernel, rows, measure, plan_rows(count, rows.length, threads)};
  return run_shares(
      [](const void* opaque, size_t share, size_t) {
        return read_rows_share(*static_cast<const RowsCall<Job>*>(opaque), share);
      },
      &call, call.plan.shares);
}

// --- rows: backward -----------------------------------------------------------------------------

template <class Job>
struct RowGradientCall {
  const Job& job;
  Kernel<Job> kernel;
  const RowGradient& gradient;
  const RowSums& sums;
  double *beta, *gamma;
};

template <class Job>
bool row_gradient_share(const RowGradientCall<Job>& call, size_t share) {
  const Extent blocks = share_blocks(call.sums.plan, share);
  if (blocks.first >= blocks.last) return true;
  RunningRows running = begin_share(call.sums, share);
  RowGradient gradient = call.gradient;
  gradient.running = &running;
  Job job = call.job;
  target_of(job).rows = &gradient;
  return call.kernel(job, blocks.first, blocks.last);
}

// `beta` and `gamma` receive the sums along the rows' places, unless the gradient wants none.
template <class Job>
void take_row_gradient(const Job& job, Kernel<Job> kernel, const RowGradient& gradient,
                       const RowSums& sums, double* beta, double* gamma) {
  const RowGradientCall<Job> call{job, kernel, gradient, sums, beta, gamma};
  run_shares(
      [](const void* opaque, size_t share, size_t) {
        return row_gradient_share(*static_cast<const RowGradientCall<Job>*>(opaque), share);
      },
      &call, sums.plan.shares);
  if (!gradient.sums) return;
  run_shares(
      [](const void* opaque, size_t, size_t) {
        const auto& all = *static_cast<const RowGradientCall<Job>*>(opaque);
        finish_rows(all.sums, all.beta, all.gamma);
        return true;
      },
      &call, 1);
}

}  // namespace daf
