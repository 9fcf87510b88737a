// A tree of slots by importance, least at the root; equal ones in order of arrival.
//
// A binary heap and each slot's place in it, in one array: no links, so that a slot takes 16 bytes.
// Insert and erase are O(log n), least is O(1).
#pragma once

#include <cstring>

#include "pool/array.h"

namespace daf::paging {

class ImportanceTree {
 public:
  explicit ImportanceTree(uint64_t most_slots) : nodes_(most_slots) {}

  static uint64_t bytes_for(uint64_t slots) { return GrowingArray<Node>::bytes_for(slots); }

  uint64_t most() const { return nodes_.most(); }
  // Makes room for slots below `slots`.
  void extend(uint64_t slots) { nodes_.extend(slots); }

  uint32_t least() const { return nodes_[0].entry.slot; }
  // True if this importance would come before all here; equal ones come first.
  bool is_least(double importance) const {
    return count_ == 0 || key_of(importance) < nodes_[0].entry.key;
  }

  // `importance` >= 0; values within a millionth of each other count as equal.
  void insert(uint32_t slot, double importance) {
    settle(count_++, {key_of(importance), arrivals_++, slot});
  }

  void erase(uint32_t slot) {
    const uint32_t place = nodes_[slot].place;
    if (place != --count_) settle(place, nodes_[count_].entry);
  }

  // True if nothing comes before what is above it, and every slot is where it should be. For
  // tests; O(n).
  bool is_sound() const {
    for (uint32_t place = 0; place < count_; ++place) {
      if (nodes_[nodes_[place].entry.slot].place != place) return false;
      if (place > 0 && before(nodes_[place].entry, nodes_[above(place)].entry)) return false;
    }
    return true;
  }

 private:
  struct Entry {
    uint32_t key, arrival, slot;
  };
  struct Node {
    Entry entry;     // the heap's at this place
    uint32_t place;  // of the entry of this slot
  };

  // The upper half of a number's bits, whose order is that of numbers from 0 up.
  static uint32_t key_of(double importance) {
    const double positive = importance + 0.0;  // -0 becomes 0
    uint64_t bits;
    std::memcpy(&bits, &positive, sizeof bits);
    return uint32_t(bits >> 32);
  }

  static uint32_t above(uint32_t place) { return (place - 1) / 2; }
  static bool before(const Entry& a, const Entry& b) {
    return a.key < b.key || (a.key == b.key && int32_t(a.arrival - b.arrival) < 0);  // may wrap
  }

  void put(uint32_t place, Entry entry) {
    nodes_[place].entry = entry;
    nodes_[entry.slot].place = place;
  }

  // Puts an entry in a vacant place, or where it belongs above or below it.
  void settle(uint32_t place, Entry entry) {
    for (; place > 0 && before(entry, nodes_[above(place)].entry); place = above(place))
      put(place, nodes_[above(place)].entry);
    for (uint32_t child; (child = 2 * place + 1) < count_; place = child) {
      if (child + 1 < count_ && before(nodes_[child + 1].entry, nodes_[child].entry)) ++child;
      if (!before(nodes_[child].entry, entry)) break;
      put(place, nodes_[child].entry);
    }
    put(place, entry);
  }

  GrowingArray<Node> nodes_;
  uint32_t count_ = 0, arrivals_ = 0;
};

}  // namespace daf::paging
