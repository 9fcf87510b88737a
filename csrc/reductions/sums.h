// Sums and squares for each channel, in an order that no split changes: docs/format.md, 8.
#pragma once

#include "arguments/channels.h"

namespace daf {

struct SumsPlan {
  Channels channels;
  uint64_t slots;
  size_t blocks, span_blocks, spans, shares;
};

struct Sums {
  SumsPlan plan;
  double *span_sums, *span_squares;    // spans × channels
  double *share_sums, *share_squares;  // shares × slots × lanes
  double *sums, *squares;              // the results, one for each channel
  uintptr_t end;                       // of the workspace
};

// The sums of one share's current span; blocks come in ascending order.
struct RunningSums {
  const Sums* whole;
  double *sums, *squares;  // slots × lanes
  size_t span;
};

SumsPlan plan_sums(uint64_t count, Channels channels, int threads);
Sums lay_out(const SumsPlan& plan, uintptr_t workspace, double* sums = nullptr,
             double* squares = nullptr);

// Spans are never split: a share ends where a span ends.
Extent share_blocks(const SumsPlan& plan, size_t share);
RunningSums begin_share(const Sums& whole, size_t share);
void enter_block(RunningSums& running, size_t block);
void finish_share(RunningSums& running);

// Writes the results, after all shares.
void finish_sums(const Sums& whole);

}  // namespace daf
