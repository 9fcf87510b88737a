// What `daf bench kernels` measures natively: times without Python between two calls, and
// instructions counted by single-stepping where the processor's own counters are out of reach.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arguments/job.h"

namespace daf {

// One kernel on one tensor of float32 (of int32 for "integers").
struct KernelCase {
  const KernelTable* table;  // of one instruction set
  std::string codec;         // "rotated", "minmax", "mask", "derivative" or "integers"
  bool encode;
  int bits;
  uint64_t count;
  int threads;
  const int8_t* thresholds;  // of `rotated`
  const int8_t* levels;
  const float* lines;  // of `derivative`: 47 numbers, as in arguments/job.h
};

struct TimedPair {
  double kernel_ns, copy_ns;  // of one call, and of memcpy of the same elements
};

// `rounds` pairs, the kernel and the copy in turn; short calls are repeated. Throws
// std::invalid_argument for a codec that does not exist.
std::vector<TimedPair> measure_kernel(const KernelCase& kernel, int rounds);

// Median time of reading `count` floats once, on as many threads.
double measure_read_ns(uint64_t count, int threads, int rounds);

// Instructions of one call on the calling thread; 0 where the system allows no single-stepping.
uint64_t count_instructions(const KernelCase& kernel);

}  // namespace daf
