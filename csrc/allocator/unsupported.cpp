// Systems that cannot redirect allocations: the account stays empty.
#include "allocator/allocator.h"

#if !defined(__linux__) || !(defined(__x86_64__) || defined(__aarch64__))

namespace daf::allocator {

std::string unsupported_reason() {
  return "allocations are redirected on Linux (x86-64, aarch64) only";
}
std::string install() { return unsupported_reason(); }
uint64_t remove() { return 0; }
bool is_installed() { return false; }
uint64_t surviving_blocks() { return 0; }
uint64_t small_blocks() { return 0; }
void refresh() {}
void set_cap(uint64_t) {}
void set_limit(uint64_t) {}
Settings settings() { return {}; }
void set_reclaim(Reclaim) {}
bool charge_external(uint64_t) { return true; }
void discharge_external(uint64_t) {}
uint64_t ask_for_room(uint64_t) { return 0; }
void count_refusal() {}
int64_t refuse_after(int64_t) { return -1; }
uint64_t trim(uint64_t) { return 0; }
void drop_unwinding_tables() {}
void drop_library_pages() {}
Account& account() {
  static auto* const only = new Account;
  return *only;
}
uint32_t intern_label(const std::string&) { return 0; }
std::string label_text(uint32_t) { return ""; }
void set_label(uint32_t) {}
std::vector<LiveBlock> live_blocks() { return {}; }
void record_events(size_t) {}
std::vector<Event> recorded_events(uint64_t* dropped) {
  *dropped = 0;
  return {};
}
std::pair<uint64_t, uint64_t> address_range() { return {0, 0}; }

}  // namespace daf::allocator

#endif
