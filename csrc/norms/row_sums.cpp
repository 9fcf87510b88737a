#include "norms/rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "arguments/job.h"
#include "reductions/fold.h"
#include "threads/threads.h"

namespace daf {
namespace {

size_t values_room(const RowsPlan& plan) { return padded_length(plan) + block_elements; }

void finish(const RowsPlan& plan, const float* spans, double* results) {
  const uint64_t width = padded_length(plan);
  for (uint64_t i = 0; i < plan.length; ++i) {
    double sum = 0.0;
    for (size_t span = 0; span < plan.spans; ++span) sum += spans[span * width + i];
    store_result(results, i, std::isnan(sum) ? std::numeric_limits<double>::quiet_NaN() : sum);
  }
}

}  // namespace

uint64_t padded_length(const RowsPlan& plan) {
  return (plan.length + slot_lanes - 1) / slot_lanes * slot_lanes;
}

RowsPlan plan_rows(uint64_t count, uint64_t length, int threads) {
  const uint64_t rows = count / length;
  const size_t spans = (rows + rows_per_span - 1) / rows_per_span;
  return {length, rows, spans,
          std::max<size_t>(1, std::min(spans, useful_threads(block_count(count), threads)))};
}

RowSums lay_out(const RowsPlan& plan, uintptr_t address) {
  Workspace workspace(address);
  const uint64_t partial = plan.spans * padded_length(plan);
  RowSums whole{plan, nullptr, nullptr, nullptr, 0};
  whole.beta = workspace.take<float>(partial);
  whole.gamma = workspace.take<float>(partial);
  whole.values = workspace.take<float>(plan.shares * values_room(plan));
  whole.end = workspace.end();
  return whole;
}

Extent share_blocks(const RowsPlan& plan, size_t share) {
  const Extent spans = share_of(plan.spans, share, plan.shares);
  const size_t blocks = block_count(plan.rows * plan.length);
  return {spans.first * plan.length, std::min(blocks, size_t(spans.last * plan.length))};
}

RunningRows begin_share(const RowSums& whole, size_t share) {
  const Extent spans = share_of(whole.plan.spans, share, whole.plan.shares);
  const uint64_t width = padded_length(whole.plan);
  for (float* sums : {whole.beta, whole.gamma})
    std::fill(sums + spans.first * width, sums + spans.last * width, 0.0f);
  float* values = whole.values + share * values_room(whole.plan);
  return {&whole, values, 0, spans.first * rows_per_span};
}

void finish_rows(const RowSums& whole, double* beta, double* gamma) {
  finish(whole.plan, whole.beta, beta);
  finish(whole.plan, whole.gamma, gamma);
}

}  // namespace daf
