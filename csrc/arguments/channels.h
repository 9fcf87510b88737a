// Which channel an element belongs to, and which accumulator it goes to: docs/format.md, section 8.
#pragma once

#include <cstddef>
#include <cstdint>

namespace daf {

constexpr uint64_t slot_lanes = 16;

// Element i belongs to channel (i / inner) % count. Kernels see `inner` 1 or more than one
// channel: a whole tensor is one column.
struct Channels {
  uint64_t count = 1;
  uint64_t inner = 1;
};

// Accumulators come in slots of sixteen lanes; element i always goes to lane i % 16. With an
// inner length of 1 the pattern of channels over lanes repeats after lcm(channels, 16) elements,
// and slot s serves elements 16 s … 16 s + 15 of it; otherwise slot c serves channel c.
uint64_t slot_count(Channels channels, uint64_t elements);

// A part [first, last) of some whole.
struct Extent {
  size_t first, last;
};

// Part number `share` of [0, whole) when it is cut into `shares` parts as equal as can be.
Extent share_of(size_t whole, size_t share, size_t shares);

}  // namespace daf
