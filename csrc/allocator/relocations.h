// Redirection of calls between shared libraries at run time: Linux on x86-64 and aarch64.
//
// A library calls another's function through a slot that the dynamic linker filled (relocations
// JUMP_SLOT and GLOB_DAT). Writing another address there redirects that library's calls.
#pragma once

#include <link.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <unordered_map>
#include <vector>

namespace daf {

// What a library asks memory for, and what it does when that is refused.
enum class Library : uint32_t {
  tensors,  // PyTorch's own allocator: throws
  kernels,  // oneDNN and the like: write through the null pointer
  arrays,   // NumPy: raises MemoryError
  other,    // only frees what the others allocated
};

struct Redirection {
  const char* symbol;
  void* instead[4];  // what each kind of library calls instead; nullptr: no change
};

// Returns the kind of the library at this path.
using Choice = Library (*)(const char* path);

// True if the file's name begins with one of these.
bool file_starts_with(const char* path, std::initializer_list<const char*> prefixes);

// Gives back a library's tables that exceptions read to unwind (`dl_iterate_phdr` calls it).
int drop_unwinding_tables(dl_phdr_info* info, size_t size, void* nothing);
// Gives back a library's pages that nobody has written; what runs is read from its file again.
int drop_library_pages(dl_phdr_info* info, size_t size, void* pagemap);

// One object must not be used from two threads at once.
class Relocations {
 public:
  Relocations(std::vector<Redirection> redirections, Choice choice)
      : redirections_(std::move(redirections)), choice_(choice) {}

  // Redirects the calls in `which` in all libraries loaded by now; cheap unless libraries changed.
  void apply(uint32_t which) { walk(which, 0); }
  // Undoes the redirections in slots that still hold our address.
  void restore(uint32_t which) { walk(0, which); }
  // Slots redirected now, of those in `which`, but for libraries that only free.
  size_t redirected(uint32_t which) const;

 private:
  struct Slot {
    uintptr_t* address;
    uint32_t redirection;
    Library caller;
    // The function itself, if the slot held a lazy-binding stub, whose first call overwrites it.
    uintptr_t resolved;
  };
  struct Slots {
    uintptr_t protected_first = 0;  // pages read-only after relocation: [first, last)
    uintptr_t protected_last = 0;
    std::vector<Slot> slots;
  };

  static int visit(dl_phdr_info* info, size_t size, void* self);
  void walk(uint32_t apply, uint32_t restore);
  Slots scan(const dl_phdr_info& info) const;
  bool is_due(const Slot& slot) const;
  void update(const Slots& library);
  void update(const Slot& slot);
  uintptr_t replacement(const Slot& slot) const;

  std::vector<Redirection> redirections_;
  std::vector<uintptr_t> resolved_;  // the real addresses of the redirected symbols
  Choice choice_;
  std::vector<Slots> libraries_;
  std::unordered_map<uintptr_t*, uintptr_t> originals_;
  unsigned long long loaded_ = 0, unloaded_ = 0;  // the linker's counts at the last scan
  // What the current walk does; bits of redirections.
  uint32_t apply_ = 0, restore_ = 0;
  bool first_ = true;
};

}  // namespace daf
