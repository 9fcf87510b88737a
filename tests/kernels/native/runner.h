// A case as a job of csrc/arguments/job.h.
#pragma once

#include "cases.h"
#include "instruction_sets/dispatch.h"

namespace daf::vectors {

struct Buffers {
  uint8_t* at[slots];
  bool stream;  // may write around the caches
};

// What the kernel of that set returned.
bool run_case(const Case& given, const Buffers& buffers, const KernelTable& kernels, int threads);

}  // namespace daf::vectors
