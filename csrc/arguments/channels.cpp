#include "arguments/channels.h"

#include <algorithm>
#include <numeric>

namespace daf {

uint64_t slot_count(Channels channels, uint64_t elements) {
  const uint64_t used =
      channels.inner == 1 ? channels.count / std::gcd(channels.count, slot_lanes) : channels.count;
  const uint64_t run = channels.inner == 1 ? slot_lanes : channels.inner;
  const uint64_t reached = elements / run + (elements % run != 0);
  return std::max<uint64_t>(1, std::min(used, reached));
}

Extent share_of(size_t whole, size_t share, size_t shares) {
  return {whole * share / shares, whole * (share + 1) / shares};
}

}  // namespace daf
