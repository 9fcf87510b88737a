// How much memory the pool takes beyond what it needs at once, and how much it keeps when pages
// fall free. All sizes are in groups: the least memory that the system gives and takes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace daf::paging {

// What a rule may look at.
struct Supply {
  uint64_t live;      // groups' worth of pages in use
  uint64_t empty;     // groups that have memory, without a page in use
  uint64_t headroom;  // groups that the cap still leaves
};

class Growth {
 public:
  // increment 0: adaptive; else the paper's rule, whole increments and nothing less
  // (`may_cut`: unless the cap leaves less than a whole one).
  Growth(uint64_t increment, bool may_cut, uint64_t kept = 1)
      : increment_(increment), may_cut_(may_cut), kept_(kept) {}

  // An allocation of `groups` has come: the demand is an average that forgets.
  void note_demand(uint64_t groups) { demand_ += (double(groups) - demand_) / 8; }

  // The most groups that may be held where the cap allows `groups`.
  uint64_t most(uint64_t groups) const {
    return increment_ && !may_cut_ ? groups / increment_ * increment_ : groups;
  }

  // How many groups to add where `missing` are needed; missing <= headroom.
  //
  // Adaptive: a few allocations ahead (demand), yet not more than a 1024th of what lives, so that
  // the pool never holds much more than it uses; nothing beyond the need where enough lies free
  // already but in pieces (fragmentation); and at most an eighth of what the cap leaves
  // (headroom), so that the last bytes before eviction are taken in small steps.
  uint64_t step(uint64_t missing, const Supply& supply) const {
    if (increment_)
      return std::min((missing + increment_ - 1) / increment_ * increment_, supply.headroom);
    const bool in_pieces = supply.empty > supply.live / 256;
    const uint64_t ahead =
        in_pieces ? 0 : std::min({uint64_t(4 * demand_), supply.live / 1024, supply.headroom / 8});
    return std::min(std::max(missing, ahead), supply.headroom);
  }

  // How many of the empty groups to give back now.
  //
  // Adaptive: none until a 128th of what lives is empty (or a few groups, where little lives),
  // then all but a 256th: so that a page is not given back and taken again at every turn.
  // Fixed: whole increments, keeping `kept`.
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
