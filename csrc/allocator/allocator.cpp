#include "allocator/allocator.h"

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>

#include "allocator/state.h"

namespace daf::allocator {
namespace {

// Addresses are free: reserving many times the memory makes their fragmentation harmless.
constexpr uint64_t range_per_memory = 16;

// A child has only the forking thread, so every lock must be free. It has no limit and no account:
// calls pass through to the C library until it installs again. It drops its recycled pages, so that
// the parent's next writes copy none.
State* make_state() {
  auto* made = new State;
  const auto in_child = [] {
    state().forget_owners_locked();
    state().unlock();
  };
  pthread_atfork([] { state().lock(); }, [] { state().unlock(); }, in_child);
  return made;
}

// Enters bytes outside the heap into the account; room comes from recycled blocks, then the pool.
bool charge(uint64_t bytes, bool may_reclaim) {
  Account& account = state().account;
  while (const uint64_t over = account.hold(bytes)) {
    if (state().heap.shed(over) > 0) {
      account.emptied.add();
    } else if (!may_reclaim || ask_for_room(over) == 0) {
      return false;
    }
  }
  return true;
}

// What glibc's heap takes for a block: an 8-byte header, rounded up to 16.
uint64_t small_held_bytes(uint64_t bytes) { return (bytes + 8 + 15) / 16 * 16; }

void enter_small(uint64_t bytes) {
  Account& account = state().account;
  account.live.add(bytes);
  account.small.add(small_held_bytes(bytes));
  account.small_allocations.add();
  account.note_watermark();
}

void leave_small(uint64_t bytes) {
  Account& account = state().account;
  account.live.subtract(bytes);
  account.small.subtract(small_held_bytes(bytes));
  account.held.subtract(small_held_bytes(bytes));
}

int allocate_small(void** pointer, size_t alignment, size_t bytes, bool must) {
  if (!charge(small_held_bytes(bytes), true)) {
    if (!must && !state().refusals.may_overdraw(bytes)) return state().refusals.refuse();
    state().account.overdraw(small_held_bytes(bytes));
  }
  const int failed = ::posix_memalign(pointer, std::max(alignment, small_alignment), bytes);
  if (!failed && state().small.insert({reinterpret_cast<uintptr_t>(*pointer), bytes})) {
    enter_small(bytes);
    state().events.note(*pointer, int64_t(bytes), current_label);
  } else {
    state().account.held.subtract(small_held_bytes(bytes));
  }
  return failed;
}

int allocate_large(void** pointer, size_t alignment, size_t bytes, bool must) {
  bool overdraws = false;
  for (;;) {
    uint64_t over_bytes = 0;
    switch (state().heap.allocate(bytes, current_label, overdraws, pointer, &over_bytes)) {
      case Served::yes: state().events.note(*pointer, int64_t(bytes), current_label); return 0;
      case Served::no_memory: return allocate_small(pointer, alignment, bytes, must);
      case Served::over_limit:
        if (ask_for_room(over_bytes) > 0) continue;
        if (!must) return state().refusals.refuse();
        overdraws = true;
    }
  }
}

}  // namespace

// Never destroyed: other libraries' destructors free blocks while the process ends.
State& state() {
  static State* const only = make_state();
  return *only;
}

void release_large(void* pointer) {
  const int saved = errno;  // free never changes it
  // Noted first: once released, the address may be another thread's.
  state().events.note(pointer, -1, current_label);
  state().heap.release(pointer);
  errno = saved;
}

void forget_small(void* pointer) {
  const SmallBlock known = state().small.remove(pointer);
  if (!known.address) return;
  state().events.note(pointer, -1, current_label);
  leave_small(known.bytes);
}

int allocate(void** pointer, size_t alignment, size_t bytes, bool must) {
  const bool is_alignment = alignment >= sizeof(void*) && std::has_single_bit(alignment);
  if (bytes == 0 || !is_alignment) return ::posix_memalign(pointer, alignment, bytes);
  const bool large = bytes >= large_from_bytes && alignment <= slot_bytes;
  return large ? allocate_large(pointer, alignment, bytes, must)
               : allocate_small(pointer, alignment, bytes, must);
}

void release(void* pointer) {
  if (state().heap.owns(pointer)) return release_large(pointer);
  forget_small(pointer);
  ::free(pointer);
}

std::string unsupported_reason() { return ""; }

std::string install() {
  State& now = state();
  const std::lock_guard<std::mutex> guard(now.install_mutex);
  const uint64_t pages = uint64_t(sysconf(_SC_PHYS_PAGES));
  if (!now.heap.reserve(range_per_memory * pages * uint64_t(sysconf(_SC_PAGESIZE))))
    return "the system grants no 1 GiB of address space (see ulimit -v)";
  // Until `open` below, redirected calls pass through to the C library.
  now.relocations.apply(births | deaths);
  if (now.relocations.redirected(tensors) == 0) {
    now.relocations.restore(births | deaths);
    return "no loaded library of PyTorch calls posix_memalign through a relocation slot";
  }
  if (now.installed++ == 0) {
    now.heap.open();
    now.small.open();
  }
  return "";
}

uint64_t remove() {
  State& now = state();
  const std::lock_guard<std::mutex> guard(now.install_mutex);
  if (now.installed == 0 || --now.installed > 0) return now.heap.live_count();
  now.heap.close();
  now.small.close([](const SmallBlock& block) { leave_small(block.bytes); });
  const uint64_t survivors = now.heap.live_count();
  now.relocations.restore(survivors ? births : births | deaths);
  return survivors;
}

bool is_installed() {
  const std::lock_guard<std::mutex> guard(state().install_mutex);
  return state().installed > 0;
}

void refresh() {
  State& now = state();
  const std::lock_guard<std::mutex> guard(now.install_mutex);
  if (now.installed) {
    now.relocations.apply(births | deaths);
  } else if (now.heap.live_count() == 0) {
    now.relocations.restore(deaths);
  } else {
    now.relocations.apply(deaths);
  }
}

uint64_t surviving_blocks() { return state().heap.live_count(); }
uint64_t small_blocks() { return state().small.count(); }

void set_cap(uint64_t bytes) {
  const std::lock_guard<std::mutex> guard(state().settings_mutex);
  state().settings.cap_bytes = bytes;
  state().heap.set_cap(bytes);
}

void set_limit(uint64_t bytes) {
  State& now = state();
  const std::lock_guard<std::mutex> guard(now.settings_mutex);
  now.settings.limit_bytes = bytes;
  now.account.limit.store(bytes);
  now.refusals.forget_overdrafts();
  const uint64_t held = now.account.held.current();
  if (held > bytes) now.heap.shed(held - bytes);
}

Settings settings() {
  const std::lock_guard<std::mutex> guard(state().settings_mutex);
  return state().settings;
}

void set_reclaim(Reclaim reclaim) { state().reclaim = reclaim; }

bool charge_external(uint64_t bytes) {
  if (!charge(bytes, false)) return false;
  state().account.external.add(bytes);
  state().account.note_watermark();
  return true;
}

void discharge_external(uint64_t bytes) {
  state().account.external.subtract(bytes);
  state().account.held.subtract(bytes);
}

// What the pool frees and allocates re-enters on the same thread.
uint64_t ask_for_room(uint64_t bytes) {
  const Reclaim hook = state().reclaim;
  if (!hook || reclaiming) return 0;
  reclaiming = true;
  state().account.reclaims.add();
  const uint64_t freed = hook(bytes);
  reclaiming = false;
  return freed;
}

void count_refusal() { state().account.refusals.add(); }

int64_t refuse_after(int64_t requests) { return state().refusals.name(requests); }

uint64_t trim(uint64_t bytes) { return state().heap.shed(bytes); }

void drop_unwinding_tables() { dl_iterate_phdr(daf::drop_unwinding_tables, nullptr); }

void drop_library_pages() {
  int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pagemap < 0) return;
  dl_iterate_phdr(daf::drop_library_pages, &pagemap);
  close(pagemap);
}

Account& account() { return state().account; }

uint32_t intern_label(const std::string& text) {
  State& now = state();
  const std::lock_guard<std::mutex> guard(now.settings_mutex);
  const auto [found, is_new] = now.label_numbers.emplace(text, uint32_t(now.label_texts.size()));
  if (is_new) now.label_texts.push_back(text);
  return found->second;
}

std::string label_text(uint32_t label) {
  const std::lock_guard<std::mutex> guard(state().settings_mutex);
  return label < state().label_texts.size() ? state().label_texts[label] : std::string();
}

void set_label(uint32_t label) { current_label = label; }

std::vector<LiveBlock> live_blocks() { return state().heap.live_blocks(); }

void record_events(size_t capacity) { state().events.start(capacity); }

std::vector<Event> recorded_events(uint64_t* dropped) { return state().events.stop(dropped); }

std::pair<uint64_t, uint64_t> address_range() { return state().heap.address_range(); }

}  // namespace daf::allocator

#endif  // Linux on x86-64 or aarch64
