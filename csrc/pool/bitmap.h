// A set of small integers that finds its first and last member in O(log n) to base 64.
//
// Level 0 has a bit for every integer; a bit of a higher level is set if a word below is non-zero.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace daf::paging {

constexpr uint64_t nothing = ~uint64_t(0);

class Bitmap {
 public:
  // Sizes are multiples of this, so that bitmaps seldom grow.
  static constexpr uint64_t unit = 4096;

  static uint64_t bytes_for(uint64_t size) {
    uint64_t total = 0;
    for (uint64_t words = level_words(round(size)); words; words = next_level(words))
      total += 8 * words;
    return total;
  }

  // Makes room for integers below `size`; the new ones are not in the set.
  void resize(uint64_t size) {
    size_t level = 0;
    for (uint64_t words = level_words(round(size)); words; words = next_level(words), ++level) {
      if (level == levels_.size()) add_level();
      levels_[level].reserve(words);
      levels_[level].resize(words);
    }
  }

  // Keeps room and memory for integers below `size` only; the set must hold no others.
  void shrink(uint64_t size) {
    size_t level = 0;
    for (uint64_t words = level_words(round(size)); words; words = next_level(words), ++level) {
      levels_[level].resize(words);
      levels_[level].shrink_to_fit();
    }
    levels_.resize(level);
  }

  bool has(uint64_t i) const { return levels_[0][i / 64] >> (i % 64) & 1; }
  // True if the set has all of `count` integers, a power of two, from a multiple of it on.
  bool has_all(uint64_t first, uint64_t count) const {
    const uint64_t all = ~uint64_t(0);
    const uint64_t wanted = count < 64 ? ((uint64_t(1) << count) - 1) << (first % 64) : all;
    for (uint64_t word = first / 64; word < (first + count + 63) / 64; ++word)
      if (~levels_[0][word] & wanted) return false;
    return true;
  }
  uint64_t count() const { return count_; }

  void insert(uint64_t i) {
    ++count_;
    for (auto& level : levels_) {
      uint64_t& word = level[i / 64];
      const bool was_empty = word == 0;
      word |= uint64_t(1) << (i % 64);
      if (!was_empty) return;
      i /= 64;
    }
  }

  void erase(uint64_t i) {
    --count_;
    for (auto& level : levels_) {
      uint64_t& word = level[i / 64];
      word &= ~(uint64_t(1) << (i % 64));
      if (word) return;
      i /= 64;
    }
  }

  uint64_t first() const {
    return walk([](uint64_t word) { return std::countr_zero(word); });
  }
  uint64_t last() const {
    return walk([](uint64_t word) { return std::bit_width(word) - 1; });
  }

 private:
  static uint64_t round(uint64_t size) { return (size + unit - 1) / unit * unit; }
  static uint64_t level_words(uint64_t bits) { return (bits + 63) / 64; }
  // Words of the level above `words` words; 0 above a single word.
  static uint64_t next_level(uint64_t words) { return words > 1 ? level_words(words) : 0; }

  void add_level() {
    levels_.emplace_back();
    if (levels_.size() == 1) return;
    const auto& below = levels_[levels_.size() - 2];
    levels_.back().resize(level_words(below.size()));
    for (size_t i = 0; i < below.size(); ++i)
      if (below[i]) levels_.back()[i / 64] |= uint64_t(1) << (i % 64);
  }

  template <class Choose> uint64_t walk(Choose choose) const {
    if (count_ == 0) return nothing;
    uint64_t place = 0;
    for (size_t level = levels_.size(); level-- > 0;)
      place = 64 * place + uint64_t(choose(levels_[level][place]));
    return place;
  }

  std::vector<std::vector<uint64_t>> levels_;
  uint64_t count_ = 0;
};

}  // namespace daf::paging
