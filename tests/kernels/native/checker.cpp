#include "checker.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "threads/float_mode.h"

namespace daf::vectors {

const char* volatile running_case = "";
const char* volatile running_set = "";

namespace {

constexpr const char* placement_names[] = {"at the start", "displaced", "at the end"};
constexpr const char* slot_names[] = {
    "input",      "headers",        "mask",         "scale",        "shift",       "table",
    "thresholds", "gradient",       "second scale", "second shift", "third scale", "third shift",
    "output",     "output headers", "result",       "result mask",  "sums",        "products"};
// Elements and planes may lie anywhere, the rest as C++ has it; sums as floats.
constexpr size_t alignments[slots] = {1, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1, 2, 4, 4, 4, 4};

// Of a caller who rounds upwards, flushes denormals and (on Arm) has another fp16 and another NaN.
#if defined(__x86_64__)
constexpr uint64_t hostile_float_mode = 0x1F80 | 0x4000 | 0x8040;
#elif defined(__aarch64__)
constexpr uint64_t hostile_float_mode = 0b111 << 24 | 0b01 << 22;
#else
constexpr uint64_t hostile_float_mode = default_float_mode;
#endif

// "a5": one byte in hexadecimal.
std::string text(uint8_t byte) {
  char result[3];
  std::snprintf(result, sizeof result, "%02x", byte);
  return result;
}

// What is wrong with an output, or nothing.
std::string difference(const uint8_t* found, const Bytes& expected) {
  if (expected.empty() || std::memcmp(found, expected.data(), expected.size()) == 0) return "";
  const auto pair = std::mismatch(expected.begin(), expected.end(), found);
  const size_t place = size_t(pair.first - expected.begin());
  return "byte " + std::to_string(place) + " is " + text(*pair.second) + ", not " +
         text(*pair.first);
}

}  // namespace

bool Checker::check(const Case& given) {
  for (const Placement placement : placements)
    if (!check_at(placement, given)) return false;
  return true;
}

bool Checker::check_at(Placement placement, const Case& given) {
  for (const KernelTable* kernels : available_tables())
    if (!check(Run{given, *kernels, placement})) return false;
  return true;
}

void Checker::record(Case& given) {
  const Run run{given, *find_table("portable"), Placement::at_start};
  given.parameters.done = done(run);
  for (int slot = first_output; slot < slots; ++slot)
    std::copy_n(memory_[slot].data(), given.content[slot].size(), given.content[slot].begin());
}

bool Checker::check(const Run& run) {
  const std::string problem = problem_of(run);
  if (!problem.empty())
    std::fprintf(stderr, "%s, %s: %s: %s\n", run.kernels.name, placement_names[int(run.placement)],
                 run.given.name.c_str(), problem.c_str());
  return problem.empty();
}

std::string Checker::problem_of(const Run& run) {
  const uint64_t mode = float_mode();
  if (run.placement == Placement::displaced) set_float_mode(hostile_float_mode);
  const uint64_t chosen = float_mode();
  const bool found = done(run);
  const bool kept = float_mode() == chosen;
  set_float_mode(mode);
  if (!kept) return "the caller's float mode did not come back";
  if (found != (run.given.parameters.done != 0)) return found ? "not refused" : "refused";
  // A code of values of which one is not finite is a code all the same.
  const bool counts = found || !run.given.content[output_headers].empty();
  for (int slot = first_output; slot < slots; ++slot) {
    if (!memory_[slot].intact()) return std::string("wrote beside the ") + slot_names[slot];
    const std::string unlike = difference(memory_[slot].data(), run.given.content[slot]);
    if (counts && !unlike.empty()) return std::string(slot_names[slot]) + ": " + unlike;
  }
  return "";
}

// Runs it; what it wrote then lies in the memory of the outputs.
bool Checker::done(const Run& run) {
  running_case = run.given.name.c_str();
  running_set = run.kernels.name;
  return run_case(run.given, place(run), run.kernels, threads_);
}

Buffers Checker::place(const Run& run) {
  Buffers result{{}, run.placement == Placement::at_start && !run.given.parameters.accumulate};
  for (int slot = 0; slot < slots; ++slot) {
    const Bytes& content = slot == output ? run.given.before : run.given.content[slot];
    const size_t size = run.given.content[slot].size();
    uint8_t* to = memory_[slot].place(size, run.placement, alignments[slot]);
    if (slot <= output && !content.empty()) std::memcpy(to, content.data(), content.size());
    result.at[slot] = size ? to : nullptr;
  }
  return result;
}

}  // namespace daf::vectors
