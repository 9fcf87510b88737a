#include "threads/threads.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "threads/float_mode.h"
#include "threads/team.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

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
  int busy = 0;  // helpers inside; guarded by the pool's mutex

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

// Sleeping helpers where PyTorch's threads cannot be used. Never destroyed: they outlive main.
class Pool {
 public:
  void run(Work& work, int helpers) {
    offer(work, helpers);
    work.take_pieces();
    withdraw(work);
  }

 private:
  void offer(Work& work, int helpers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (size_ < helpers && add_helper()) {
    }
    for (int i = 0; i < helpers && i < size_; ++i) {
      offers_.push_back(&work);
      offered_.notify_one();
    }
  }

  // Withdraws untaken offers, then waits for the helpers inside.
  void withdraw(Work& work) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (auto offer = offers_.begin(); offer != offers_.end();)
      offer = *offer == &work ? offers_.erase(offer) : offer + 1;
    finished_.wait(lock, [&] { return work.busy == 0; });
  }

  // False if the system gives no more threads: fewer then do the work.
  bool add_helper() {
    try {
      std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    ++size_;
    return true;
  }

  void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      offered_.wait(lock, [&] { return !offers_.empty(); });
      Work& work = *offers_.front();
      offers_.pop_front();
      ++work.busy;
      lock.unlock();
      work.take_pieces();
      lock.lock();
      if (--work.busy == 0) finished_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable offered_, finished_;
  std::deque<Work*> offers_;
  int size_ = 0;
};

std::atomic<Pool*> pool{nullptr};

// A child process inherits no helpers and perhaps a locked mutex: it makes a pool of its own.
void forget_pool() { pool.store(nullptr); }

Pool& shared_pool() {
  static const bool registered = [] {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, forget_pool);
#endif
    return true;
  }();
  (void)registered;
  Pool* current = pool.load();
  if (current) return *current;
  Pool* fresh = new Pool;
  if (pool.compare_exchange_strong(current, fresh)) return *fresh;
  delete fresh;
  return *current;
}

void take_pieces(void* work) { static_cast<Work*>(work)->take_pieces(); }

bool run_pieces(Work&& work, int threads) {
  if (threads < 2)
    work.take_pieces();
  else if (!run_on_team(take_pieces, &work, threads))
    shared_pool().run(work, threads - 1);
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
