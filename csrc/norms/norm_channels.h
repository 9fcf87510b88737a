// What a normalisation computes of its channels' sums: docs/format.md, section 10. A few numbers
// a channel, without lanes: compiled once, for every processor.
#pragma once

#include <cstdint>

namespace daf {

// `sums` and `squares` hold `count` elements of each channel. Where `running_mean` is not null,
// running statistics follow.
struct ChannelStatistics {
  const double *sums, *squares;
  uint64_t channels, count;
  double epsilon;
  float *mean, *inverse_deviation;
  float *running_mean, *running_variance;
  double momentum;
};

// `gamma` may be null. Value and gradient are multiplied by these in the input's gradient;
// `of_gamma` and `of_beta` receive the gradients of these, unless they are null.
struct ChannelFactors {
  const double *sums, *products;
  uint64_t channels, count;
  const float *inverse_deviation, *gamma;
  float *value_scale, *value_shift, *gradient_scale;
  float *of_gamma, *of_beta;
};

void finish_statistics(const ChannelStatistics& job);
void finish_factors(const ChannelFactors& job);

}  // namespace daf
