// Redirects calls between shared libraries while the program runs.
//
// A library calls a function of another one through a slot that the dynamic linker filled in
// (relocations JUMP_SLOT and GLOB_DAT). Writing another address there redirects the call, for that
// library only; writing the old one back undoes it. Linux on x86-64 and aarch64.
#pragma once

#include <link.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace daf {

struct Redirection {
  const char* symbol;
  void* in_chosen;  // what the chosen libraries call instead; nullptr: nothing changes there
  void* elsewhere;  // what every other library calls instead; likewise
};

// Whether the library at this path is one of the chosen.
using Choice = bool (*)(const char* path);

// Callers must not use one object from two threads at once.
class Relocations {
 public:
  Relocations(std::vector<Redirection> redirections, Choice choice)
      : redirections_(std::move(redirections)), choice_(choice) {}

  // Redirects the calls whose redirection has its bit in `which`, in all libraries loaded by now.
  // May be repeated, and then costs next to nothing unless libraries came or went.
  void apply(uint32_t which);
  // Undoes them, where the slot still is as we left it.
  void restore(uint32_t which);
  // Slots of chosen libraries that call their replacement now, for the redirections in `which`.
  size_t redirected(uint32_t which) const;

 private:
  struct Slot {
    uintptr_t* address;
    uint32_t redirection;
    bool chosen;
    // The function itself, where the slot held its library's own stub when it was found: the first
    // call through a stub has the linker write to the slot, over whatever is there by then.
    uintptr_t resolved;
  };
  struct Library {
    uintptr_t protected_first = 0;  // pages that are read-only after relocation: [first, last)
    uintptr_t protected_last = 0;
    std::vector<Slot> slots;
  };

  static int visit(dl_phdr_info* info, size_t size, void* self);
  void walk(uint32_t apply, uint32_t restore);
  bool unchanged(const dl_phdr_info& info) const;
  Library scan(const dl_phdr_info& info) const;
  void resolve();
  void update(const Library& library);
  void update(const Slot& slot);
  uintptr_t replacement(const Slot& slot) const;

  std::vector<Redirection> redirections_;
  std::vector<uintptr_t> resolved_;  // what the redirected symbols are for everybody
  Choice choice_;
  std::vector<Library> libraries_;
  std::unordered_map<uintptr_t*, uintptr_t> originals_;
  unsigned long long loaded_ = 0, unloaded_ = 0;  // the linker's own counts at the last scan
  // What the walk under way is to do; bits of redirections.
  uint32_t apply_ = 0, restore_ = 0;
  bool first_ = true;
};

}  // namespace daf
