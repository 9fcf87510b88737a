// Random operations on one pool from several threads, every page's content checked.
//
// Usage: pool_stress OPERATIONS SEED. Each thread writes its own byte into all that it allocates
// and must find it in whatever planes are left, while others evict, move the cap and misuse
// handles. Ends with 0 and "ok", or with a message and 1. Built with sanitizers by
// test_pool_native.py.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "pool/pool.h"

using namespace daf::paging;

namespace {

constexpr int threads = 3;
std::atomic<bool> good{true};

void expect(bool condition, const char* what) {
  if (!condition && good.exchange(false)) std::fprintf(stderr, "%s\n", what);
}

template <class Work> void for_each_page(const View& view, Work work) {
  for (uint64_t run = 0; run < view.runs; ++run)
    for (int plane = 0; plane < view.kept_bits(run); ++plane)
      work(reinterpret_cast<uint8_t*>(view.plane(plane, run)));
}

class Worker {
 public:
  Worker(Pool& pool, uint64_t seed, uint8_t mark) : pool_(pool), random_(seed), mark_(mark) {}

  void work(int operations) {
    for (int i = 0; i < operations && good; ++i) {
      try {
        step();
      } catch (const FullError&) {
      }
    }
    for (const uint64_t handle : tensors_) pool_.release(handle);
  }

 private:
  void step() {
    const uint64_t choice = random_() % 20;
    if (choice < 7 || tensors_.empty()) return allocate();
    if (choice < 12) return release();
    if (choice < 16) return check(any());
    if (choice < 19) return press();
    misuse();
  }

  uint64_t any() { return tensors_[random_() % tensors_.size()]; }

  void allocate() {
    const int bits = 1 + int(random_() % 8), minimum = 1 + int(random_() % bits);
    double importance[8];
    for (double& each : importance) each = double(random_() % 5);
    Request request{random_() % 100000, bits, minimum, random_() % 2 == 0, importance, mark_};
    request.page_bytes = uint64_t(256) << 2 * (random_() % 4);  // if nothing lives just now
    const uint64_t handle = pool_.allocate(request);
    for_each_page(pool_.pin(handle),
                  [&](uint8_t* page) { std::memset(page, mark_, pool_.page_bytes()); });
    pool_.unpin(handle);
    pool_.unpin(handle);
    tensors_.push_back(handle);
  }

  void release() {
    std::swap(tensors_[random_() % tensors_.size()], tensors_.back());
    check(tensors_.back());
    pool_.release(tensors_.back());
    tensors_.pop_back();
  }

  void check(uint64_t handle) {
    for_each_page(pool_.pin(handle), [&](uint8_t* page) {
      expect(page[0] == mark_ && page[pool_.page_bytes() - 1] == mark_, "a page changed owner");
    });
    pool_.unpin(handle);
  }

  void press() {
    pool_.set_cap(random_() % 8 ? 300000 + random_() % 1000000 : no_cap);
    pool_.evict(random_() % 20000);
    pool_.trim();
  }

  void misuse() {
    const uint64_t foreign = any() + (uint64_t(1) << 50);
    try {
      pool_.release(foreign);
      expect(false, "a handle that nobody was given was released");
    } catch (const MisuseError&) {
    }
  }

  Pool& pool_;
  std::mt19937_64 random_;
  uint8_t mark_;
  std::vector<uint64_t> tensors_;
};

// The pool is empty again and again, and its pages change size between any two tensors.
void resize(int operations, uint64_t seed) {
  Pool pool({uint64_t(1) << 32, 4096, no_cap, 0, false, true});
  std::atomic<int> working{threads};
  std::vector<std::thread> running;
  for (int i = 1; i <= threads; ++i)
    running.emplace_back([&, i] {
      for (int done = 0; done < operations && good; ++done)
        Worker(pool, seed + i + uint64_t(done), uint8_t(i)).work(2);
      --working;
    });
  running.emplace_back([&] {
    while (working)
      for (const uint64_t page_bytes : {32, 1 << 20}) {
        const double importance = 0;
        try {
          pool.release(pool.allocate({1, 1, 1, false, &importance, 0, 0, page_bytes}), true);
        } catch (const FullError&) {  // by a cap of a worker's
        }
      }
  });
  for (std::thread& each : running) each.join();
  pool.set_cap(no_cap);
  expect(pool.is_sound(), "the parts of the pool disagree");
  expect(pool.statistics().live_pages == 0, "pages are left");
}

void stress(uint64_t page_bytes, int operations, uint64_t seed) {
  Pool pool({uint64_t(1) << 32, page_bytes, no_cap, 0, false, true});
  std::vector<std::thread> running;
  for (int i = 1; i <= threads; ++i)
    running.emplace_back(
        [&pool, operations, seed, i] { Worker(pool, seed + i, uint8_t(i)).work(operations); });
  for (std::thread& each : running) each.join();
  pool.set_cap(no_cap);
  expect(pool.is_sound(), "the parts of the pool disagree");
  expect(pool.statistics().live_pages == 0, "pages are left");
  expect(pool.statistics().evicted_pages > 0, "nothing was ever evicted");
}

}  // namespace

int main(int, char** arguments) {
  const int operations = std::atoi(arguments[1]) / (3 * threads);
  for (const uint64_t page_bytes : {256, 4096, 16384})
    stress(page_bytes, operations, std::strtoull(arguments[2], nullptr, 10));
  resize(operations / 10, std::strtoull(arguments[2], nullptr, 10));
  if (good) std::puts("ok");
  return good ? 0 : 1;
}
