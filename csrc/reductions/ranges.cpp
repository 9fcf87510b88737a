#include "reductions/ranges.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <new>

#include "reductions/fold.h"
#include "threads/threads.h"

namespace daf {
namespace {

constexpr uint32_t key_of_minus_infinity = 0x007FFFFF;
constexpr uint32_t key_of_infinity = 0xFF800000;

uint64_t lane_count(const RangesPlan& plan) { return plan.slots * slot_lanes; }
uint64_t row_width(const RangesPlan& plan) { return 2 * plan.channels.count; }
bool has_lanes(const RangesPlan& plan) { return plan.strategy != RangeStrategy::atomics; }
bool has_cells(const RangesPlan& plan) { return plan.strategy != RangeStrategy::tree; }

uint32_t key_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

float value_of(uint32_t key) {
  return std::bit_cast<float>(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}

// Most candidates raise nothing: reading a shared cell is cheap while nobody writes it.
void raise(std::atomic<uint32_t>& cell, uint32_t key) {
  uint32_t seen = cell.load(std::memory_order_relaxed);
  while (seen < key && !cell.compare_exchange_weak(seen, key, std::memory_order_relaxed)) {
  }
}

void fold_slots(uint64_t slots, const uint32_t* lanes, uint32_t* half) {
  for (uint64_t slot = 0; slot < slots; ++slot)
    half[slot] = *std::max_element(lanes + slot * slot_lanes, lanes + (slot + 1) * slot_lanes);
}

// The lanes of columns are whole rows of channels; the last may be shorter.
void fold_columns(uint64_t channels, uint64_t lane_count, const uint32_t* lanes, uint32_t* half) {
  for (uint64_t first = 0; first < lane_count; first += channels) {
    const uint64_t here = std::min(channels, lane_count - first);
    for (uint64_t c = 0; c < here; ++c) half[c] = std::max(half[c], lanes[first + c]);
  }
}

void fold_lanes(const RangesPlan& plan, const uint32_t* lanes, uint32_t* half) {
  std::fill_n(half, plan.channels.count, 0u);
  if (plan.channels.inner == 1)
    fold_columns(plan.channels.count, lane_count(plan), lanes, half);
  else
    fold_slots(plan.slots, lanes, half);
}

uint32_t* row_of(const MeasureRanges& job, size_t share) {
  return job.rows + share * row_width(job.plan);
}

void write_result(const MeasureRanges& job, uint64_t channel, uint32_t greatest, uint32_t least) {
  const bool broken = least < key_of_minus_infinity || greatest > key_of_infinity;
  const bool empty = greatest < least;
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  store_result(job.least, channel, empty ? infinity : broken ? nan : value_of(least));
  store_result(job.greatest, channel, empty ? -infinity : broken ? nan : value_of(greatest));
}

}  // namespace

RangesPlan plan_ranges(uint64_t count, Channels channels, int threads, RangeStrategy strategy) {
  const size_t blocks = block_count(count);
  return {channels, slot_count(channels, count), blocks, useful_threads(blocks, threads), strategy};
}

// The strategy of least predicted time: tree pays for its serial stage, hybrid for raising every
// cell from every share, atomics for every element. The nanoseconds are measured (an EPYC core with
// AVX-512; 2^12 to 2^23 elements in 1 to 2^19 channels); thread scaling is modelled: tree below
// about ten threads, hybrid beyond, atomics where a thread has few elements a channel.
RangeStrategy cheapest_strategy(const RangesPlan& plan, uint64_t count) {
  constexpr double lane_ns = 0.45;    // clear a lane's accumulator and fold it
  constexpr double fold_ns = 0.5;     // one number of a row into another's
  constexpr double raise_ns = 5;      // one number of a row into a shared cell
  constexpr double element_ns = 0.2;  // an element into its lane, both ends
  constexpr double compare_ns = 8;    // an element with two shared cells, these not in L1
  const double shares = double(plan.shares), elements = double(count) / shares;
  const double lanes = element_ns * elements + lane_ns * 2 * double(lane_count(plan));
  const double tree = lanes + fold_ns * (shares - 1) * double(row_width(plan));
  const double hybrid = lanes + raise_ns * double(row_width(plan));
  const double atomics = compare_ns * elements;
  if (atomics < tree && atomics < hybrid) return RangeStrategy::atomics;
  return hybrid < tree ? RangeStrategy::hybrid : RangeStrategy::tree;
}

MeasureRanges lay_out(const RangesPlan& plan, uintptr_t address) {
  Workspace workspace(address);
  MeasureRanges job{{}, plan, nullptr, nullptr, nullptr, nullptr, nullptr, 0};
  if (has_cells(plan)) job.cells = workspace.take<std::atomic<uint32_t>>(row_width(plan));
  if (has_lanes(plan)) {
    job.lanes = workspace.take<uint32_t>(plan.shares * 2 * lane_count(plan));
    job.rows = workspace.take<uint32_t>(plan.shares * row_width(plan));
  }
  job.end = workspace.end();
  return job;
}

void clear_cells(const MeasureRanges& job) {
  if (!has_cells(job.plan)) return;
  for (uint64_t i = 0; i < row_width(job.plan); ++i) new (job.cells + i) std::atomic<uint32_t>(0);
}

RangeLanes begin_share(const MeasureRanges& job, size_t share) {
  const uint64_t lanes = lane_count(job.plan);
  uint32_t* first = job.lanes + share * 2 * lanes;
  std::fill_n(first, 2 * lanes, 0u);
  return {first, first + lanes};
}

void finish_share(const MeasureRanges& job, size_t share) {
  const uint64_t lanes = lane_count(job.plan);
  const uint32_t* first = job.lanes + share * 2 * lanes;
  uint32_t* row = row_of(job, share);
  fold_lanes(job.plan, first, row);
  fold_lanes(job.plan, first + lanes, row + job.plan.channels.count);
  if (job.plan.strategy != RangeStrategy::hybrid) return;
  for (uint64_t i = 0; i < row_width(job.plan); ++i) raise(job.cells[i], row[i]);
}

void raise_cells(const MeasureRanges& job, const float* row, uint64_t first, size_t valid) {
  const Channels channels = job.plan.channels;
  uint64_t channel = first / channels.inner % channels.count, within = first % channels.inner;
  for (size_t i = 0; i < valid; ++i) {
    const uint32_t key = key_of(row[i]);
    raise(job.cells[channel], key);
    raise(job.cells[channels.count + channel], ~key);
    if (++within < channels.inner) continue;
    within = 0;
    if (++channel == channels.count) channel = 0;
  }
}

void finish_ranges(const MeasureRanges& job) {
  const uint64_t channels = job.plan.channels.count;
  if (!has_cells(job.plan))
    fold_rows(job.rows, job.plan.shares, row_width(job.plan),
              [](uint32_t a, uint32_t b) { return std::max(a, b); });
  for (uint64_t c = 0; c < channels; ++c) {
    const bool shared = has_cells(job.plan);
    const uint32_t greatest = shared ? job.cells[c].load() : job.rows[c];
    const uint32_t complement = shared ? job.cells[channels + c].load() : job.rows[channels + c];
    write_result(job, c, greatest, ~complement);
  }
}

}  // namespace daf
