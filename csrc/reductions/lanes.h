// A block into lanes of accumulators: docs/format.md, section 8. Include after a vector_*.h.
#pragma once

#include "reductions/ranges.h"
#include "reductions/sums.h"
#include "simd/block.h"

namespace {

// The lanes of vector t that lie among the first `valid` elements.
DAF_INLINE uint16_t real_lanes(size_t valid, int t) {
  const size_t first = size_t(V::lanes) * t;
  const size_t here = valid <= first ? 0 : valid - first;
  return here >= 16 ? 0xFFFF : uint16_t((1u << here) - 1);
}

// Unsigned integers in the order of the floats: -NaN, -inf … -0, +0 … +inf, NaN.
DAF_INLINE V::I order_key(V::F x) {
  const auto bits = V::as_integer(x);
  const auto all = V::as_float(V::set_integer(0xFFFFFFFF));
  const auto sign = V::as_float(V::set_integer(0x80000000));
  return V::bit_xor(bits, V::as_integer(V::select(V::any_bit(bits, 0x80000000), all, sign)));
}

// A slot's sixteen sums in registers, of elements and of their products with those that lie
// `behind` them (0: squares). Lanes not chosen gain +0, which changes no sum from +0 on.
template <size_t behind> class SumsSlot {
 public:
  DAF_MEMBER_INLINE SumsSlot(const RunningSums& all, uint64_t slot)
      : sums_(all.sums + slot * slot_lanes), products_(all.squares + slot * slot_lanes) {
    sum_ = V::load(sums_);
    product_ = V::load(products_);
  }
  DAF_MEMBER_INLINE void add(const float* at) { add(V::load(at), V::load(at + behind)); }
  DAF_MEMBER_INLINE void add(const float* at, V::M chosen) {
    const auto zero = V::set(0.0f);
    add(V::select(chosen, V::load(at), zero), V::select(chosen, V::load(at + behind), zero));
  }
  DAF_MEMBER_INLINE void keep() const {
    V::store(sums_, sum_);
    V::store(products_, product_);
  }

 private:
  DAF_MEMBER_INLINE void add(V::F x, V::F y) {
    const auto wide = V::widen(x);
    sum_ = V::add(sum_, wide);
    product_ = V::add_product(product_, wide, V::widen(y));
  }

  double *sums_, *products_;
  V::D sum_, product_;
};

// Sums of a gradient as `sums`, of its products with values a block behind as `squares`.
struct RunningProducts {
  const RunningSums& of;
};

// A slot's ranges in registers. Lanes not chosen are compared with 0, the least key.
class RangeSlot {
 public:
  DAF_MEMBER_INLINE RangeSlot(const RangeLanes& all, uint64_t slot)
      : greatests_(all.greatest + slot * slot_lanes),
        complements_(all.complement + slot * slot_lanes) {
    greatest_ = V::load(greatests_);
    complement_ = V::load(complements_);
  }
  DAF_MEMBER_INLINE void add(const float* at) {
    compare(order_key(V::load(at)), V::set_integer(0xFFFFFFFF));
  }
  DAF_MEMBER_INLINE void add(const float* at, V::M chosen) {
    const auto all = V::as_float(V::set_integer(0xFFFFFFFF)), none = V::set(0.0f);
    const auto kept = V::as_integer(V::select(chosen, all, none));
    compare(V::bit_and(order_key(V::load(at)), kept), kept);
  }
  DAF_MEMBER_INLINE void keep() const {
    V::store(greatests_, greatest_);
    V::store(complements_, complement_);
  }

 private:
  DAF_MEMBER_INLINE void compare(V::I key, V::I turned) {
    greatest_ = V::greatest_integer(greatest_, key);
    complement_ = V::greatest_integer(complement_, V::bit_xor(key, turned));
  }

  uint32_t *greatests_, *complements_;
  V::I greatest_, complement_;
};

DAF_INLINE RangeSlot slot_of(const RangeLanes& all, uint64_t slot) { return {all, slot}; }
DAF_INLINE SumsSlot<0> slot_of(const RunningSums& all, uint64_t slot) { return {all, slot}; }
DAF_INLINE SumsSlot<block_elements> slot_of(const RunningProducts& all, uint64_t slot) {
  return {all.of, slot};
}

// Adds vectors first, first + step, … below last.
template <class Accumulators>
DAF_INLINE void add_vectors(const Accumulators& to, uint64_t slot, const float* row, size_t first,
                            size_t last, size_t step) {
  auto here = slot_of(to, slot);
  for (size_t t = first; t < last; t += step) here.add(row + V::lanes * t);
  here.keep();
}

// Adds elements [from, end) of a row, all in one vector.
template <class Accumulators>
DAF_INLINE void add_some(const Accumulators& to, uint64_t slot, const float* row, size_t from,
                         size_t end) {
  const size_t t = from / V::lanes;
  const uint16_t chosen = real_lanes(end, int(t)) & uint16_t(~real_lanes(from, int(t)));
  auto here = slot_of(to, slot);
  here.add(row + V::lanes * t, V::mask_from(chosen));
  here.keep();
}

// Adds vector t to slot `start` + t, fetching every slot once for all its vectors.
template <class Accumulators>
void add_columns(const Accumulators& to, uint64_t slots, const float* row, uint64_t first,
                 size_t valid) {
  const size_t whole = valid / V::lanes;
  const uint64_t start = first / V::lanes % slots;
  for (size_t t = 0; t < whole && t < slots; ++t)
    add_vectors(to, start + t < slots ? start + t : start + t - slots, row, t, whole,
                size_t(slots));
  if (valid % V::lanes) add_some(to, (start + whole) % slots, row, whole * V::lanes, valid);
}

// Adds elements [from, end) of a row, all of one channel.
template <class Accumulators>
DAF_INLINE void add_run(const Accumulators& to, uint64_t channel, const float* row, size_t from,
                        size_t end) {
  const size_t first = (from + V::lanes - 1) / V::lanes, last = end / V::lanes;
  if (first > last) return add_some(to, channel, row, from, end);
  if (from % V::lanes) add_some(to, channel, row, from, first * V::lanes);
  if (first < last) add_vectors(to, channel, row, first, last, 1);
  if (end % V::lanes) add_some(to, channel, row, last * V::lanes, end);
}

template <class Accumulators>
void add_runs(const Accumulators& to, Channels channels, const float* row, uint64_t first,
              size_t valid) {
  uint64_t channel = first / channels.inner % channels.count;
  uint64_t left = channels.inner - first % channels.inner;
  for (size_t place = 0; place < valid;) {
    const size_t end = left < valid - place ? place + size_t(left) : valid;
    add_run(to, channel, row, place, end);
    channel = channel + 1 == channels.count ? 0 : channel + 1;
    left = channels.inner;
    place = end;
  }
}

// Adds the first `valid` elements of a block, which begins with element `first` of the tensor.
template <class Accumulators>
void add_block(const Accumulators& to, Channels channels, uint64_t slots, const float* row,
               uint64_t first, size_t valid) {
  if (channels.inner == 1)
    add_columns(to, slots, row, first, valid);
  else
    add_runs(to, channels, row, first, valid);
}

}  // namespace
