#ifdef __linux__

#include "allocator/relocations.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace daf {
namespace {

#if defined(__x86_64__)
constexpr uint32_t jump_slot_type = R_X86_64_JUMP_SLOT, global_type = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr uint32_t jump_slot_type = R_AARCH64_JUMP_SLOT, global_type = R_AARCH64_GLOB_DAT;
#else
constexpr uint32_t jump_slot_type = ~0u, global_type = ~0u;
#endif

// The targets of a library's dynamic section.
struct Dynamic {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const uint32_t* gnu_hash = nullptr;
  const ElfW(Rela) * calls = nullptr;
  const ElfW(Rela) * data = nullptr;
  uint64_t calls_count = 0, data_count = 0, relative_count = 0;
};

const ElfW(Dyn) * dynamic_section(const dl_phdr_info& info) {
  for (int index = 0; index < info.dlpi_phnum; ++index) {
    const ElfW(Phdr) & header = info.dlpi_phdr[index];
    if (header.p_type != PT_DYNAMIC) continue;
    return reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + header.p_vaddr);
  }
  return nullptr;
}

Dynamic read_dynamic(const dl_phdr_info& info, const ElfW(Dyn) * entry) {
  Dynamic found;
  bool with_addends = true;
  for (; entry->d_tag != DT_NULL; ++entry) {
    // glibc has made these absolute, musl has not.
    const uintptr_t value = entry->d_un.d_ptr;
    const uintptr_t address = value < info.dlpi_addr ? value + info.dlpi_addr : value;
    switch (entry->d_tag) {
      case DT_SYMTAB: found.symbols = reinterpret_cast<const ElfW(Sym)*>(address); break;
      case DT_STRTAB: found.names = reinterpret_cast<const char*>(address); break;
      case DT_GNU_HASH: found.gnu_hash = reinterpret_cast<const uint32_t*>(address); break;
      case DT_JMPREL: found.calls = reinterpret_cast<const ElfW(Rela)*>(address); break;
      case DT_RELA: found.data = reinterpret_cast<const ElfW(Rela)*>(address); break;
      case DT_PLTRELSZ: found.calls_count = value / sizeof(ElfW(Rela)); break;
      case DT_RELASZ: found.data_count = value / sizeof(ElfW(Rela)); break;
      case DT_RELACOUNT: found.relative_count = value; break;
      case DT_PLTREL: with_addends = value == DT_RELA; break;
      default: break;
    }
  }
  if (!with_addends || !found.symbols || !found.names) return {};
  return found;
}

uint32_t highest_symbol(const ElfW(Rela) * entry, uint64_t count) {
  uint32_t highest = 0;
  for (uint64_t index = 0; entry && index < count; ++index) {
    highest = std::max(highest, uint32_t(ELF64_R_SYM(entry[index].r_info)));
  }
  return highest;
}

// All imported symbols lie below this index: the first in the hash table or, if that is empty, the
// one after the relocations' last.
uint32_t imported_end(const Dynamic& dynamic) {
  if (dynamic.gnu_hash && dynamic.gnu_hash[1] > 1) return dynamic.gnu_hash[1];
  return 1 + std::max(highest_symbol(dynamic.calls, dynamic.calls_count),
                      highest_symbol(dynamic.data, dynamic.data_count));
}

// True for libraries whose calls stay as they are: the C library, the linker, sanitizers.
bool is_left_alone(const char* path) {
  return file_starts_with(
      path, {"libc.so", "libc-", "ld-", "ld64", "libdl", "libpthread", "libasan", "libtsan",
             "libubsan", "liblsan", "libmemray", "linux-vdso"});
}

const ElfW(Phdr) * segment_at(const dl_phdr_info& info, uintptr_t wanted) {
  for (int index = 0; index < info.dlpi_phnum; ++index) {
    const ElfW(Phdr) & header = info.dlpi_phdr[index];
    const uintptr_t first = info.dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD && wanted - first < header.p_memsz) return &header;
  }
  return nullptr;
}

// Our own calls must reach the real functions.
bool is_ourselves(const dl_phdr_info& info) {
  return segment_at(info, reinterpret_cast<uintptr_t>(&is_ourselves)) != nullptr;
}

// True if no page differs from its file: a linker's, a debugger's or a hook's writes would be lost.
bool is_unwritten(int pagemap, uintptr_t first, uintptr_t last, uintptr_t page) {
  constexpr uint64_t present = 1ull << 63, swapped = 1ull << 62, of_file = 1ull << 61;
  uint64_t entries[512];
  for (uintptr_t at = first / page, end = last / page; at < end;) {
    const size_t count = std::min<size_t>(end - at, std::size(entries)), bytes = count * 8;
    if (pread(pagemap, entries, bytes, off_t(at * 8)) != ssize_t(bytes)) return false;
    for (size_t index = 0; index < count; ++index) {
      if (entries[index] & (present | swapped) && !(entries[index] & of_file)) return false;
    }
    at += count;
  }
  return true;
}

}  // namespace

bool file_starts_with(const char* path, std::initializer_list<const char*> prefixes) {
  const char* slash = std::strrchr(path, '/');
  const char* name = slash ? slash + 1 : path;
  for (const char* prefix : prefixes) {
    if (std::strncmp(name, prefix, std::strlen(prefix)) == 0) return true;
  }
  return false;
}

int drop_unwinding_tables(dl_phdr_info* info, size_t, void*) {
  constexpr uint8_t relative_int32 = 0x1b;  // DW_EH_PE_pcrel | DW_EH_PE_sdata4
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  for (int index = 0; index < info->dlpi_phnum; ++index) {
    const ElfW(Phdr) & found = info->dlpi_phdr[index];
    if (found.p_type != PT_GNU_EH_FRAME) continue;
    // A sorted index, which says where the table lies: before it, or up to the segment's end.
    const uintptr_t index_first = info->dlpi_addr + found.p_vaddr, field = index_first + 4;
    const ElfW(Phdr)* segment = segment_at(*info, index_first);
    const auto encoding = reinterpret_cast<const uint8_t*>(index_first)[1];
    if (!segment || segment->p_flags & PF_W || encoding != relative_int32) continue;
    const uintptr_t table = field + *reinterpret_cast<const int32_t*>(field);
    if (segment_at(*info, table) != segment) continue;
    const uintptr_t end = table < index_first
                              ? index_first + found.p_memsz
                              : info->dlpi_addr + segment->p_vaddr + segment->p_filesz;
    const uintptr_t first = (std::min(table, index_first) + page - 1) / page * page;
    const uintptr_t last = end / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
  return 0;
}

int drop_library_pages(dl_phdr_info* info, size_t, void* pagemap) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  for (int index = 0; index < info->dlpi_phnum; ++index) {
    const ElfW(Phdr) & segment = info->dlpi_phdr[index];
    if (segment.p_type != PT_LOAD || segment.p_flags & PF_W) continue;
    const uintptr_t start = info->dlpi_addr + segment.p_vaddr;
    const uintptr_t first = (start + page - 1) / page * page;
    const uintptr_t last = (start + segment.p_filesz) / page * page;
    if (first >= last || !is_unwritten(*static_cast<int*>(pagemap), first, last, page)) continue;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
  return 0;
}

// Writes inside the walk, under the linker's lock, so that no library is unloaded meanwhile.
void Relocations::walk(uint32_t apply, uint32_t restore) {
  // Before the walk: looking up takes a lock that must not be awaited under the walk's.
  for (size_t index = resolved_.size(); index < redirections_.size(); ++index) {
    const char* symbol = redirections_[index].symbol;
    resolved_.push_back(reinterpret_cast<uintptr_t>(dlsym(RTLD_DEFAULT, symbol)));
  }
  apply_ = apply;
  restore_ = restore;
  first_ = true;
  dl_iterate_phdr(&Relocations::visit, this);
}

int Relocations::visit(dl_phdr_info* info, size_t, void* opaque) {
  auto& self = *static_cast<Relocations*>(opaque);
  if (self.first_) {
    self.first_ = false;
    const bool is_same = info->dlpi_adds == self.loaded_ && info->dlpi_subs == self.unloaded_;
    if (is_same && !self.libraries_.empty()) {
      for (const Slots& library : self.libraries_) self.update(library);
      return 1;
    }
    self.libraries_.clear();
    self.loaded_ = info->dlpi_adds;
    self.unloaded_ = info->dlpi_subs;
  }
  Slots library = self.scan(*info);
  if (library.slots.empty()) return 0;
  self.update(library);
  self.libraries_.push_back(std::move(library));
  return 0;
}

Relocations::Slots Relocations::scan(const dl_phdr_info& info) const {
  Slots library;
  const char* path = info.dlpi_name ? info.dlpi_name : "";
  const ElfW(Dyn)* section = dynamic_section(info);
  if (!section || is_left_alone(path) || is_ourselves(info)) return library;
  const Dynamic dynamic = read_dynamic(info, section);
  if (!dynamic.symbols) return library;
  const uint32_t end = imported_end(dynamic);
  const auto caller = choice_(path);
  std::unordered_map<uint32_t, uint32_t> wanted;  // symbol -> redirection
  for (uint32_t symbol = 1; symbol < end; ++symbol) {
    const char* name = dynamic.names + dynamic.symbols[symbol].st_name;
    for (uint32_t index = 0; index < redirections_.size(); ++index) {
      const Redirection& redirection = redirections_[index];
      if (!redirection.instead[uint32_t(caller)]) continue;
      if (std::strcmp(name, redirection.symbol) == 0) wanted[symbol] = index;
    }
  }
  if (wanted.empty()) return library;
  const auto collect = [&](const ElfW(Rela)* entry, uint64_t first, uint64_t count) {
    for (uint64_t index = first; entry && index < count; ++index) {
      const uint32_t type = ELF64_R_TYPE(entry[index].r_info);
      if (type != jump_slot_type && type != global_type) continue;
      const auto found = wanted.find(uint32_t(ELF64_R_SYM(entry[index].r_info)));
      if (found == wanted.end()) continue;
      auto* slot = reinterpret_cast<uintptr_t*>(info.dlpi_addr + entry[index].r_offset);
      const bool is_stub = segment_at(info, *slot) != nullptr;
      const uintptr_t resolved = is_stub ? resolved_[found->second] : 0;
      library.slots.push_back({slot, found->second, caller, resolved});
    }
  };
  collect(dynamic.calls, 0, dynamic.calls_count);
  collect(dynamic.data, dynamic.relative_count, dynamic.data_count);
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
  for (int index = 0; index < info.dlpi_phnum; ++index) {
    const ElfW(Phdr) & header = info.dlpi_phdr[index];
    if (header.p_type != PT_GNU_RELRO) continue;
    // The linker protects whole pages only, both ends rounded down.
    library.protected_first = (info.dlpi_addr + header.p_vaddr) & ~(page - 1);
    library.protected_last = (info.dlpi_addr + header.p_vaddr + header.p_memsz) & ~(page - 1);
  }
  return library;
}

// Most walks change nothing, and write-protection is two system calls.
void Relocations::update(const Slots& library) {
  const auto due = [&](const Slot& slot) { return is_due(slot); };
  if (std::none_of(library.slots.begin(), library.slots.end(), due)) return;
  const bool is_protected = library.protected_first < library.protected_last;
  void* first = reinterpret_cast<void*>(library.protected_first);
  const size_t bytes = library.protected_last - library.protected_first;
  if (is_protected && mprotect(first, bytes, PROT_READ | PROT_WRITE) != 0) return;
  for (const Slot& slot : library.slots) update(slot);
  if (is_protected) mprotect(first, bytes, PROT_READ);
}

bool Relocations::is_due(const Slot& slot) const {
  const uint32_t bit = 1u << slot.redirection;
  const bool ours = __atomic_load_n(slot.address, __ATOMIC_ACQUIRE) == replacement(slot);
  return ours ? (restore_ & bit) != 0 : (apply_ & bit) != 0;
}

void Relocations::update(const Slot& slot) {
  if (!is_due(slot)) return;
  const uintptr_t now = __atomic_load_n(slot.address, __ATOMIC_ACQUIRE);
  if (now != replacement(slot)) {
    originals_[slot.address] = slot.resolved ? slot.resolved : now;
    __atomic_store_n(slot.address, replacement(slot), __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(slot.address, originals_.at(slot.address), __ATOMIC_RELEASE);
  }
}

uintptr_t Relocations::replacement(const Slot& slot) const {
  const Redirection& redirection = redirections_[slot.redirection];
  return reinterpret_cast<uintptr_t>(redirection.instead[uint32_t(slot.caller)]);
}

size_t Relocations::redirected(uint32_t which) const {
  size_t count = 0;
  for (const Slots& library : libraries_) {
    for (const Slot& slot : library.slots) {
      if (slot.caller == Library::other || !(which >> slot.redirection & 1)) continue;
      count += __atomic_load_n(slot.address, __ATOMIC_ACQUIRE) == replacement(slot);
    }
  }
  return count;
}

}  // namespace daf

#endif  // __linux__
