// Runs a case on every instruction set that this processor has, at every placement of its memory.
#pragma once

#include "cases.h"
#include "guarded.h"
#include "runner.h"

namespace daf::vectors {

// What runs now, for a handler of faults.
extern const char* volatile running_case;
extern const char* volatile running_set;

class Checker {
 public:
  explicit Checker(int threads) : threads_(threads) {}

  // Whether all wrote the expected bytes and nothing beside them; prints the first difference.
  bool check(const Case& given);
  bool check_at(Placement placement, const Case& given);
  // Expects from now on what the portable kernels write.
  void record(Case& given);

 private:
  struct Run {
    const Case& given;
    const KernelTable& kernels;
    Placement placement;
  };
  bool check(const Run& run);
  std::string problem_of(const Run& run);
  bool done(const Run& run);
  Buffers place(const Run& run);

  Guarded memory_[slots];
  int threads_;
};

}  // namespace daf::vectors
