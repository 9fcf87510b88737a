#include "threads/threads.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>
#endif

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "threads/float_mode.h"

namespace daf {
namespace {

constexpr size_t piece_blocks = 128;  // 128 KiB of float32: about a core's share of the L2 cache
constexpr size_t least_blocks_per_thread = 2 * piece_blocks;

// One call of run_ranges: threads take pieces from `next` until none is left.
struct Work {
  const RangeFunction& function;
  size_t blocks, piece;
  std::atomic<size_t> next{0};
  std::atomic<bool> good{true};

  void take_pieces() {
    const DefaultFloatMode mode;
    for (;;) {
      const size_t first = next.fetch_add(piece, std::memory_order_relaxed);
      if (first >= blocks) return;
      const size_t last = std::min(first + piece, blocks);
      if (!function(first, last)) good.store(false, std::memory_order_relaxed);
    }
  }
};

#if defined(__linux__)
// OpenMP as GCC's compiled code calls it; libgomp, libomp and libiomp5 have these names.
struct Team {
  void (*parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
  int (*most)();
  int (*own_number)();
  int (*is_inside)();
};

template <class Function> bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// Finds them in the library that PyTorch was linked with, whatever others are loaded.
bool find(Team& team) {
  void* library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!library) return false;
  return find(library, "GOMP_parallel", team.parallel) &&
         find(library, "omp_get_max_threads", team.most) &&
         find(library, "omp_get_thread_num", team.own_number) &&
         find(library, "omp_in_parallel", team.is_inside);
}

std::atomic<bool> forked{false};

// A child process inherits no threads, and OpenMP would wait for its parent's for ever.
const Team* the_team() {
  static const Team* const found = []() -> const Team* {
    static Team team;
    if (!find(team)) return nullptr;
    pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
    return &team;
  }();
  return found && !forked.load(std::memory_order_relaxed) ? found : nullptr;
}

struct Call {
  const Team& team;
  Work& work;
  int threads;
};

void join(void* opaque) {
  const Call& call = *static_cast<const Call*>(opaque);
  if (call.team.own_number() < call.threads) call.work.take_pieces();
}

// On up to `threads` of PyTorch's, the caller included: always the whole team, since a smaller one
// would end the other threads. False, with nothing done, if there are too few.
bool run_on_team(Work& work, int threads) {
  const int most = team_threads();
  if (threads > most) return false;
  Call call{*the_team(), work, threads};
  call.team.parallel(join, &call, unsigned(most), 0);
  return true;
}
#else
bool run_on_team(Work&, int) { return false; }
#endif

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

bool run_pieces(Work&& work, int threads) {
  if (threads < 2)
    work.take_pieces();
  else if (!run_on_team(work, threads))
    run_on_own_threads(work, threads);
  return work.good;
}

}  // namespace

int team_threads() {
#if defined(__linux__)
  const Team* team = the_team();
  return team && !team->is_inside() ? team->most() : 0;
#else
  return 0;
#endif
}

size_t useful_threads(size_t blocks, int threads) {
  return std::clamp<size_t>(blocks / least_blocks_per_thread, 1, size_t(std::max(threads, 1)));
}

bool run_ranges(const RangeFunction& function, size_t blocks, int threads) {
  const size_t used = useful_threads(blocks, threads);
  return run_pieces({function, blocks, used == 1 ? blocks : piece_blocks}, int(used));
}

bool run_shares(const RangeFunction& function, size_t shares) {
  return run_pieces({function, shares, 1}, int(shares));
}

}  // namespace daf
