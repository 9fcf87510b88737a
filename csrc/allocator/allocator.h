// The CPU memory account: counts, limits and recycles PyTorch's CPU tensors and oneDNN's scratch.
// One per process, off until installed; Linux on x86-64 and aarch64 only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "allocator/account.h"
#include "allocator/events.h"
#include "allocator/heap.h"

namespace daf::allocator {

// Frees up to `needed_bytes`; returns how many (0: the allocation fails). Called without our locks.
using Reclaim = uint64_t (*)(uint64_t needed_bytes);

struct Settings {
  uint64_t cap_bytes = no_limit;    // the most that may lie recycled
  uint64_t limit_bytes = no_limit;  // the most that the account may hold
};

// "" if this system can redirect allocations, else why not.
std::string unsupported_reason();

// Redirects PyTorch's allocations; returns "" or an error. Each `install` needs one `remove`.
std::string install();
// Returns how many large blocks survive; `free` stays redirected until the last one is freed.
uint64_t remove();
bool is_installed();
uint64_t surviving_blocks();
uint64_t small_blocks();
// Redirects libraries loaded since; cheap if there are none.
void refresh();

void set_cap(uint64_t bytes);
void set_limit(uint64_t bytes);
Settings settings();
void set_reclaim(Reclaim reclaim);

// Charges the pool's bytes; false (nothing charged) if the limit leaves no room even without
// recycled blocks. Never calls the reclaim hook.
bool charge_external(uint64_t bytes);
void discharge_external(uint64_t bytes);
// Calls the reclaim hook, without locks, for what `charge_external` refused; returns bytes freed.
uint64_t ask_for_room(uint64_t bytes);
void count_refusal();
// For tests: refuses one request, the one that follows `requests` others which could be refused;
// -1: none. Returns how many were still to come.
int64_t refuse_after(int64_t requests);

// Returns all recycled bytes, or at least `bytes`, to the system; returns how many.
uint64_t trim(uint64_t bytes);
// Gives back the tables of all libraries that exceptions read to unwind: clean pages of files.
void drop_unwinding_tables();
// Gives back all libraries' code and constants; what is used again is read again.
void drop_library_pages();

Account& account();
// Numbers for texts, and back; 0 is "". The label of this thread's next allocations.
uint32_t intern_label(const std::string& text);
std::string label_text(uint32_t label);
void set_label(uint32_t label);

std::vector<LiveBlock> live_blocks();

void record_events(size_t capacity);
std::vector<Event> recorded_events(uint64_t* dropped);

// Where all large blocks lie: [first, first + second); zeros before the first installation.
std::pair<uint64_t, uint64_t> address_range();

// The redirected posix_memalign and free. `must`: the limit is exceeded rather than refused.
int allocate(void** pointer, size_t alignment, size_t bytes, bool must);
void release(void* pointer);

}  // namespace daf::allocator
