// A tree of slots by importance, least at the root; equal ones in order of arrival.
//
// A binary heap in an array, and each slot's place in it: no links, so that a slot takes 16 bytes.
// Insert and erase are O(log n), least is O(1).
#pragma once

#include <cstring>

#include "pool/array.h"

namespace daf::paging {

class ImportanceTree {
 public:
  explicit ImportanceTree(uint64_t most_slots) : entries_(most_slots), places_(most_slots) {}

  static uint64_t bytes_for(uint64_t slots) {
    return GrowingArray<Entry>::bytes_for(slots) + GrowingArray<uint32_t>::bytes_for(slots);
  }

  uint64_t most() const { return std::min(entries_.most(), places_.most()); }
  // Makes room for slots below `slots`.
  void extend(uint64_t slots) {
    entries_.extend(slots);
    places_.extend(slots);
  }

  uint32_t least() const { return entries_[0].slot; }
  // True if this importance would come before all here; equal ones come first.
  bool is_least(double importance) const {
    return count_ == 0 || key_of(importance) < entries_[0].key;
  }

  // `importance` >= 0; values within a millionth of each other count as equal.
  void insert(uint32_t slot, double importance) {
    settle(count_++, {key_of(importance), arrivals_++, slot});
  }

  void erase(uint32_t slot) {
    const uint32_t place = places_[slot];
    if (place != --count_) settle(place, entries_[count_]);
  }

  // True if nothing comes before what is above it, and every slot is where it should be. For
  // tests; O(n).
  bool is_sound() const {
    for (uint32_t place = 0; place < count_; ++place) {
      if (places_[entries_[place].slot] != place) return false;
      if (place > 0 && before(entries_[place], entries_[above(place)])) return false;
    }
    return true;
  }

 private:
  struct Entry {
    uint32_t key, arrival, slot;
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
    return a.key < b.key || (a.key == b.key && a.arrival < b.arrival);
  }

  void put(uint32_t place, Entry entry) {
    entries_[place] = entry;
    places_[entry.slot] = place;
  }

  // Puts an entry in a vacant place, or where it belongs above or below it.
  void settle(uint32_t place, Entry entry) {
    for (; place > 0 && before(entry, entries_[above(place)]); place = above(place))
      put(place, entries_[above(place)]);
    for (uint32_t child; (child = 2 * place + 1) < count_; place = child) {
      if (child + 1 < count_ && before(entries_[child + 1], entries_[child])) ++child;
      if (!before(entries_[child], entry)) break;
      put(place, entries_[child]);
    }
    put(place, entry);
  }

  GrowingArray<Entry> entries_;
  GrowingArray<uint32_t> places_;  // by slot
  uint32_t count_ = 0, arrivals_ = 0;
};

}  // namespace daf::paging
