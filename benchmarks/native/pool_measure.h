// What `daf bench pool` measures natively, without Python between two operations.
#pragma once

#include <cstdint>
#include <string>

namespace daf::paging {

struct Costs {
  double insert_ns, evict_ns, free_ns;  // of one operation; medians over rounds
};

// In a pool of `pages` live pages whose tensors have two planes of `runs` pages, with random
// importances: allocate one tensor, give up one page, release one tensor.
Costs measure_operations(uint64_t pages, uint64_t runs, int rounds, uint64_t seed);

// The same for the tree alone: insert, take the least, erase any.
Costs measure_tree(uint64_t nodes, int rounds, uint64_t seed);

// What is allocated bare has planes without headers (masks, packed integers).
enum class Action : uint32_t { allocate = 0, release = 1, mark = 2, allocate_bare = 3 };

// One step of a trace. Arrays of these and of Sample are shared with Python (daf/bench).
struct Operation {
  uint64_t count;     // elements
  double importance;  // of the most significant plane; each further one has a quarter of it
  uint32_t id;        // of the tensor; dense from 0, used again after a release
  Action action;
  uint32_t bits, minimum_bits;
};

struct Sample {
  uint64_t payload_bytes, held_bytes, evicted_pages;
  uint64_t resident_bytes;  // as the system sees it; after a mark only
};

// Plays a trace on "adaptive", "fixed", "fixed-cut" (pools), "best-fit" (an arena), "malloc" or
// "malloc-return" (glibc, as it is and with large blocks returned at once), touching all memory.
// Writes one sample for each operation. Throws MisuseError for an unknown contestant.
void replay(const std::string& contestant, uint64_t page_bytes, uint64_t cap_bytes,
            const Operation* operations, uint64_t count, Sample* samples);

}  // namespace daf::paging
