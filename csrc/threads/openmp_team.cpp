#include "threads/team.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#endif

namespace daf {

#if defined(__linux__)
namespace {

// OpenMP as GCC's compiled code calls it; libgomp, libomp and libiomp5 have these names.
struct Team {
  void (*parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
  int (*most)();
  int (*own_number)();
  int (*is_inside)();
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
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
  TeamFunction function;
  void* data;
  int threads;
};

void join(void* opaque) {
  const Call& call = *static_cast<const Call*>(opaque);
  if (call.team.own_number() < call.threads) call.function(call.data);
}

}  // namespace

int team_threads() {
  const Team* team = the_team();
  return team && !team->is_inside() ? team->most() : 0;
}

// Always the whole team: a smaller one would end the other threads.
bool run_on_team(TeamFunction function, void* data, int threads) {
  const int most = team_threads();
  if (threads > most) return false;
  Call call{*the_team(), function, data, threads};
  call.team.parallel(join, &call, unsigned(most), 0);
  return true;
}

#else

int team_threads() { return 0; }
bool run_on_team(TeamFunction, void*, int) { return false; }

#endif

}  // namespace daf
