// Channels of elements, and their accumulators: docs/format.md, section 8.
#pragma once

#include <cstddef>
#include <cstdint>

namespace daf {

constexpr uint64_t slot_lanes = 16;

// Element i belongs to channel (i / inner) % count; a whole tensor is one column of `inner` 1.
struct Channels {
  uint64_t count = 1;
  uint64_t inner = 1;
};

// Accumulators come in slots of sixteen lanes; element i goes to lane i % 16. With inner 1 the
// channels repeat after lcm(channels, 16) elements, and slot s serves elements 16 s … 16 s + 15 of
// these; otherwise slot c serves channel c.
uint64_t slot_count(Channels channels, uint64_t elements);

// A range [first, last).
struct Extent {
  size_t first, last;
};

constexpr uint64_t line_bytes = 64;  // threads share no cache line

// Bytes that suffice for any start of the workspace that `lay_out` lays out.
template <class Plan> uint64_t workspace_bytes(const Plan& plan) {
  return lay_out(plan, 0).end + line_bytes;
}

// Part `share` of [0, whole) in `shares` parts as equal as can be.
Extent share_of(size_t whole, size_t share, size_t shares);

}  // namespace daf
