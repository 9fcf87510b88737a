#include "kernels_measure.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>

#include "threads/threads.h"

#if defined(__linux__)
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#endif

namespace daf {
namespace {

constexpr uint64_t key = 7;
constexpr double least_timed_ns = 50'000;        // shorter calls are repeated
constexpr uint64_t stream_from_bytes = 8 << 20;  // as bindings/kernels.cpp decides
constexpr size_t random_values = 1 << 20;

using Clock = std::chrono::steady_clock;

double ns_of(const std::function<void()>& call, int repeats) {
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) call();
  const std::chrono::duration<double, std::nano> spent = Clock::now() - start;
  return spent.count() / repeats;
}

int repeats_for(const std::function<void()>& call) {
  call();
  const double once = ns_of(call, 1);
  return once >= least_timed_ns ? 1 : int(least_timed_ns / (once + 1)) + 1;
}

template <class Range> void on_threads(const Range& range, uint64_t count, int threads) {
  run_ranges(
      [&](size_t first, size_t last) {
        range(first, last);
        return true;
      },
      block_count(count), threads);
}

uint64_t end_of(size_t last_block, uint64_t count) {
  return std::min<uint64_t>(last_block * block_elements, count);
}

// Zeros where PyTorch would put them: at a multiple of 64 bytes.
class AlignedFloats {
 public:
  explicit AlignedFloats(size_t count) : room_(count + 16) {
    const size_t past = reinterpret_cast<uintptr_t>(room_.data()) % 64 / sizeof(float);
    start_ = room_.data() + (16 - past) % 16;
  }
  float* data() { return start_; }
  float& operator[](size_t i) { return start_[i]; }

 private:
  std::vector<float> room_;
  float* start_;
};

// Everything one kernel works on.
class Workbench {
 public:
  explicit Workbench(const KernelCase& kernel)
      : kernel_(kernel),
        table_(kernel.table),
        values_(kernel.count),
        decoded_(kernel.count),
        planes_(kernel.bits * words_per_block * block_count(kernel.count)),
        headers_(2 * block_count(kernel.count)),
        levels_(size_t{1} << kernel.bits, 0.5f) {
    const size_t plane_words = words_per_block * block_count(kernel.count);
    for (int plane = 0; plane < kernel.bits; ++plane)
      starts_.push_back(planes_.data() + plane * plane_words);
    fill();
    encode();
  }

  void run() { kernel_.encode ? encode() : decode(); }

  void copy() {
    on_threads(
        [this](size_t first, size_t last) {
          const uint64_t from = first * block_elements, to = end_of(last, kernel_.count);
          std::memcpy(&decoded_[from], &values_[from], 4 * (to - from));
        },
        kernel_.count, kernel_.threads);
  }

 private:
  void fill() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < kernel_.count; ++i)
      values_[i] = i < random_values ? normal(random) : values_[i - random_values];
    if (kernel_.codec == "integers")
      for (size_t i = 0; i < kernel_.count; ++i) {
        const uint32_t item = random() & ((1u << kernel_.bits) - 1);
        std::memcpy(&values_[i], &item, 4);
      }
  }

  void encode() {
    Job job = code();
    job.source.data = values_.data();
    if (kernel_.codec == "rotated")
      spread(job, table_->encode_rotated);
    else if (kernel_.codec == "minmax")
      spread(job, table_->encode_minmax);
    else if (kernel_.codec == "mask")
      spread(job, table_->encode_mask);
    else if (kernel_.codec == "derivative")
      spread(job, table_->encode_derivative);
    else if (kernel_.codec == "integers")
      spread(job, table_->encode_integers);
    else
      throw std::invalid_argument("no codec " + kernel_.codec);
  }

  void decode() {
    Job job = code();
    job.target.data = decoded_.data();
    job.target.stream = 4 * kernel_.count >= stream_from_bytes;
    job.table = levels_.data();
    if (kernel_.codec == "rotated")
      spread(job, table_->decode_rotated);
    else if (kernel_.codec == "minmax")
      spread(job, table_->decode_minmax);
    else if (kernel_.codec == "mask")
      spread(job, table_->decode_mask);
    else if (kernel_.codec == "derivative")
      spread(job, table_->decode_derivative);
    else
      spread(job, table_->decode_integers);
  }

  Job code() {
    Job job;
    job.count = kernel_.count;
    job.bits = kernel_.bits;
    job.planes = starts_.data();
    job.headers = headers_.data();
    job.key = key;
    job.thresholds = kernel_.thresholds;
    job.levels = kernel_.levels;
    job.level_factor = 1.0f / 2048;
    job.high = 1;  // of a decoded mask: what a set bit stands for
    job.table = kernel_.lines;
    job.item_bytes = 4;
    return job;
  }

  void spread(const Job& job, Kernel kernel) {
    on_threads([&](size_t first, size_t last) { kernel(job, first, last); }, kernel_.count,
               kernel_.threads);
  }

  const KernelCase kernel_;
  const KernelTable* table_;
  AlignedFloats values_, decoded_;
  std::vector<uint32_t> planes_;
  std::vector<uint32_t*> starts_;
  std::vector<uint16_t> headers_;
  std::vector<float> levels_;
};

#if defined(__linux__)
// The traced child: stops, works once, stops again.
[[noreturn]] void work_between_stops(Workbench& bench) {
  if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(1);
  raise(SIGSTOP);
  bench.run();
  raise(SIGSTOP);
  _exit(0);
}

uint64_t steps_between_stops(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGSTOP) return 0;
  for (uint64_t steps = 0;; ++steps) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) return 0;
    waitpid(child, &status, 0);
    if (!WIFSTOPPED(status)) return 0;
    if (WSTOPSIG(status) == SIGSTOP) return steps;
  }
}
#endif

}  // namespace

std::vector<TimedPair> measure_kernel(const KernelCase& kernel, int rounds) {
  Workbench bench(kernel);
  const auto run = [&] { bench.run(); };
  const auto copy = [&] { bench.copy(); };
  const int runs = repeats_for(run), copies = repeats_for(copy);
  std::vector<TimedPair> pairs;
  for (int i = 0; i < rounds; ++i) {
    const double kernel_ns = ns_of(run, runs);
    pairs.push_back({kernel_ns, ns_of(copy, copies)});
  }
  return pairs;
}

double measure_read_ns(uint64_t count, int threads, int rounds) {
  const std::vector<uint64_t> words(count / 2, 1);
  std::vector<uint64_t> sums(block_count(count));
  const auto read = [&] {
    on_threads(
        [&](size_t first, size_t last) {
          uint64_t sum[8] = {};
          for (uint64_t i = first * block_elements / 2; i + 8 <= end_of(last, count) / 2; i += 8)
            for (int lane = 0; lane < 8; ++lane) sum[lane] ^= words[i + lane];
          for (uint64_t lane : sum) sums[first] ^= lane;
        },
        count, threads);
  };
  const int repeats = repeats_for(read);
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) times.push_back(ns_of(read, repeats));
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[rounds / 2];
}

uint64_t count_instructions(const KernelCase& kernel) {
#if defined(__linux__)
  KernelCase alone = kernel;
  alone.threads = 1;
  Workbench bench(alone);
  const pid_t child = fork();
  if (child < 0) return 0;
  if (child == 0) work_between_stops(bench);
  const uint64_t steps = steps_between_stops(child);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return steps;
#else
  (void)kernel;
  return 0;
#endif
}

}  // namespace daf
