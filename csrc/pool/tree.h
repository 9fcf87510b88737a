// A red–black tree of slots by importance, least first; equal ones in order of arrival.
//
// The nodes of slots that are not in it wait beside it, so that only `extend` allocates. Insert and
// erase are O(log n), least is O(1).
#pragma once

#include <bit>
#include <cstdint>
#include <deque>
#include <map>

namespace daf::paging {

class ImportanceTree {
 public:
  // A node is four words of links and one of content; the allocator adds one.
  static uint64_t bytes_for(uint64_t slots) { return slots * (sizeof(Slot) + 6 * sizeof(void*)); }

  uint64_t size() const { return tree_.size(); }
  // Makes room for slots below `slots`. Throws std::bad_alloc.
  void extend(uint64_t slots) {
    while (slots_.size() < slots) {
      Tree one;
      one.emplace(0, uint32_t(slots_.size()));
      slots_.push_back({one.extract(one.begin()), {}});
    }
  }

  uint32_t least() const { return tree_.begin()->second; }
  // True if this importance would come before all here; equal ones come first.
  bool is_least(double importance) const {
    return tree_.empty() || key_of(importance) < tree_.begin()->first;
  }

  // `importance` >= 0; values within a millionth of each other count as equal.
  void insert(uint32_t slot, double importance) {
    slots_[slot].outside.key() = key_of(importance);
    slots_[slot].inside = tree_.insert(std::move(slots_[slot].outside));
  }

  void erase(uint32_t slot) { slots_[slot].outside = tree_.extract(slots_[slot].inside); }

 private:
  using Tree = std::multimap<uint32_t, uint32_t>;
  struct Slot {
    Tree::node_type outside;
    Tree::iterator inside;
  };

  // The upper half of a number's bits, whose order is that of numbers from 0 up.
  static uint32_t key_of(double importance) {
    return uint32_t(std::bit_cast<uint64_t>(importance + 0.0) >> 32);  // -0 becomes 0
  }

  std::deque<Slot> slots_;
  Tree tree_;
};

}  // namespace daf::paging
