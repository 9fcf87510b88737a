// A normalisation's few numbers a channel, compiled once: docs/format.md, section 10.
#pragma once

#include <cstdint>

namespace daf {

// Of `count` elements a channel; running statistics are updated unless `running_mean` is null.
struct ChannelStatistics {
  const double *sums, *squares;
  uint64_t channels, count;
  double epsilon;
  float *mean, *inverse_deviation;
  float *running_mean, *running_variance;
  double momentum;
};

// Factors of value and gradient in the input's gradient; `of_gamma` and `of_beta` receive the
// parameters' gradients unless null. `gamma` may be null.
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
