// What the allocator is made of; one per process, for its own files only.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "allocator/allocator.h"
#include "allocator/redirections.h"
#include "allocator/refusals.h"
#include "allocator/small.h"

namespace daf::allocator {

struct State {
  Account account;
  BlockHeap heap{account};
  SmallBlocks small;
  Refusals refusals{account};
  EventRecorder events;
  std::mutex install_mutex;
  Relocations relocations{redirections(), library_of};
  std::atomic<int> installed{0};  // written under install_mutex
  std::mutex settings_mutex;
  Settings settings;
  std::atomic<Reclaim> reclaim{nullptr};
  std::unordered_map<std::string, uint32_t> label_numbers{{"", 0}};
  std::vector<std::string> label_texts{""};

  void forget_owners_locked() {
    installed = 0;
    settings = Settings();
    account.limit.store(no_limit);
    reclaim = nullptr;
    heap.close_locked();
    small.close_locked();
  }

  void lock() {
    install_mutex.lock();
    settings_mutex.lock();
    heap.lock();
    small.lock();
    events.lock();
  }
  void unlock() {
    events.unlock();
    small.unlock();
    heap.unlock();
    settings_mutex.unlock();
    install_mutex.unlock();
  }
};

State& state();

inline thread_local uint32_t current_label = 0;
inline thread_local bool reclaiming = false;  // this thread is in the reclaim hook

void release_large(void* pointer);
// Removes a block that glibc serves from the account, if it is in it.
void forget_small(void* pointer);

}  // namespace daf::allocator
