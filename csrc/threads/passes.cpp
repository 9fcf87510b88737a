#include "threads/passes.h"

#include <algorithm>
#include <numeric>

#include "norms/rows.h"
#include "threads/threads.h"

namespace daf {
namespace {

// The last stage of a reduction is a share too: it needs the same floating-point mode.
template <class Finish>
void run_alone(const Finish& finish) {
  run_shares(
      [&](size_t) {
        finish();
        return true;
      },
      1);
}

// Rows that begin and end with a block and, if possible, stay in the caches meanwhile.
uint64_t rows_at_a_time(uint64_t length) {
  constexpr uint64_t cached_elements = 32 << 10;
  const uint64_t least = block_elements / std::gcd(block_elements, size_t(length));
  return std::max<uint64_t>(1, cached_elements / (least * length)) * least;
}

}  // namespace

bool run_blocks(const PagedJob& job, Extent blocks, int threads) {
  return run_ranges(
      [&](size_t first, size_t last) {
        return do_blocks(job, blocks.first + first, blocks.first + last);
      },
      blocks.last - blocks.first, threads);
}

bool run_summing(const PagedJob& job, const Sums& sums) {
  const bool good = run_shares(
      [&](size_t share) {
        const Extent blocks = share_blocks(sums.plan, share);
        if (blocks.first >= blocks.last) return true;
        RunningSums running = begin_share(sums, share);
        PagedJob mine = job;
        mine.job.sums = &running;
        const bool done = do_blocks(mine, blocks.first, blocks.last);
        finish_share(running);
        return done;
      },
      sums.plan.shares);
  run_alone([&] { finish_sums(sums); });
  return good;
}

bool run_rows(const PagedJob& job, const MeasureRows& rows, const KernelTable& table, int threads) {
  const RowsPlan plan = plan_rows(job.job.count, rows.length, threads);
  const uint64_t step = rows_at_a_time(plan.length);
  return run_shares(
      [&](size_t share) {
        const Extent spans = share_of(plan.spans, share, plan.shares);
        const uint64_t end = std::min(plan.rows, uint64_t(spans.last) * rows_per_span);
        bool good = true;
        for (uint64_t row = spans.first * rows_per_span; row < end; row += step) {
          const uint64_t last = std::min(end, row + step);
          table.measure_rows(rows, row, last);
          const size_t first_block = row * plan.length / block_elements;
          good = do_blocks(job, first_block, block_count(last * plan.length)) && good;
        }
        return good;
      },
      plan.shares);
}

bool run_row_gradient(const PagedJob& job, int threads) {
  const RowGradient& gradient = job.job.row_gradient;
  const RowsPlan plan = plan_rows(job.job.count, gradient.length, threads);
  const RowSums sums = lay_out(plan, reinterpret_cast<uintptr_t>(gradient.workspace));
  const bool good = run_shares(
      [&](size_t share) {
        const Extent blocks = share_blocks(sums.plan, share);
        if (blocks.first >= blocks.last) return true;
        RunningRows running = begin_share(sums, share);
        PagedJob mine = job;
        mine.job.running_rows = &running;
        return do_blocks(mine, blocks.first, blocks.last);
      },
      sums.plan.shares);
  if (gradient.beta) run_alone([&] { finish_rows(sums, gradient.beta, gradient.of_gamma); });
  return good;
}

}  // namespace daf
