// Runs the kernels of every instruction set that this processor has, byte for byte.
//
//   vectors file PATH THREADS         the cases that tests/helpers/kernels/recorder.py wrote there
//   vectors fuzz CASES SEED THREADS   every header pattern, then so many random calls over random
//                                     bytes: all sets must write what "portable" writes
//
// Ends with 0 and "ok", or with the first difference and 1. Nothing may be read or written
// beside any buffer, which test_native.py also lets the compilers' sanitizers watch.

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>

#include "checker.h"
#include "hostile.h"

using namespace daf::vectors;

namespace {

struct sigaction before;

// Names what ran, then lets the fault take its course: a sanitizer may have more to say.
void name_the_fault(int signal) {
  std::fprintf(stderr, "%s: %s: read or wrote outside its memory\n", running_set, running_case);
  sigaction(signal, &before, nullptr);
}

void watch_for_faults() {
  struct sigaction action = {};
  action.sa_handler = name_the_fault;
  sigaction(SIGSEGV, &action, &before);
}

bool sweep_headers(Checker& checker, HostileCases& cases) {
  for (const Operation operation : {Operation::decode_rotated, Operation::decode_minmax}) {
    for (int piece = 0; piece < sweep_pieces; ++piece) {
      Case given = cases.sweep(operation, piece);
      checker.record(given);
      if (!checker.check_at(Placement::at_end, given)) return false;
    }
  }
  return true;
}

// How many cases were right, or -1.
long run_file(const char* path, int threads) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  Checker checker(threads);
  Case given;
  long count = 0;
  for (; read_case(file, given); ++count)
    if (!checker.check(given)) return -1;
  return count;
}

long fuzz(long count, uint64_t seed, int threads) {
  Checker checker(threads);
  HostileCases cases(seed);
  if (!sweep_headers(checker, cases)) return -1;
  for (long i = 0; i < count; ++i) {
    Case given = cases.any();
    checker.record(given);
    if (!checker.check(given)) return -1;
  }
  return count;
}

long run(int count, char** words) {
  const std::string mode = count > 1 ? words[1] : "";
  if (mode == "file" && count == 4) return run_file(words[2], std::atoi(words[3]));
  if (mode == "fuzz" && count == 5)
    return fuzz(std::atol(words[2]), std::strtoull(words[3], nullptr, 10), std::atoi(words[4]));
  throw std::runtime_error("usage: vectors file PATH THREADS | vectors fuzz CASES SEED THREADS");
}

}  // namespace

int main(int count, char** words) try {
  watch_for_faults();
  const long right = run(count, words);
  if (right < 0) return 1;
  std::printf("ok: %ld cases on", right);
  for (const daf::KernelTable* kernels : daf::available_tables()) std::printf(" %s", kernels->name);
  std::printf("\n");
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 2;
}
