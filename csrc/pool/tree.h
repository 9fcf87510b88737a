// A red–black tree of slots by importance; equal ones in order of arrival.
//
// Cormen, Leiserson, Rivest and Stein, "Introduction to Algorithms", chapter 13, with array indices
// as links: small nodes (16 bytes, four to a cache line) save cache misses, which dominate
// insertion. Insert and erase are O(log n), least is O(1).
#pragma once

#include <cstdint>
#include <cstring>

#include "pool/array.h"

namespace daf::paging {

class ImportanceTree {
 public:
  explicit ImportanceTree(uint64_t most_slots) : nodes_(most_slots + 1) { nodes_.extend(1); }

  static uint64_t bytes_for(uint64_t slots) { return GrowingArray<Node>::bytes_for(slots + 1); }

  uint64_t most() const { return nodes_.most() - 1; }
  // Makes room for slots below `slots`.
  void extend(uint64_t slots) { nodes_.extend(slots + 1); }

  uint32_t least() const { return least_ - 1; }
  // True if this importance would come before all here; equal ones come first.
  bool is_least(double importance) const {
    return least_ == nil || key_of(importance) < nodes_[least_].key;
  }

  // `importance` >= 0; values within a millionth of each other count as equal.
  void insert(uint32_t slot, double importance) {
    const uint32_t fresh = slot + 1, key = key_of(importance);
    uint32_t parent = nil;
    bool is_left = false, is_least = true;
    for (uint32_t at = root_; at != nil;) {
      parent = at;
      is_left = key < nodes_[at].key;
      is_least = is_least && is_left;
      at = is_left ? nodes_[at].left : nodes_[at].right;
    }
    Node& node = nodes_[fresh];
    node.key = key;
    node.left = node.right = nil;
    node.parent = parent;
    node.red = true;
    if (parent == nil) {
      root_ = fresh;
    } else {
      (is_left ? nodes_[parent].left : nodes_[parent].right) = fresh;
    }
    if (is_least) least_ = fresh;
    repair_after_insert(fresh);
  }

  void erase(uint32_t slot) {
    const uint32_t gone = slot + 1;
    if (gone == least_) least_ = next(gone);
    uint32_t moved = gone, child;
    bool lost_black = !nodes_[gone].red;
    if (nodes_[gone].left == nil) {
      child = nodes_[gone].right;
      replace(gone, child);
    } else if (nodes_[gone].right == nil) {
      child = nodes_[gone].left;
      replace(gone, child);
    } else {
      moved = leftmost(nodes_[gone].right);
      lost_black = !nodes_[moved].red;
      child = nodes_[moved].right;
      lift(moved, child, gone);
    }
    if (lost_black) repair_after_erase(child);
  }

  // True if the rules of a red–black tree hold everywhere. For tests; O(n).
  bool is_sound() const {
    return !nodes_[root_].red && black_height(root_) >= 0 &&
           least_ == (root_ == nil ? nil : leftmost(root_));
  }

 private:
  struct Node {
    uint32_t key, left, right;
    uint32_t parent : 31, red : 1;
  };

  // The upper half of a number's bits, whose order is that of numbers from 0 up.
  static uint32_t key_of(double importance) {
    const double positive = importance + 0.0;  // -0 becomes 0
    uint64_t bits;
    std::memcpy(&bits, &positive, sizeof bits);
    return uint32_t(bits >> 32);
  }

  // Stands for every missing child; its parent is written while a node is erased.
  static constexpr uint32_t nil = 0;

  uint32_t leftmost(uint32_t at) const {
    while (nodes_[at].left != nil) at = nodes_[at].left;
    return at;
  }

  uint32_t next(uint32_t at) const {
    if (nodes_[at].right != nil) return leftmost(nodes_[at].right);
    uint32_t above = nodes_[at].parent;
    while (above != nil && at == nodes_[above].right) {
      at = above;
      above = nodes_[above].parent;
    }
    return above;
  }

  // Puts `other` in the place of `at`.
  void replace(uint32_t at, uint32_t other) {
    const uint32_t parent = nodes_[at].parent;
    if (parent == nil) {
      root_ = other;
    } else {
      (nodes_[parent].left == at ? nodes_[parent].left : nodes_[parent].right) = other;
    }
    nodes_[other].parent = parent;
  }

  // Moves `moved`, the successor of `gone`, to the place of `gone`.
  void lift(uint32_t moved, uint32_t child, uint32_t gone) {
    if (nodes_[moved].parent == gone) {
      nodes_[child].parent = moved;
    } else {
      replace(moved, child);
      nodes_[moved].right = nodes_[gone].right;
      nodes_[nodes_[moved].right].parent = moved;
    }
    replace(gone, moved);
    nodes_[moved].left = nodes_[gone].left;
    nodes_[nodes_[moved].left].parent = moved;
    nodes_[moved].red = nodes_[gone].red;
  }

  // Rotates: `at` goes down to the left, or to the right.
  void rotate(uint32_t at, bool left) {
    const uint32_t rising = left ? nodes_[at].right : nodes_[at].left;
    const uint32_t middle = left ? nodes_[rising].left : nodes_[rising].right;
    (left ? nodes_[at].right : nodes_[at].left) = middle;
    if (middle != nil) nodes_[middle].parent = at;
    replace(at, rising);
    (left ? nodes_[rising].left : nodes_[rising].right) = at;
    nodes_[at].parent = rising;
  }

  void repair_after_insert(uint32_t at) {
    while (nodes_[nodes_[at].parent].red) {
      uint32_t parent = nodes_[at].parent;
      const uint32_t above = nodes_[parent].parent;
      const bool on_left = parent == nodes_[above].left;
      const uint32_t uncle = on_left ? nodes_[above].right : nodes_[above].left;
      nodes_[above].red = true;
      if (nodes_[uncle].red) {
        nodes_[parent].red = nodes_[uncle].red = false;
        at = above;
        continue;
      }
      if (at == (on_left ? nodes_[parent].right : nodes_[parent].left)) {
        rotate(parent, on_left);
        parent = at;
      }
      nodes_[parent].red = false;
      rotate(above, !on_left);
      break;
    }
    nodes_[root_].red = false;
  }

  // Paths through `at` (perhaps nil) have one black node too few.
  void repair_after_erase(uint32_t at) {
    while (at != root_ && !nodes_[at].red) {
      const uint32_t parent = nodes_[at].parent;
      const bool on_left = at == nodes_[parent].left;
      uint32_t sibling = on_left ? nodes_[parent].right : nodes_[parent].left;
      if (nodes_[sibling].red) {
        nodes_[sibling].red = false;
        nodes_[parent].red = true;
        rotate(parent, on_left);
        sibling = on_left ? nodes_[parent].right : nodes_[parent].left;
      }
      uint32_t outer = on_left ? nodes_[sibling].right : nodes_[sibling].left;
      const uint32_t inner = on_left ? nodes_[sibling].left : nodes_[sibling].right;
      if (!nodes_[outer].red && !nodes_[inner].red) {
        nodes_[sibling].red = true;
        at = parent;
        continue;
      }
      if (!nodes_[outer].red) {
        nodes_[inner].red = false;
        nodes_[sibling].red = true;
        rotate(sibling, !on_left);
        outer = sibling;
        sibling = inner;
      }
      nodes_[sibling].red = nodes_[parent].red;
      nodes_[parent].red = nodes_[outer].red = false;
      rotate(parent, on_left);
      at = root_;
    }
    nodes_[at].red = false;
  }

  // Black nodes on every path down from `at`, or -1 if a rule is broken.
  int black_height(uint32_t at) const {
    if (at == nil) return 0;
    const Node& node = nodes_[at];
    for (uint32_t child : {node.left, node.right}) {
      if (child == nil) continue;
      if (nodes_[child].parent != at || (node.red && nodes_[child].red)) return -1;
    }
    if (node.left != nil && nodes_[node.left].key > node.key) return -1;
    if (node.right != nil && nodes_[node.right].key < node.key) return -1;
    const int left = black_height(node.left), right = black_height(node.right);
    return left < 0 || left != right ? -1 : left + !node.red;
  }

  GrowingArray<Node> nodes_;
  uint32_t root_ = nil, least_ = nil;
};

}  // namespace daf::paging
