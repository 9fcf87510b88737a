#include "norms/norm_channels.h"

#include <cmath>
#include <limits>

#include "threads/float_mode.h"

namespace daf {
namespace {

float rounded(double value) {
  return value == value ? float(value) : std::numeric_limits<float>::quiet_NaN();
}

// In float32, as PyTorch multiplies a tensor by a number and adds another tensor.
void follow(float& running, float kept, double share) {
  running = rounded(running * kept + rounded(share));
}

}  // namespace

void finish_statistics(const ChannelStatistics& job) {
  const DefaultFloatMode mode;
  const double count = double(job.count), unbiased = count / (count - 1);
  const float kept = float(1 - job.momentum);
  for (uint64_t c = 0; c < job.channels; ++c) {
    const double mean = job.sums[c] / count;
    const double found = job.squares[c] / count - mean * mean;
    const double variance = found < 0 ? 0 : found;
    job.mean[c] = rounded(mean);
    job.inverse_deviation[c] = rounded(1 / std::sqrt(variance + job.epsilon));
    if (!job.running_mean) continue;
    follow(job.running_mean[c], kept, job.momentum * mean);
    follow(job.running_variance[c], kept, job.momentum * (variance * unbiased));
  }
}

void finish_factors(const ChannelFactors& job) {
  const DefaultFloatMode mode;
  const double count = double(job.count);
  for (uint64_t c = 0; c < job.channels; ++c) {
    double factor = job.inverse_deviation[c];
    if (job.gamma) factor *= job.gamma[c];
    job.value_scale[c] = rounded(-factor * job.products[c] / count);
    job.value_shift[c] = rounded(-factor * job.sums[c] / count);
    job.gradient_scale[c] = rounded(factor);
    if (job.of_gamma) job.of_gamma[c] = rounded(job.products[c]);
    if (job.of_beta) job.of_beta[c] = rounded(job.sums[c]);
  }
}

}  // namespace daf
