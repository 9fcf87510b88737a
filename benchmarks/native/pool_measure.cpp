#include "pool_measure.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include "pool/pool.h"

namespace daf::paging {
namespace {

constexpr uint64_t page_bytes = 4096;
constexpr int operations_per_round = 512;
constexpr double shares[] = {1.0, 0.5};

using Clock = std::chrono::steady_clock;

template <class Work> double ns_per_operation(Work work, int operations) {
  const auto start = Clock::now();
  work();
  const std::chrono::duration<double, std::nano> spent = Clock::now() - start;
  return spent.count() / operations;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// A pool filled with tensors of random importance.
class Crowd {
 public:
  Crowd(uint64_t pages, uint64_t runs, uint64_t seed)
      : random_(seed),
        runs_(runs),
        pool_({2 * pages * page_bytes + (64 << 20), page_bytes, no_cap, 0, false, false}) {
    while (handles_.size() < pages / (2 * runs)) add();
  }

  void add() {
    const double scale = uniform_(random_);
    const double importance[] = {shares[0] * scale, shares[1] * scale};
    handles_.push_back(pool_.allocate({runs_ * page_bytes * 8, 2, 1, false, importance, 0}));
    pool_.unpin(handles_.back());
  }

  void pick_victims(int count) {
    for (int i = 0; i < count; ++i)
      std::swap(handles_[random_() % (handles_.size() - i)], handles_[handles_.size() - 1 - i]);
  }

  void remove_last() {
    pool_.release(handles_.back());
    handles_.pop_back();
  }

  void evict(int pages) { pool_.evict(pages * page_bytes); }

 private:
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> uniform_;
  uint64_t runs_;
  Pool pool_;
  std::vector<uint64_t> handles_;
};

template <class Work> void repeat(int times, Work work) {
  for (int i = 0; i < times; ++i) work();
}

}  // namespace

Costs measure_operations(uint64_t pages, uint64_t runs, int rounds, uint64_t seed) {
  Crowd crowd(pages, runs, seed);
  const int count = int(std::min<uint64_t>(operations_per_round, pages / (8 * runs)));
  std::vector<double> insert, evict, release;
  for (int round = 0; round < rounds; ++round) {
    insert.push_back(ns_per_operation([&] { repeat(count, [&] { crowd.add(); }); }, count));
    // Single pages, so that nothing but the tree makes a batch cheap.
    evict.push_back(ns_per_operation([&] { repeat(count, [&] { crowd.evict(1); }); }, count));
    crowd.pick_victims(count);
    release.push_back(
        ns_per_operation([&] { repeat(count, [&] { crowd.remove_last(); }); }, count));
  }
  return {median(insert), median(evict), median(release)};
}

Costs measure_tree(uint64_t nodes, int rounds, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform;
  ImportanceTree tree(nodes + operations_per_round);
  tree.extend(nodes + operations_per_round);
  std::vector<uint32_t> inside(nodes), outside(operations_per_round);
  for (uint64_t i = 0; i < nodes; ++i) tree.insert(inside[i] = uint32_t(i), uniform(random));
  for (int i = 0; i < operations_per_round; ++i) outside[i] = uint32_t(nodes + i);

  const int count = operations_per_round;
  std::vector<double> insert, evict, erase, keys(count);
  const auto add_all = [&] {
    for (int i = 0; i < count; ++i) tree.insert(outside[i], keys[i]);
  };
  for (int round = 0; round < rounds; ++round) {
    std::generate(keys.begin(), keys.end(), [&] { return uniform(random); });
    insert.push_back(ns_per_operation(add_all, count));
    evict.push_back(ns_per_operation(
        [&] {
          for (int i = 0; i < count; ++i) tree.erase(outside[i] = tree.least());
        },
        count));
    add_all();  // random again, so that the tree never runs out of small keys
    // Victims are any slots: those that are inside now are all of 0 ... nodes + count - 1.
    for (int i = 0; i < count; ++i) outside[i] = uint32_t(random() % (nodes + count));
    std::sort(outside.begin(), outside.end());
    for (int i = 1; i < count; ++i) outside[i] = std::max(outside[i], outside[i - 1] + 1);
    for (int i = count - 1, most = int(nodes) + count - 1; i >= 0; --i, --most)
      outside[i] = std::min(outside[i], uint32_t(most));
    std::shuffle(outside.begin(), outside.end(), random);
    erase.push_back(ns_per_operation(
        [&] {
          for (const uint32_t slot : outside) tree.erase(slot);
        },
        count));
  }
  return {median(insert), median(evict), median(erase)};
}

}  // namespace daf::paging
