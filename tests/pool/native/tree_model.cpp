// The pool's tree beside std::multimap: the same order, and a red–black tree's rules.
//
// Usage: tree_model OPERATIONS SEED. Ends with 0 and "ok", or with a message and 1. Built with
// sanitizers by test_pool_native.py.

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <vector>

#include "pool/tree.h"

namespace daf::paging {

struct TreeCheck {
  const ImportanceTree& tree;

  // Children name their parent and are in order; no red node has a red child; every way down meets
  // as many black nodes.
  bool is_sound() const {
    const uint32_t root = tree.root();
    return !tree.is_red(root) && black_height(root) >= 0;
  }

  // Black nodes on every way down from `at`, or -1 where a rule is broken.
  int black_height(uint32_t at) const {
    if (at == ImportanceTree::nil) return 0;
    const auto& node = tree.node(at);
    int heights[2];
    for (int side = 0; side < 2; ++side) {
      const uint32_t child = node.child[side];
      heights[side] = black_height(child);
      if (child == ImportanceTree::nil) continue;
      if (tree.node(child).parent != at || (!node.black && tree.is_red(child))) return -1;
      if (side == 0 ? tree.node(child).key > node.key : tree.node(child).key < node.key) return -1;
    }
    return heights[0] < 0 || heights[0] != heights[1] ? -1 : heights[0] + node.black;
  }
};

}  // namespace daf::paging

using namespace daf::paging;

namespace {

class Pair {
 public:
  Pair(uint64_t slots, uint64_t seed) : random_(seed), tree_(slots), places_(slots) {
    tree_.extend(slots);
    for (uint32_t slot = 0; slot < slots; ++slot) outside_.push_back(slot);
  }

  // `share` of the operations insert one of `distinct` importances: where these are few, they tie.
  const char* step(double share, int distinct) {
    if (inside_.empty() || (!outside_.empty() && uniform_(random_) < share)) {
      insert(double(random_() % distinct));
    } else {
      erase(random_() % 3 ? random_() % inside_.size() : place_of(tree_.least()));
    }
    if (tree_.size() != model_.size()) return "the sizes differ";
    if (model_.empty()) return nullptr;
    if (tree_.least() != model_.begin()->second) return "the least differ";
    const double least = model_.begin()->first;
    if (tree_.is_least(least)) return "an equal one came before";
    return nullptr;
  }

  const char* check() const {
    return TreeCheck{tree_}.is_sound() ? nullptr : "a rule of red-black trees is broken";
  }

  // Takes the least one by one, as eviction does; ties come in the order of arrival.
  const char* drain() {
    while (!model_.empty()) {
      if (tree_.least() != model_.begin()->second) return "the order differs";
      erase(place_of(tree_.least()));
    }
    return tree_.size() ? "something is left" : nullptr;
  }

 private:
  void insert(double importance) {
    const uint32_t slot = outside_.back();
    outside_.pop_back();
    inside_.push_back(slot);
    tree_.insert(slot, importance);
    places_[slot] = model_.emplace(importance, slot);
  }

  void erase(uint64_t place) {
    const uint32_t slot = inside_[place];
    std::swap(inside_[place], inside_.back());
    inside_.pop_back();
    outside_.insert(outside_.begin() + long(random_() % (outside_.size() + 1)), slot);
    tree_.erase(slot);
    model_.erase(places_[slot]);
  }

  uint64_t place_of(uint32_t slot) const {
    uint64_t place = 0;
    while (inside_[place] != slot) ++place;
    return place;
  }

  std::mt19937_64 random_;
  std::uniform_real_distribution<double> uniform_;
  ImportanceTree tree_;
  std::multimap<double, uint32_t> model_;
  std::vector<std::multimap<double, uint32_t>::iterator> places_;
  std::vector<uint32_t> inside_, outside_;
};

const char* compare(int operations, uint64_t slots, int distinct, uint64_t seed) {
  Pair pair(slots, seed);
  for (int done = 0; done < operations; ++done) {
    const double share = done / (operations / 4) % 2 ? 0.35 : 0.65;  // it fills and empties
    const char* wrong = pair.step(share, distinct);
    if (!wrong && done % 16 == 0) wrong = pair.check();
    if (wrong) return wrong;
  }
  return pair.drain();
}

}  // namespace

int main(int, char** arguments) {
  const int operations = std::atoi(arguments[1]) / 6;
  const uint64_t seed = std::strtoull(arguments[2], nullptr, 10);
  for (const uint64_t slots : {3, 40, 300})
    for (const int distinct : {5, 1000})
      if (const char* wrong = compare(operations, slots, distinct, seed + slots)) {
        std::fprintf(stderr, "%s\n", wrong);
        return 1;
      }
  std::puts("ok");
  return 0;
}
