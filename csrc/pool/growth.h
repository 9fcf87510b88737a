// How much memory the pool takes beyond its need, and keeps when pages fall free. Sizes are in
// groups, the least memory that the system gives and takes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace daf::paging {

struct Supply {
  uint64_t live;      // groups' worth of pages in use
  uint64_t empty;     // groups that have memory, without a page in use
  uint64_t headroom;  // groups that the cap still leaves
};

class Growth {
 public:
  // 0: adaptive; else whole increments, as in the paper (`may_cut`: less if the cap leaves less).
  Growth(uint64_t increment, bool may_cut, uint64_t kept = 1)
      : increment_(increment), may_cut_(may_cut), kept_(kept) {}

  // Updates the demand, a moving average, by an allocation of `groups`.
  void note_demand(uint64_t groups) { demand_ += (double(groups) - demand_) / 8; }

  // The most groups that may be held where the cap allows `groups`.
  uint64_t most(uint64_t groups) const {
    return increment_ && !may_cut_ ? groups / increment_ * increment_ : groups;
  }

  // How many groups to add where `missing` are needed; missing <= headroom. Adaptive: a few
  // allocations ahead (demand), at most 1/1024 of what lives, and 1/8 of the headroom, for small
  // steps before eviction. Only the need if free memory is fragmented.
  uint64_t step(uint64_t missing, const Supply& supply) const {
    if (increment_)
      return std::min((missing + increment_ - 1) / increment_ * increment_, supply.headroom);
    const bool in_pieces = supply.empty > supply.live / 256;
    const uint64_t ahead =
        in_pieces ? 0 : std::min({uint64_t(4 * demand_), supply.live / 1024, supply.headroom / 8});
    return std::min(std::max(missing, ahead), supply.headroom);
  }

  // How many empty groups to return now. Adaptive: none until 1/128 of what lives (or a few groups)
  // is empty, then all but 1/256, so that pages do not come and go. Fixed: all but `kept`
  // increments.
  uint64_t surplus(const Supply& supply) const {
    if (increment_) {
      const uint64_t whole = supply.empty / increment_;
      return whole > kept_ ? (whole - kept_) * increment_ : 0;
    }
    const uint64_t few = 2;
    const uint64_t most_kept = std::max(supply.live / 128, 2 * few);
    return supply.empty <= most_kept ? 0 : supply.empty - std::max(supply.live / 256, few);
  }

 private:
  uint64_t increment_;
  bool may_cut_;
  uint64_t kept_;
  double demand_ = 0;
};

}  // namespace daf::paging
