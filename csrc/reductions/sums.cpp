#include "reductions/sums.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "arguments/job.h"
#include "reductions/fold.h"
#include "threads/threads.h"

namespace daf {
namespace {

constexpr size_t least_span_blocks = 16;
// A share's accumulators cost a fourth of a span's elements: at most 6 %.
constexpr size_t least_spans_per_share = 4;

uint64_t lane_count(const SumsPlan& plan) { return plan.slots * slot_lanes; }

// One channel's sixteen accumulators; missing ones are 0.
void gather_lanes(const SumsPlan& plan, const double* all, uint64_t channel,
                  double (&lane)[slot_lanes]) {
  std::fill(lane, lane + slot_lanes, 0.0);
  if (plan.channels.inner == 1) {
    for (uint64_t i = channel; i < lane_count(plan); i += plan.channels.count)
      lane[i % slot_lanes] = all[i];
  } else if (channel < plan.slots) {
    std::copy_n(all + channel * slot_lanes, slot_lanes, lane);
  }
}

void close_span(const SumsPlan& plan, double* lanes, double* row) {
  const uint64_t channels = plan.channels.count;
  if (plan.channels.inner == 1 && channels % slot_lanes == 0) {  // one accumulator each
    const uint64_t reached = std::min(channels, lane_count(plan));
    std::fill(std::copy_n(lanes, reached, row), row + channels, 0.0);
  } else {
    for (uint64_t channel = 0; channel < channels; ++channel) {
      double lane[slot_lanes];
      gather_lanes(plan, lanes, channel, lane);
      fold_rows(lane, slot_lanes, 1, std::plus<double>());
      row[channel] = lane[0];
    }
  }
  std::fill_n(lanes, lane_count(plan), 0.0);
}

void finish(const SumsPlan& plan, double* rows, double* results) {
  const uint64_t channels = plan.channels.count;
  fold_rows(rows, plan.spans, channels, std::plus<double>());
  for (uint64_t c = 0; c < channels; ++c) {
    const double sum = plan.spans == 0 ? 0.0 : rows[c];
    store_result(results, c, std::isnan(sum) ? std::numeric_limits<double>::quiet_NaN() : sum);
  }
}

}  // namespace

SumsPlan plan_sums(uint64_t count, Channels channels, int threads) {
  SumsPlan plan{channels, slot_count(channels, count), block_count(count), 0, 0, 0};
  plan.span_blocks = std::bit_ceil(std::max(least_span_blocks, size_t(channels.count)));
  plan.spans = (plan.blocks + plan.span_blocks - 1) / plan.span_blocks;
  const size_t most = std::max<size_t>(1, plan.spans / least_spans_per_share);
  plan.shares = std::min(most, useful_threads(plan.blocks, threads));
  return plan;
}

Sums lay_out(const SumsPlan& plan, uintptr_t address, double* sums, double* squares) {
  Workspace workspace(address);
  const uint64_t partial = plan.spans * plan.channels.count;
  const uint64_t lanes = plan.shares * lane_count(plan);
  Sums whole{plan, nullptr, nullptr, nullptr, nullptr, sums, squares, 0};
  whole.span_sums = workspace.take<double>(partial);
  whole.span_squares = workspace.take<double>(partial);
  whole.share_sums = workspace.take<double>(lanes);
  whole.share_squares = workspace.take<double>(lanes);
  whole.end = workspace.end();
  return whole;
}

Extent share_blocks(const SumsPlan& plan, size_t share) {
  const Extent spans = share_of(plan.spans, share, plan.shares);
  return {spans.first * plan.span_blocks, std::min(plan.blocks, spans.last * plan.span_blocks)};
}

RunningSums begin_share(const Sums& whole, size_t share) {
  const uint64_t lanes = lane_count(whole.plan);
  double* sums = whole.share_sums + share * lanes;
  double* squares = whole.share_squares + share * lanes;
  std::fill_n(sums, lanes, 0.0);
  std::fill_n(squares, lanes, 0.0);
  return {&whole, sums, squares, share_blocks(whole.plan, share).first / whole.plan.span_blocks};
}

void finish_share(RunningSums& running) {
  const Sums& whole = *running.whole;
  const uint64_t row = running.span * whole.plan.channels.count;
  close_span(whole.plan, running.sums, whole.span_sums + row);
  close_span(whole.plan, running.squares, whole.span_squares + row);
}

void enter_block(RunningSums& running, size_t block) {
  const size_t span = block / running.whole->plan.span_blocks;
  if (span == running.span) return;
  finish_share(running);
  running.span = span;
}

void finish_sums(const Sums& whole) {
  finish(whole.plan, whole.span_sums, whole.sums);
  finish(whole.plan, whole.span_squares, whole.squares);
}

}  // namespace daf
