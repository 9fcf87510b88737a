// The paged pool: planes of codes in fixed pages, evicted least important first. See docs/pool.md.
//
// A page holds one plane of one run of elements (8 * page_bytes of them), or headers.
// Evicting precision drops pages: nothing is coded again, nothing moves. Calls may
// come from any thread; each takes one lock. Kernels use pinned tensors, which are never evicted.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool/bitmap.h"
#include "pool/growth.h"
#include "pool/region.h"
#include "pool/tree.h"
#include "pool/view.h"

namespace daf::paging {

constexpr uint64_t no_cap = ~uint64_t(0);
constexpr uint64_t elements_per_block = 256;
constexpr uint32_t no_page = ~uint32_t(0);
constexpr size_t most_evictions_logged = 256;

// A handle that is not alive here, a pin too few or too many, an invalid request.
struct MisuseError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// There are too few pages, even with all that may be evicted.
struct FullError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The cap leaves room, but the lender refused `bytes`.
struct RefusedError : FullError {
  RefusedError(const std::string& message, uint64_t refused) : FullError(message), bytes(refused) {}
  uint64_t bytes;
};

// An outer account: asked before pages get memory, told when they lose it; without one, none is
// refused. Both are called under the pool's lock and must not call the pool.
struct Lender {
  bool (*take)(uint64_t bytes) = [](uint64_t) { return true; };
  void (*give)(uint64_t bytes) = [](uint64_t) {};
};

struct Options {
  uint64_t reserve_bytes;    // address space
  uint64_t page_bytes;       // a power of two, 32 or more
  uint64_t cap_bytes;        // the most that may be held, metadata included
  uint64_t increment_bytes;  // of growth; 0: adaptive
  bool may_cut_increment;    // take less than an increment if the cap leaves no more
  bool poison;               // fill freed pages with 0xDB
  // Pages lie on a device and are only counted here; whole planes go, and take_lost lists them.
  bool elsewhere = false;
  bool whole = false;  // a tensor loses all its evictable planes at once
  Lender lender = {};
};

struct Request {
  uint64_t count;            // elements
  int bits, minimum_bits;    // planes, and how many of them are never evicted
  bool headers;              // 4 bytes for every block of 256 elements
  const double* importance;  // of each plane, most significant first
  uint64_t tag;              // the caller's own name for it, returned in evictions
  int missing_bits = 0;      // planes that it begins without
  uint64_t page_bytes = 0;   // the size of pages if the pool is empty; 0: as it is
};

struct GivenUp {
  uint64_t pages, payload_bytes;
  uint64_t returned_bytes;  // to the system
  uint64_t over_bytes;      // still held above the cap: pinned or not evictable
};

struct Eviction {
  uint64_t tag, handle;
  uint32_t pages;
  uint8_t plane, page_shift;  // pages of 1 << page_shift bytes, which may change later

  uint64_t bytes() const { return uint64_t(pages) << page_shift; }
};

// A tensor that has lost planes: `kept` are left.
struct Lost {
  uint64_t handle;
  uint32_t kept;
};

struct Statistics {
  uint64_t payload_bytes;   // planes and headers that are there
  uint64_t wasted_bytes;    // behind the end of the last page of each row
  uint64_t free_bytes;      // pages that have memory and no content
  uint64_t metadata_bytes;  // page tables, records, tree, bitmaps
  uint64_t cap_bytes, live_peak_bytes, held_peak_bytes;
  uint64_t evictable_pages, live_pages, live_tensors;
  uint64_t evicted_pages, evicted_payload_bytes, grown_bytes, returned_bytes;
};

class Pool {
 public:
  explicit Pool(const Options& options);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  // Returns the handle of a new tensor, pinned once for writing. If its own planes are least
  // important, it begins without them (see its view), and they count as evicted. Throws FullError,
  // MisuseError, std::bad_alloc; evicts nothing then unless the system's pages are larger.
  uint64_t allocate(const Request& request);
  // Throws while pinned, unless `even_pinned`.
  void release(uint64_t handle, bool even_pinned = false);

  View pin(uint64_t handle);
  void unpin(uint64_t handle);
  // Bytes of the pages that this tensor has now.
  uint64_t live_bytes(uint64_t handle);

  // Lowering the cap evicts at once.
  GivenUp set_cap(uint64_t bytes);
  // Evicts at least `bytes` of pages, or all that may go.
  GivenUp evict(uint64_t bytes);
  // Returns every empty group to the system.
  uint64_t trim();

  Statistics statistics();
  // Evictions since the last call, oldest first; `lost`: how many entries found no room.
  std::vector<Eviction> take_evictions(uint64_t* lost);
  // Tensors that lost planes since the last call, oldest first; for pages elsewhere.
  std::vector<Lost> take_lost();
  uint64_t resident_bytes();
  uint64_t held_bytes();
  uint64_t live_tensors();
  uint64_t page_bytes();
  // True if all parts agree. For tests; O(pages).
  bool is_sound();

 private:
  struct Tensor {
    uint64_t handle;  // 0: free slot
    uint64_t tag;
    uint64_t count;      // elements
    double* importance;  // bits numbers, then the page table
    uint32_t* table;
    uint32_t runs, full_runs;
    uint32_t pins;
    uint32_t next_free;  // slot + 1, among free slots
    uint8_t bits, minimum, kept;
    bool has_headers;
  };

  uint64_t header_pages(const Tensor& tensor) const;
  uint64_t table_bytes(const Tensor& tensor) const;
  uint64_t present_pages(const Tensor& tensor) const;
  uint64_t spare_pages(const Tensor& tensor) const;
  uint64_t page_payload(const Tensor& tensor, uint64_t run) const;
  uint64_t payload_of(const Tensor& tensor) const;
  // Visits the table's entries for all present pages: those of planes, then those of headers.
  template <class Visit> void each_page(const Tensor& tensor, Visit visit) const {
    const uint64_t headers = header_pages(tensor), planes = present_pages(tensor) - headers;
    for (uint64_t i = 0; i < planes; ++i) visit(tensor.table[i]);
    for (uint64_t i = 0; i < headers; ++i)
      visit(tensor.table[uint64_t(tensor.bits) * tensor.runs + i]);
  }

  Tensor& find(uint64_t handle);
  Tensor shape_of(const Request& request) const;
  void add_tensor(Tensor& tensor);
  void remove_tensor(const Tensor& tensor);
  uint32_t slot_of(const Tensor& tensor) const;
  void enter_tree(const Tensor& tensor);
  void leave_tree(const Tensor& tensor);
  void free_pages_of(const Tensor& tensor);

  // Pages and groups.
  uint32_t take_page();
  void free_page(uint64_t page);
  bool group_is_empty(uint64_t group) const;
  Bitmap& empty_groups() { return pages_per_group_ == 1 ? free_ : empty_; }
  void extend_groups(uint64_t groups);
  void back_group(uint64_t group);
  void forget_groups();
  void change_page_bytes(uint64_t bytes);
  void grow(uint64_t pages, uint64_t most);
  uint64_t return_groups(uint64_t count);
  void return_surplus();

  // Room.
  uint64_t group_of(uint64_t page_bytes) const;
  uint64_t bitmap_bytes(uint64_t groups) const;
  uint64_t metadata_bytes(uint64_t new_slots, uint64_t new_table_bytes) const;
  uint64_t most_groups(uint64_t metadata) const;
  uint64_t held_now() const;
  void make_room(Tensor& newcomer, uint64_t metadata);
  bool give_up_least(Tensor& newcomer);
  bool lose_page(Tensor& tensor);
  void note_missing(const Tensor& newcomer);
  [[noreturn]] void throw_full(uint64_t pages, uint64_t most) const;
  void shrink_to_cap();
  uint64_t evict_least();
  uint64_t evict_plane(uint32_t slot);
  void evict_pages(uint64_t pages);
  void log_eviction(const Tensor& tensor, uint32_t plane, uint64_t pages);
  GivenUp given_up() const;
  GivenUp since(const GivenUp& before) const;
  void note_peaks();

  const Options options_;
  uint64_t page_bytes_, group_bytes_, pages_per_group_;
  Region region_;
  Growth growth_;

  std::deque<Tensor> tensors_;  // by slot; none ever moves
  ImportanceTree tree_;
  uint32_t free_slot_ = 0;  // slot + 1
  uint64_t table_bytes_ = 0;

  // A page is free with memory, or in a group without memory, or used.
  Bitmap free_;      // pages
  Bitmap empty_;     // groups with memory and only free pages; unused for groups of one
  Bitmap unbacked_;  // groups below groups_ without memory
  uint64_t groups_ = 0, backed_ = 0;
  uint64_t top_ = 0;  // no group from here on has memory; the highest below may have none either

  Statistics now_{};  // but for what `statistics` computes
  std::vector<Lost> lost_;
  std::vector<Eviction> evictions_;
  uint64_t evictions_lost_ = 0;
  Eviction last_lost_{};
  std::mutex mutex_;
};

}  // namespace daf::paging
