// A million random operations from several threads against a model.
//
// Usage: stress OPERATIONS SEED. The threads allocate, free each other's blocks, change cap and
// limit, trim, and install and remove; at every pause the statistics must equal the model's.
// Ends with 0 and "ok", or with a message and 1. Built with sanitizers by test_recycling_native.py.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "allocator/allocator.h"

extern "C" int fake_allocate(void** pointer, size_t alignment, size_t bytes);
extern "C" int scratch_allocate(void** pointer, size_t alignment, size_t bytes);
extern "C" void* fake_aligned(size_t alignment, size_t bytes);
extern "C" void fake_free(void* pointer);
extern "C" void* fake_realloc(void* pointer, size_t bytes);
extern "C" void* array_malloc(size_t bytes);
extern "C" void* array_calloc(size_t bytes);
extern "C" void* array_realloc(void* pointer, size_t bytes);
extern "C" void array_free(void* pointer);
extern "C" size_t array_usable_size(void* pointer);
extern "C" void other_free(void* pointer);
extern "C" void* other_malloc(size_t bytes);

namespace {

using namespace daf;

constexpr int thread_count = 4;
constexpr uint64_t mib = 1 << 20;

void require(bool holds, const char* what, uint64_t found = 0, uint64_t expected = 0) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s (found %llu, expected %llu)\n", what,
               static_cast<unsigned long long>(found), static_cast<unsigned long long>(expected));
  std::_Exit(1);
}

struct Held {
  char* pointer;
  uint64_t bytes;
  uint64_t stamp;
};

// The model: every living block by value, exchanged between threads.
class Model {
 public:
  void put(Held block) {
    const std::lock_guard<std::mutex> guard(mutex_);
    blocks_.push_back(block);
    live_bytes_ += block.bytes;
  }
  bool take(uint64_t choice, Held* block) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (blocks_.empty()) return false;
    std::swap(blocks_[choice % blocks_.size()], blocks_.back());
    *block = blocks_.back();
    blocks_.pop_back();
    live_bytes_ -= block->bytes;
    return true;
  }
  std::vector<Held>& blocks() { return blocks_; }
  uint64_t live_bytes() const { return live_bytes_; }

 private:
  std::mutex mutex_;
  std::vector<Held> blocks_;
  std::atomic<uint64_t> live_bytes_{0};
};

// A few words spread over the block, its ends included: enough to notice any overlap.
template <class Visit> void each_word_of_the_first(uint64_t bytes, const Held& block, Visit visit) {
  constexpr uint64_t stride = mib / 8;
  for (uint64_t at = 0; at + 16 <= bytes; at += stride) visit(block.pointer + at);
}

template <class Visit> void each_word(const Held& block, Visit visit) {
  each_word_of_the_first(block.bytes, block, visit);
  visit(block.pointer + (block.bytes - 8));
}

void write_stamp(const Held& block) {
  each_word(block, [&](char* at) { std::memcpy(at, &block.stamp, 8); });
}

void check_word(const char* at, uint64_t stamp) {
  uint64_t found;
  std::memcpy(&found, at, 8);
  require(found == stamp, "a block was overwritten", found, stamp);
}

void check_stamp(const Held& block) {
  each_word(block, [&](char* at) { check_word(at, block.stamp); });
}

class Pause {
 public:
  // Every thread waits here; the last one checks while the others stand still.
  template <class Check> void wait(Check check) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++waiting_ == thread_count) {
      check();
      waiting_ = 0;
      ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int waiting_ = 0;
  int round_ = 0;
};

Model model;
Pause pause_point;
std::atomic<uint64_t> next_stamp{1};

uint64_t random_bytes(std::mt19937_64& random) {
  const uint64_t kind = random() % 100;
  if (kind < 70) return 16 + random() % 4096;
  if (kind < 92) return 16 + random() % (mib - 16);
  if (kind < 99) return mib + random() % (2 * mib);
  return mib + random() % (12 * mib);
}

uint64_t random_large_bytes(std::mt19937_64& random) {
  return (large_from_bytes + random() % (3 * mib)) / 8 * 8 + 8;
}

// Only large arrays are in the account.
void allocate_array(std::mt19937_64& random) {
  Held block{nullptr, random_large_bytes(random), next_stamp++};
  if (random() % 2) {
    block.pointer = static_cast<char*>(array_malloc(block.bytes));
  } else {
    block.pointer = static_cast<char*>(array_calloc(block.bytes - 8));
    const Held zeros{block.pointer, block.bytes, 0};
    if (zeros.pointer) check_stamp(zeros);
  }
  if (!block.pointer) return;
  write_stamp(block);
  model.put(block);
}

void resize_array(std::mt19937_64& random) {
  Held block;
  if (!model.take(random(), &block)) return;
  check_stamp(block);
  if (block.bytes >= large_from_bytes) {
    const uint64_t bytes = random_large_bytes(random);
    if (void* moved = array_realloc(block.pointer, bytes)) {
      block.pointer = static_cast<char*>(moved);
      each_word_of_the_first(std::min(block.bytes, bytes), block,
                             [&](char* at) { check_word(at, block.stamp); });
      block.bytes = bytes;
      write_stamp(block);
    }
  }
  model.put(block);
}

void allocate_one(std::mt19937_64& random) {
  if (random() % 16 == 0) return allocate_array(random);
  if (random() % 32 == 0) return resize_array(random);
  Held block{nullptr, random_bytes(random), next_stamp++};
  void* pointer = nullptr;
  if (random() % 8 == 0) {
    pointer = fake_aligned(64, block.bytes / 64 * 64 + 64);
    block.bytes = block.bytes / 64 * 64 + 64;
  } else if (fake_allocate(&pointer, 64, block.bytes) != 0) {
    pointer = nullptr;
  }
  if (!pointer) return;  // at the limit; `check` tells whether that could be
  require(reinterpret_cast<uintptr_t>(pointer) % 64 == 0, "alignment");
  block.pointer = static_cast<char*>(pointer);
  write_stamp(block);
  model.put(block);
}

void free_one(std::mt19937_64& random) {
  Held block;
  if (!model.take(random(), &block)) return;
  check_stamp(block);
  // Large blocks may end anywhere; small ones in the library that counts them.
  if (block.bytes >= large_from_bytes && random() % 4 == 0) {
    (random() % 2 ? other_free : array_free)(block.pointer);
  } else {
    fake_free(block.pointer);
  }
}

void disturb(std::mt19937_64& random) {
  switch (random() % 6) {
    case 0: allocator::set_cap(random() % (256 * mib)); break;
    case 1: allocator::set_cap(no_limit); break;
    case 2: allocator::trim(random() % (64 * mib)); break;
    case 3: allocator::set_limit(128 * mib + random() % (512 * mib)); break;
    case 4: allocator::set_limit(no_limit); break;
    case 5: other_free(other_malloc(random() % 10000)); break;
  }
}

void check_account() {
  Account& account = allocator::account();
  require(account.live.current() == model.live_bytes(), "live bytes", account.live.current(),
          model.live_bytes());
  uint64_t large = 0, large_held = 0, small_held = 0;
  for (const Held& block : model.blocks()) {
    if (block.bytes >= large_from_bytes) {
      ++large;
    } else {
      small_held += (block.bytes + 8 + 15) / 16 * 16;
    }
  }
  const std::vector<LiveBlock> living = allocator::live_blocks();
  require(living.size() == large, "number of large blocks", living.size(), large);
  for (const LiveBlock& block : living) {
    require(block.held_bytes >= block.bytes, "a block shorter than asked");
    large_held += block.held_bytes;
  }
  const uint64_t held = large_held + small_held + account.recycled.current();
  require(account.small.current() == small_held, "small bytes", account.small.current(),
          small_held);
  require(account.held.current() == held, "held bytes", account.held.current(), held);
  const allocator::Settings settings = allocator::settings();
  require(account.recycled.current() <= settings.cap_bytes, "recycled above its cap",
          account.recycled.current(), settings.cap_bytes);
  if (account.recycled.current() > 0) {
    require(held <= settings.limit_bytes, "recycled blocks kept above the limit", held,
            settings.limit_bytes);
  }
}

void work(uint64_t operations, uint64_t seed) {
  std::mt19937_64 random(seed);
  constexpr uint64_t pauses = 20;
  for (uint64_t pause = 0; pause < pauses; ++pause) {
    for (uint64_t index = 0; index < operations / pauses; ++index) {
      const uint64_t kind = random() % 1000;
      const bool many = model.live_bytes() > 200 * mib;
      if (kind < 1) {
        disturb(random);
      } else if (kind < (many ? 450 : 520)) {
        allocate_one(random);
      } else {
        free_one(random);
      }
    }
    pause_point.wait(check_account);
  }
}

void run_threads(uint64_t operations, uint64_t seed) {
  std::vector<std::thread> threads;
  for (int index = 0; index < thread_count; ++index) {
    threads.emplace_back(work, operations / thread_count, seed + uint64_t(index));
  }
  for (std::thread& thread : threads) thread.join();
}

void free_all() {
  Held block;
  while (model.take(0, &block)) {
    check_stamp(block);
    fake_free(block.pointer);
  }
}

// Threads allocate without pause while one installs and removes.
void install_and_remove(int times) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int index = 0; index < thread_count - 1; ++index) {
    threads.emplace_back([&stop, index] {
      std::mt19937_64 random(uint64_t(1000 + index));
      while (!stop) {
        if (random() % 2) {
          allocate_one(random);
        } else {
          free_one(random);
        }
      }
    });
  }
  for (int index = 0; index < times; ++index) {
    allocator::remove();
    if (index % 3 == 0) allocator::refresh();
    require(allocator::install().empty(), "installing again");
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

void limit_holds() {
  allocator::set_cap(no_limit);
  allocator::trim(no_limit);
  allocator::set_limit(allocator::account().held.current() + 8 * mib);
  void* first = nullptr;
  void* second = nullptr;
  require(fake_allocate(&first, 64, 6 * mib) == 0, "6 of 8 MiB");
  require(fake_allocate(&second, 64, 3 * mib) == ENOMEM, "9 of 8 MiB must fail");
  require(!allocator::charge_external(3 * mib), "the pool is under the same limit");
  require(allocator::charge_external(mib), "7 of 8 MiB");
  require(fake_allocate(&second, 64, 3 * mib / 2) == ENOMEM, "8.5 of 8 MiB must fail");
  require(!array_malloc(3 * mib / 2) && errno == ENOMEM, "of an array, too");
  require(!array_calloc(3 * mib / 2), "or of zeros");
  fake_free(first);  // 6 MiB recycled, 1 MiB in the pool
  require(fake_allocate(&second, 64, 7 * mib) == 0, "recycled blocks make room");
  fake_free(second);
  allocator::discharge_external(mib);
  allocator::set_limit(no_limit);
}

// Kernels' scratch, whose refusal would be a crash, and small objects up to 1 MiB.
void what_must_be_served_is() {
  allocator::trim(no_limit);
  Account& account = allocator::account();
  allocator::set_limit(account.held.current());
  const uint64_t before = account.held.current(), overdrafts = account.overdrafts.value();
  void* found[4] = {};
  require(fake_allocate(&found[0], 64, 16384) == 0, "a small object beyond the limit");
  require(scratch_allocate(&found[1], 4096, 3 * mib) == 0, "scratch beyond the limit");
  require(scratch_allocate(&found[2], 64, 100000) == 0, "small scratch beyond the limit");
  require(scratch_allocate(&found[3], 64, 9 * mib) == 0, "scratch aligned as tensors are");
  require(account.overdrafts.value() - overdrafts == 4, "overdrafts",
          account.overdrafts.value() - overdrafts, 4);
  void* refused = nullptr;
  require(fake_allocate(&refused, 4096, 16385) == ENOMEM, "a tensor beyond the limit must fail");
  require(fake_allocate(&refused, 64, mib) == ENOMEM, "a large one, too");
  std::vector<void*> small;
  for (void* each = nullptr; fake_allocate(&each, 64, 16384) == 0;) small.push_back(each);
  require(small.size() == mib / 16384 - 1, "a bound for small objects", small.size(),
          mib / 16384 - 1);
  for (void* each : small) fake_free(each);
  for (void* each : found) fake_free(each);
  require(account.held.current() == before, "nothing freed is kept above the limit",
          account.held.current(), before);
  allocator::set_limit(no_limit);
}

void a_chosen_request_is_refused() {
  Account& account = allocator::account();
  const uint64_t refusals = account.refusals.value();
  void* found[3] = {};
  allocator::refuse_after(1);
  require(scratch_allocate(&found[0], 64, 64) == 0, "scratch does not count");
  require(fake_allocate(&found[1], 64, 64) == 0, "the first");
  require(fake_allocate(&found[2], 64, 64) == ENOMEM, "the second");
  require(fake_allocate(&found[2], 64, 64) == 0, "no other");
  require(account.refusals.value() - refusals == 1, "refusals", account.refusals.value(), 1);
  for (void* each : found) fake_free(each);
}

// What a reused block holds beyond its size makes room before anything is refused.
void live_blocks_are_fitted() {
  Account& account = allocator::account();
  allocator::trim(no_limit);
  void* larger = nullptr;
  require(fake_allocate(&larger, 64, 10 * mib) == 0, "before reuse");
  fake_free(larger);
  void* reused = nullptr;
  require(fake_allocate(&reused, 64, 9 * mib - 4096) == 0, "reuse");
  const Held block{static_cast<char*>(reused), 9 * mib - 4096, 77};
  write_stamp(block);
  const uint64_t usable = array_usable_size(reused);
  require(usable == block.bytes, "nobody may use the excess", usable, block.bytes);
  const uint64_t held = account.held.current();
  allocator::set_limit(held);
  void* next = nullptr;
  require(fake_allocate(&next, 64, mib) == 0, "live blocks give their excess back");
  require(account.held.current() <= held, "within the limit", account.held.current(), held);
  check_stamp(block);
  fake_free(next);
  require(fake_allocate(&next, 64, 4 * mib) == ENOMEM, "no more than their excess");
  fake_free(reused);
  allocator::set_limit(no_limit);
}

// At the limit a block shorter than a slot of 2 MiB is a recycled one of another size, and a longer
// one's last slot takes such a block's pages; within it every size has blocks of its own.
void short_blocks_change_size() {
  Account& account = allocator::account();
  allocator::trim(no_limit);
  void* kept = nullptr;
  require(fake_allocate(&kept, 64, mib / 2) == 0, "a short block");
  const Held block{static_cast<char*>(kept), mib / 2, 5};
  write_stamp(block);
  const auto served = [&](uint64_t bytes, uint64_t fresh_bytes, const char* what) {
    const uint64_t before = account.fresh_bytes.value();
    void* found = nullptr;
    require(fake_allocate(&found, 64, bytes) == 0, what);
    std::memset(found, 3, bytes);
    require(account.fresh_bytes.value() - before == fresh_bytes, what,
            account.fresh_bytes.value() - before, fresh_bytes);
    fake_free(found);
  };
  const uint64_t before = account.held.current();
  allocator::set_limit(before + 8 * mib);
  served(mib, mib, "the first short one");
  served(mib / 2, mib / 2, "within the limit another size is another block");
  served(mib, 0, "which the first one waits for");
  require(account.held.current() == before + 3 * mib / 2, "both are kept");
  allocator::set_limit(before + 3 * mib / 2);
  served(5 * mib / 4, mib / 4, "at the limit the nearest one grows");
  served(3 * mib / 4, 0, "or shrinks");
  require(account.held.current() <= before + 3 * mib / 2, "within the limit");
  allocator::set_limit(no_limit);
  served(mib / 4, 0, "without a limit the nearest one shrinks");
  allocator::trim(no_limit);
  served(mib, mib, "the one that follows");
  served(3 * mib, 2 * mib, "a longer one takes its pages into the last slot");
  require(account.recycled.current() == 3 * mib, "and nothing else is held",
          account.recycled.current(), 3 * mib);
  check_stamp(block);
  fake_free(kept);
}

void fork_works() {
  void* shared = nullptr;
  require(fake_allocate(&shared, 64, 4 * mib) == 0, "before fork");
  std::memset(shared, 7, 4 * mib);
  std::atomic<bool> stop{false};
  std::thread busy([&stop] {
    std::mt19937_64 random(5);
    while (!stop) {
      allocate_one(random);
      free_one(random);
    }
  });
  for (int index = 0; index < 10; ++index) {
    const pid_t child = fork();
    if (child == 0) {
      void* own = nullptr;
      array_free(array_realloc(array_calloc(3 * mib), 5 * mib));
      const bool good =
          fake_allocate(&own, 64, 5 * mib) == 0 && static_cast<char*>(shared)[3 * mib] == 7;
      if (own) std::memset(own, 1, 5 * mib);
      fake_free(own);
      fake_free(shared);
      _exit(good ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child", uint64_t(status));
  }
  stop = true;
  busy.join();
  require(static_cast<char*>(shared)[mib] == 7, "the parent's block after the fork");
  fake_free(shared);
}

void grow_by_realloc() {
  void* pointer = nullptr;
  require(fake_allocate(&pointer, 64, 2 * mib) == 0, "before realloc");
  static_cast<char*>(pointer)[2 * mib - 1] = 9;
  pointer = fake_realloc(pointer, 3 * mib);
  require(pointer && static_cast<char*>(pointer)[2 * mib - 1] == 9, "realloc moves the content");
  other_free(pointer);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t operations = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const bool with_fork = argc <= 3 || std::strcmp(argv[3], "nofork") != 0;
  void* before = nullptr;
  require(fake_allocate(&before, 64, 3 * mib) == 0, "before installation");
  const std::string problem = allocator::install();
  if (!problem.empty()) {
    std::fprintf(stderr, "%s\n", problem.c_str());
    return 1;
  }
  fake_free(before);
  run_threads(operations, seed);
  free_all();
  allocator::set_limit(no_limit);
  check_account();
  limit_holds();
  what_must_be_served_is();
  a_chosen_request_is_refused();
  live_blocks_are_fitted();
  short_blocks_change_size();
  grow_by_realloc();
  if (with_fork) fork_works();
  free_all();
  check_account();
  install_and_remove(100);
  allocator::remove();
  free_all();
  require(allocator::surviving_blocks() == 0, "survivors", allocator::surviving_blocks());
  require(allocator::account().held.current() == 0, "held at the end",
          allocator::account().held.current());
  allocator::refresh();
  std::puts("ok");
  return 0;
}
