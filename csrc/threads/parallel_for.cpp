#include "threads/threads.h"

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "threads/float_mode.h"
#include "threads/team.h"

namespace daf {
namespace {

constexpr size_t piece_blocks = 128;  // 128 KiB of float32: about a core's share of the L2 cache
constexpr size_t least_blocks_per_thread = 2 * piece_blocks;

// One call of run_ranges: threads take pieces from `next` until none is left.
struct Work {
  RangeFunction function;
  const void* job;
  size_t blocks;
  size_t piece;
  std::atomic<size_t> next{0};
  std::atomic<bool> good{true};

  void take_pieces() {
    const DefaultFloatMode mode;
    for (;;) {
      const size_t first = next.fetch_add(piece, std::memory_order_relaxed);
      if (first >= blocks) return;
      const size_t last = first + piece < blocks ? first + piece : blocks;
      if (!function(job, first, last)) good.store(false, std::memory_order_relaxed);
    }
  }
};

// On threads of the call's own where PyTorch's cannot be used; fewer if the system gives no more.
void run_on_own_threads(Work& work, int threads) {
  std::vector<std::thread> helpers;
  try {
    for (int i = 1; i < threads; ++i) helpers.emplace_back([&work] { work.take_pieces(); });
  } catch (const std::system_error&) {
  }
  work.take_pieces();
  for (std::thread& helper : helpers) helper.join();
}

void take_pieces(void* work) { static_cast<Work*>(work)->take_pieces(); }

bool run_pieces(Work&& work, int threads) {
  if (threads < 2)
    work.take_pieces();
  else if (!run_on_team(take_pieces, &work, threads))
    run_on_own_threads(work, threads);
  return work.good;
}

}  // namespace

size_t useful_threads(size_t blocks, int threads) {
  const size_t useful = blocks / least_blocks_per_thread;
  const size_t allowed = threads < 1 ? 1 : size_t(threads);
  const size_t most = useful < allowed ? useful : allowed;
  return most < 1 ? 1 : most;
}

bool run_ranges(RangeFunction function, const void* job, size_t blocks, int threads) {
  const size_t used = useful_threads(blocks, threads);
  return run_pieces({function, job, blocks, used == 1 ? blocks : piece_blocks}, int(used));
}

bool run_shares(RangeFunction function, const void* job, size_t shares) {
  return run_pieces({function, job, shares, 1}, int(shares));
}

}  // namespace daf
