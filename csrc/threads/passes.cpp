#include "threads/passes.h"

#include <algorithm>
#include <numeric>

#include "norms/rows.h"
#include "threads/float_mode.h"
#include "threads/threads.h"

namespace daf {
namespace {

// All blocks, each share of them with a state of its own, which the job's `field` names.
template <class Whole, class Running>
bool run_in_shares(const PagedJob& job, const Whole& whole, Running* Job::* field) {
  return run_shares(
      [&](size_t share, size_t) {
        const Extent blocks = share_blocks(whole.plan, share);
        if (blocks.first >= blocks.last) return true;
        Running running = begin_share(whole, share);
        PagedJob mine = job;
        mine.job.*field = &running;
        const bool done = do_blocks(mine, blocks.first, blocks.last);
        finish_share(running);
        return done;
      },
      whole.plan.shares);
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
  const bool good = run_in_shares(job, sums, &Job::sums);
  const DefaultFloatMode mode;  // as on the threads
  finish_sums(sums);
  return good;
}

bool run_rows(const PagedJob& job, const MeasureRows& rows, const KernelTable& table, int threads) {
  const RowsPlan plan = plan_rows(job.job.count, rows.length, threads);
  const uint64_t step = rows_at_a_time(plan.length);
  return run_shares(
      [&](size_t share, size_t) {
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
  const bool good = run_in_shares(job, sums, &Job::running_rows);
  const DefaultFloatMode mode;  // as on the threads
  if (gradient.beta) finish_rows(sums, gradient.beta, gradient.of_gamma);
  return good;
}

}  // namespace daf
