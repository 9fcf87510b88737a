// A red–black tree of slots by importance, least first; equal ones in order of arrival.
//
// Cormen, Leiserson, Rivest and Stein, "Introduction to Algorithms", chapter 13. Links are places
// in one array, so that a node is 16 bytes, four to a cache line: what insert costs is the lower
// levels' cache misses.
// Insert and erase are O(log n), least is O(1).
#pragma once

#include <bit>
#include <cstdint>

#include "pool/region.h"

namespace daf::paging {

class ImportanceTree {
 public:
  explicit ImportanceTree(uint64_t most_slots)
      : region_(bytes_for(most_slots), Region::system_page_bytes()) {
    extend(0);
  }

  static uint64_t bytes_for(uint64_t slots) {
    return round_up((slots + 1) * sizeof(Node), Region::system_page_bytes());
  }

  uint64_t size() const { return size_; }
  // Makes room for slots below `slots`. Throws std::bad_alloc.
  void extend(uint64_t slots) { region_.extend(bytes_for(slots)); }

  uint32_t least() const { return least_ - 1; }
  // True if this importance would come before all here; equal ones come first.
  bool is_least(double importance) const {
    return least_ == nil || key_of(importance) < node(least_).key;
  }

  // `importance` >= 0; values within a millionth of each other count as equal.
  void insert(uint32_t slot, double importance) {
    const uint32_t fresh = slot + 1, key = key_of(importance);
    uint32_t parent = nil;
    Side side = left;
    bool is_least = true;
    for (uint32_t at = root(); at != nil; at = node(at).child[side]) {
      parent = at;
      side = key < node(at).key ? left : right;
      is_least = is_least && side == left;
    }
    node(fresh) = {key, {nil, nil}, parent, false};
    node(parent).child[side] = fresh;
    if (is_least) least_ = fresh;
    ++size_;
    repair_after_insert(fresh);
  }

  void erase(uint32_t slot) {
    const uint32_t gone = slot + 1;
    if (gone == least_)
      least_ = node(gone).child[right] ? node(gone).child[right] : node(gone).parent;
    --size_;
    const bool has_both = node(gone).child[left] && node(gone).child[right];
    const uint32_t moved = has_both ? leftmost(node(gone).child[right]) : gone;
    const uint32_t child = node(moved).child[node(moved).child[left] ? left : right];
    const bool lost_black = node(moved).black;
    replace(moved, child);
    if (moved != gone) take_place(moved, gone);
    if (lost_black) repair_after_erase(child);
  }

 private:
  friend struct TreeCheck;  // of the tests

  enum Side : uint32_t { left, right };
  struct Node {
    uint32_t key, child[2];
    uint32_t parent : 31, black : 1;
  };

  // Stands for every missing child and is the root's parent, the root its left child. Its own
  // parent is written where a child may be missing, and read only in the repair that follows.
  static constexpr uint32_t nil = 0;

  // The upper half of a number's bits, whose order is that of numbers from 0 up.
  static uint32_t key_of(double importance) {
    return uint32_t(std::bit_cast<uint64_t>(importance + 0.0) >> 32);  // -0 becomes 0
  }

  Node& node(uint32_t at) const { return reinterpret_cast<Node*>(region_.base())[at]; }
  uint32_t root() const { return node(nil).child[left]; }
  bool is_red(uint32_t at) const { return at != nil && !node(at).black; }
  static Side other(Side side) { return Side(1 - side); }
  Side side_of(uint32_t at) const {
    return node(node(at).parent).child[right] == at ? right : left;
  }
  uint32_t leftmost(uint32_t at) const {
    while (node(at).child[left]) at = node(at).child[left];
    return at;
  }

  // Puts `heir`, perhaps nil, where `at` hangs.
  void replace(uint32_t at, uint32_t heir) {
    node(node(at).parent).child[side_of(at)] = heir;
    node(heir).parent = node(at).parent;
  }

  // Gives `moved`, which hangs nowhere, the links and the colour of `gone`.
  void take_place(uint32_t moved, uint32_t gone) {
    const uint32_t key = node(moved).key;
    node(moved) = node(gone);
    node(moved).key = key;
    replace(gone, moved);
    for (const uint32_t child : node(moved).child) node(child).parent = moved;
  }

  // `at` goes down to `side`, and its other child rises.
  void rotate(uint32_t at, Side side) {
    const uint32_t rising = node(at).child[other(side)], middle = node(rising).child[side];
    node(at).child[other(side)] = middle;
    if (middle != nil) node(middle).parent = at;
    replace(at, rising);
    node(rising).child[side] = at;
    node(at).parent = rising;
  }

  void repair_after_insert(uint32_t at) {
    while (is_red(node(at).parent)) {
      uint32_t parent = node(at).parent;
      const uint32_t above = node(parent).parent;
      const Side side = side_of(parent);
      const uint32_t uncle = node(above).child[other(side)];
      node(above).black = false;
      if (is_red(uncle)) {
        node(parent).black = node(uncle).black = true;
        at = above;
        continue;
      }
      if (side_of(at) != side) {
        rotate(parent, side);
        parent = at;
      }
      node(parent).black = true;
      rotate(above, other(side));
      break;
    }
    node(root()).black = true;
  }

  // `at`, perhaps nil, stands where one black node too few is met on the way down.
  void repair_after_erase(uint32_t at) {
    while (at != root() && !is_red(at)) {
      const uint32_t parent = node(at).parent;
      const Side side = node(parent).child[left] == at ? left : right, far = other(side);
      if (is_red(node(parent).child[far])) {
        node(node(parent).child[far]).black = true;
        node(parent).black = false;
        rotate(parent, side);
      }
      uint32_t sibling = node(parent).child[far];
      node(sibling).black = false;
      if (!is_red(node(sibling).child[left]) && !is_red(node(sibling).child[right])) {
        at = parent;
        continue;
      }
      if (!is_red(node(sibling).child[far])) {
        rotate(sibling, far);
        sibling = node(parent).child[far];
      }
      node(sibling).black = node(parent).black;
      node(parent).black = node(node(sibling).child[far]).black = true;
      rotate(parent, side);
      at = root();
    }
    node(at).black = true;
  }

  Region region_;
  uint64_t size_ = 0;
  uint32_t least_ = nil;
};

}  // namespace daf::paging
