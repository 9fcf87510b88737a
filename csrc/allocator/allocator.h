// The processor's memory as an account: what PyTorch's CPU tensors and oneDNN's scratch hold is
// counted, bounded by a limit and recycled. One per process; off until installed.
//
// Linux on x86-64 and aarch64; elsewhere `install` says why not and nothing else does anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "allocator/allocator_account.h"
#include "allocator/allocator_events.h"
#include "allocator/allocator_heap.h"

namespace daf::allocator {

// Asked for `needed_bytes` that the limit does not leave; returns how many it freed (0: none, the
// allocation fails). Called on the thread that allocates, with no lock of ours held.
using Reclaim = uint64_t (*)(void* context, uint64_t needed_bytes);

struct Settings {
  uint64_t cap_bytes = no_limit;    // the most that may lie recycled
  uint64_t limit_bytes = no_limit;  // the most that the account may hold
};

// "" where this system can redirect allocations, else why it cannot.
std::string unsupported_reason();

// Redirects the allocations of PyTorch's libraries. Returns "" or what was found instead. Nests:
// as many `remove` undo as many `install`.
std::string install();
// Returns how many of our large blocks survive. They stay valid; while there are any, `free`
// stays redirected, so that whoever frees them reaches the right owner.
uint64_t remove();
bool is_installed();
uint64_t surviving_blocks();
uint64_t small_blocks();
// Redirects libraries that were loaded since; cheap when there are none.
void refresh();

void set_cap(uint64_t bytes);
void set_limit(uint64_t bytes);
Settings settings();
void set_reclaim(Reclaim reclaim, void* context);

// The pool's bytes, in the same account: false (and nothing charged) where the limit leaves no
// room even after the recycled blocks are given back. Never calls the reclaim hook.
bool charge_external(uint64_t bytes);
void discharge_external(uint64_t bytes);
// Calls the reclaim hook for what `charge_external` refused, with no lock held; returns what it
// freed.
uint64_t ask_for_room(uint64_t bytes);
// An allocation failed because of what `charge_external` refused.
void count_refusal();

// Gives recycled blocks back to the system: all, or at least `bytes`; returns how much.
uint64_t trim(uint64_t bytes);

Account& account();
// Names what follows in the statistics by phase; "" ends it. False where there are 15 phases
// already, or the name has more than 31 characters.
bool set_phase(const std::string& name);
// Numbers for texts, and back; 0 is "". What this thread's next allocations are recorded under.
uint32_t intern_label(const std::string& text);
std::string label_text(uint32_t label);
void set_label(uint32_t label);

std::vector<LiveBlock> live_blocks();

void record_events(size_t capacity);
std::vector<Event> recorded_events(uint64_t* dropped);

// Where all large blocks lie: [first, first + second). Zeros before the first installation.
std::pair<uint64_t, uint64_t> address_range();

// What the redirected posix_memalign and free do.
int allocate(void** pointer, size_t alignment, size_t bytes);
void release(void* pointer);

}  // namespace daf::allocator
