#include "arguments/channels.h"

#include <algorithm>
#include <numeric>

namespace daf {
namespace {

uint64_t rounded_up_quotient(uint64_t number, uint64_t divisor) {
  return number / divisor + (number % divisor != 0);
}

}  // namespace

uint64_t slot_count(Channels channels, uint64_t elements) {
  const uint64_t used =
      channels.inner == 1 ? channels.count / std::gcd(channels.count, slot_lanes) : channels.count;
  const uint64_t reached =
      rounded_up_quotient(elements, channels.inner == 1 ? slot_lanes : channels.inner);
  return std::max<uint64_t>(1, std::min(used, reached));
}

Extent share_of(size_t whole, size_t share, size_t shares) {
  return {whole * share / shares, whole * (share + 1) / shares};
}

}  // namespace daf
