// Masks, derivative codes, packed integers: docs/format.md, 6. Include after a vector_*.h.
#pragma once

#include "codecs/minmax.h"

namespace {

inline bool encode_mask_range(const Job& job, size_t first, size_t last) {
  Reader reader(job);
  const auto low = V::set(job.low), high = V::set(job.high);
  for (size_t index = first; index < last; ++index) {
    Block block;
    reader.read(block, index);
    uint16_t* row = plane_block(job, 0, index);
    DAF_EACH_VECTOR {
      const auto x = block.x[t];
      const uint16_t outside =
          V::mask_bits(V::either(V::less_equal(x, low), V::less_equal(high, x)));
      const uint16_t above = V::mask_bits(V::greater(x, low));
      const uint16_t chosen = job.predicate == Predicate::inside ? uint16_t(~outside) : above;
      store_half(row + t, chosen & real_lanes(reader.valid(index), t));
    }
  }
  return true;
}

inline bool decode_mask_range(const Job& job, size_t first, size_t last) {
  Writer writer(job);
  const auto on = canonical(V::set(job.high)), off = canonical(V::set(job.low));
  for (size_t index = first; index < last; ++index) {
    Block block;
    const uint16_t* row = plane_block(job, 0, index);
    DAF_EACH_VECTOR block.x[t] = V::select(V::mask_from(load_half(row + t)), on, off);
    writer.write(block, index);
  }
  return true;
}

// table[index]; tables of up to 16 entries lie in a register.
DAF_INLINE V::F look_up(const float* table, int bits, V::I index) {
  if (bits <= 4) return V::lookup(table, index);
  alignas(64) uint32_t lane[V::lanes];
  alignas(64) float found[V::lanes];
  V::store(lane, index);
  for (int i = 0; i < V::lanes; ++i) found[i] = table[lane[i]];
  return V::load(found);
}

// A derivative in steps by a line for each piece of the elements: 15 borders, 16 scales, 16 shifts.
class Lines {
 public:
  explicit Lines(const float* table) {
    // The borders as an implicit search tree: node 1 is the root, node n's children 2n and 2n + 1.
    for (int level = 0, width = pieces; level < levels; ++level, width /= 2)
      for (int i = 0; i < 1 << level; ++i)
        node_[(1 << level) + i] = table[i * width + width / 2 - 1];
    std::memcpy(scale_, table + pieces - 1, sizeof scale_);
    std::memcpy(shift_, table + 2 * pieces - 1, sizeof shift_);
  }

  void apply(const float* row, float* steps) const {
    for (int t = 0; t < block_vectors; ++t) {
      const auto x = V::load(row + V::lanes * t);
      auto place = V::set_integer(1);
      for (int level = 0; level < levels; ++level) {
        const auto above = V::greater(x, V::lookup(node_, place));
        place = V::add_where(V::shift_left<1>(place), above, 1);
      }
      place = V::add_integer(place, V::set_integer(0u - pieces));
      const auto scaled = V::multiply(x, V::lookup(scale_, place));
      V::store(steps + V::lanes * t, V::add(scaled, V::lookup(shift_, place)));
    }
  }

 private:
  static constexpr int levels = 4, pieces = 1 << levels;
  alignas(64) float node_[pieces] = {};
  alignas(64) float scale_[pieces], shift_[pieces];
};

template <int bits> bool encode_derivative_range(const Job& job, size_t first, size_t last) {
  if (first == last) return true;
  const Lines lines(job.table);
  const PhiloxKeys keys(job.key);
  Reader reader(job);
  alignas(64) float room[block_elements], steps[block_elements];
  for (size_t index = first; index < last; ++index) {
    const float* values = reader.fetch(index, room);
    if (!all_finite(values)) return false;
    lines.apply(values, steps);
    write_steps<bits>(job, steps, reader.valid(index), keys, index);
  }
  return true;
}

inline bool decode_derivative_range(const Job& job, size_t first, size_t last) {
  alignas(64) float levels[256];
  for (int i = 0; i < 256; ++i) levels[i] = job.table[i & ((1 << job.bits) - 1)];
  Writer writer(job);
  for (size_t index = first; index < last; ++index) {
    Block block;
    for (int t = 0; t < block_vectors; ++t) {
      auto codes = V::set_integer(0);
      for (int bit = 0; bit < job.bits; ++bit) {
        const uint16_t* row = plane_block(job, job.bits - 1 - bit, index);
        codes = V::add_where(codes, V::mask_from(load_half(row + t)), 1u << bit);
      }
      block.x[t] = canonical(look_up(levels, job.bits, codes));
    }
    writer.write(block, index);
  }
  return true;
}

// 64-bit differences of integers in two halves of 32 planes each.
struct Halves {
  alignas(64) uint32_t low[block_elements];
  alignas(64) uint32_t high[block_elements];
};

// Computes up to 256 items minus the base; returns all differences or-ed together.
template <class Item>
uint64_t read_differences(const void* from, size_t valid, uint64_t base, Halves& halves) {
  uint64_t all = 0;
  for (size_t i = 0; i < valid; ++i) {
    Item item;
    std::memcpy(&item, static_cast<const char*>(from) + i * sizeof item, sizeof item);
    const uint64_t difference = uint64_t(int64_t(item)) - base;
    all |= difference;
    halves.low[i] = uint32_t(difference);
    halves.high[i] = uint32_t(difference >> 32);
  }
  return all;
}

template <class Item>
void write_items(void* to, size_t valid, uint64_t base, const Halves& halves) {
  for (size_t i = 0; i < valid; ++i) {
    const uint64_t difference = uint64_t(halves.high[i]) << 32 | halves.low[i];
    const Item item = Item(difference + base);
    std::memcpy(static_cast<char*>(to) + i * sizeof item, &item, sizeof item);
  }
}

template <class Item> bool encode_integers_of(const Job& job, size_t first, size_t last) {
  for (size_t index = first; index < last; ++index) {
    Halves halves = {};
    const uint64_t place = index * block_elements, left = job.count - place;
    const size_t valid = left < block_elements ? size_t(left) : block_elements;
    const char* from = static_cast<const char*>(job.source.data) + place * sizeof(Item);
    const uint64_t all = read_differences<Item>(from, valid, job.base, halves);
    if (job.bits < 64 && all >> job.bits) return false;
    for (int bit = 0; bit < job.bits; ++bit) {
      uint16_t* row = plane_block(job, job.bits - 1 - bit, index);
      const uint32_t* half = bit < 32 ? halves.low : halves.high;
      DAF_EACH_VECTOR store_half(
          row + t, V::mask_bits(V::any_bit(V::load(half + V::lanes * t), 1u << bit % 32)));
    }
  }
  return true;
}

template <class Item> bool decode_integers_of(const Job& job, size_t first, size_t last) {
  for (size_t index = first; index < last; ++index) {
    Halves halves = {};
    const uint64_t place = index * block_elements, left = job.count - place;
    for (int bit = 0; bit < job.bits; ++bit) {
      const uint16_t* row = plane_block(job, job.bits - 1 - bit, index);
      uint32_t* half = bit < 32 ? halves.low : halves.high;
      DAF_EACH_VECTOR {
        const auto set = V::mask_from(load_half(row + t));
        uint32_t* here = half + V::lanes * t;
        V::store(here, V::add_where(V::load(here), set, 1u << bit % 32));
      }
    }
    char* to = static_cast<char*>(job.target.data) + place * sizeof(Item);
    write_items<Item>(to, left < block_elements ? size_t(left) : block_elements, job.base, halves);
  }
  return true;
}

}  // namespace
