#include "pool/pool.h"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <utility>

namespace daf::paging {
namespace {

// A handle is a serial number, unique in this process, and a slot index: handles of other pools or
// released tensors are never found.
constexpr uint64_t slot_bits = 24, most_slots = uint64_t(1) << slot_bits;

uint64_t next_serial() {
  static std::atomic<uint64_t> serial{0};
  return ++serial;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

uint64_t blocks_of(uint64_t count) {
  return count / elements_per_block + (count % elements_per_block != 0);
}

uint64_t checked_page(uint64_t bytes) {
  if (!std::has_single_bit(bytes) || bytes < block_plane_bytes)
    throw MisuseError("asked for pages of " + std::to_string(bytes) +
                      " bytes; a page is a power of two, 32 bytes or more");
  return bytes;
}

Growth growth_by(const Options& options, uint64_t group_bytes) {
  // Memory elsewhere has an allocator that keeps what will be used again.
  if (options.elsewhere) return Growth(1, true, 0);
  const uint64_t increment = (options.increment_bytes + group_bytes - 1) / group_bytes;
  return Growth(increment, options.may_cut_increment);
}

void check_request(const Request& request, int least) {
  if (request.bits < 1 || request.bits > most_bits || request.minimum_bits < least ||
      request.minimum_bits > request.bits - request.missing_bits || request.missing_bits < 0)
    throw MisuseError("asked for " + std::to_string(request.bits) + " planes, of which " +
                      std::to_string(request.minimum_bits) +
                      " stay; 1 to 64 planes exist, and at least " + std::to_string(least) +
                      " stay");
  for (int plane = 0; plane < request.bits; ++plane)
    if (!std::isfinite(request.importance[plane]) || request.importance[plane] < 0)
      throw MisuseError("asked for importance " + std::to_string(request.importance[plane]) +
                        " of plane " + std::to_string(plane) + "; give finite numbers from 0 up");
}

}  // namespace

Pool::Pool(const Options& options)
    : options_(options),
      page_bytes_(checked_page(options.page_bytes)),
      group_bytes_(group_of(page_bytes_)),
      pages_per_group_(group_bytes_ / page_bytes_),
      region_(std::max(round_up(options.reserve_bytes, group_bytes_), group_bytes_), group_bytes_,
              options.elsewhere),
      growth_(growth_by(options, group_bytes_)),
      tree_(most_slots) {
  if (options.poison && options.elsewhere)
    throw MisuseError("asked to poison pages that lie elsewhere; poison those of the process");
  now_.cap_bytes = options.cap_bytes;
  evictions_.reserve(most_evictions_logged);
  note_peaks();
}

Pool::~Pool() {
  for (const Tensor& tensor : tensors_)
    if (tensor.handle) std::free(tensor.importance);
  options_.lender.give(backed_ * group_bytes_);
}

// The unit in which memory comes and goes.
uint64_t Pool::group_of(uint64_t page_bytes) const {
  return options_.elsewhere ? page_bytes : std::max(page_bytes, Region::system_page_bytes());
}

void Pool::change_page_bytes(uint64_t bytes) {
  return_groups(backed_);
  free_ = empty_ = unbacked_ = Bitmap();
  groups_ = top_ = 0;
  page_bytes_ = bytes;
  group_bytes_ = group_of(bytes);
  pages_per_group_ = group_bytes_ / page_bytes_;
  growth_ = growth_by(options_, group_bytes_);
}

// --- allocate and release -----------------------------------------------------------------------

uint64_t Pool::allocate(const Request& request) {
  check_request(request, options_.whole ? 0 : 1);
  const std::lock_guard<std::mutex> lock(mutex_);  // from here on the page size stays
  if (request.page_bytes && request.page_bytes != page_bytes_ && !now_.live_tensors)
    change_page_bytes(checked_page(request.page_bytes));
  Tensor tensor = shape_of(request);
  const uint64_t bytes = table_bytes(tensor);
  std::unique_ptr<void, Free> table(std::malloc(bytes));
  if (!table) throw std::bad_alloc();
  tensor.importance = static_cast<double*>(table.get());
  tensor.table = reinterpret_cast<uint32_t*>(tensor.importance + tensor.bits);
  std::copy_n(request.importance, request.bits, tensor.importance);

  growth_.note_demand(present_pages(tensor) / pages_per_group_);
  make_room(tensor, metadata_bytes(free_slot_ == 0, bytes));
  add_tensor(tensor);
  table_bytes_ += bytes;
  each_page(tensor, [&](uint32_t& page) { page = take_page(); });  // make_room provided them
  now_.payload_bytes += payload_of(tensor);
  note_missing(tensor);
  table.release();
  note_peaks();
  return tensor.handle;
}

// A tensor, pinned once, without its table. Throws FullError.
Pool::Tensor Pool::shape_of(const Request& request) const {
  Tensor tensor{};
  tensor.tag = request.tag;
  tensor.count = request.count;
  tensor.bits = uint8_t(request.bits);
  tensor.kept = uint8_t(request.bits - request.missing_bits);
  tensor.minimum = uint8_t(request.minimum_bits);
  tensor.has_headers = request.headers;
  tensor.pins = 1;
  const uint64_t blocks = blocks_of(request.count), run_blocks = page_bytes_ / block_plane_bytes;
  const uint64_t runs = (blocks + run_blocks - 1) / run_blocks;
  if (runs >= no_page)
    throw FullError("a tensor of " + std::to_string(request.count) +
                    " elements has more runs than a page table can hold; use larger pages");
  tensor.runs = tensor.full_runs = uint32_t(runs);
  return tensor;
}

void Pool::release(uint64_t handle, bool even_pinned) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Tensor tensor = find(handle);
  if (tensor.pins && !even_pinned)
    throw MisuseError("asked to release a tensor that is pinned; unpin it first");
  if (!tensor.pins) leave_tree(tensor);
  free_pages_of(tensor);
  remove_tensor(tensor);
  return_surplus();
  shrink_to_cap();
}

// Gives the tensor a slot and a handle. Throws FullError, std::bad_alloc.
void Pool::add_tensor(Tensor& tensor) {
  if (!free_slot_) {
    const uint64_t fresh = tensors_.size();
    if (fresh >= most_slots)
      throw FullError(std::to_string(fresh) +
                      " tensors live in one pool, and it has no room for more");
    tree_.extend(fresh + 1);
    tensors_.resize(fresh + 1);
    free_slot_ = uint32_t(fresh + 1);
  }
  const uint32_t slot = free_slot_ - 1;
  free_slot_ = tensors_[slot].next_free;
  tensor.handle = next_serial() << slot_bits | slot;
  tensors_[slot] = tensor;
  ++now_.live_tensors;
}

void Pool::remove_tensor(const Tensor& tensor) {
  table_bytes_ -= table_bytes(tensor);
  std::free(tensor.importance);
  const uint32_t slot = slot_of(tensor);
  tensors_[slot] = Tensor{};
  tensors_[slot].next_free = free_slot_;
  free_slot_ = slot + 1;
  --now_.live_tensors;
}

uint32_t Pool::slot_of(const Tensor& tensor) const {
  return uint32_t(tensor.handle & (most_slots - 1));
}

Pool::Tensor& Pool::find(uint64_t handle) {
  const uint64_t slot = handle & (most_slots - 1);
  if (handle == 0 || slot >= tensors_.size() || tensors_[slot].handle != handle)
    throw MisuseError("asked for handle " + std::to_string(handle) +
                      ", which is not alive here: it was released before, or belongs to another "
                      "pool");
  return tensors_[slot];
}

// --- what a tensor takes ------------------------------------------------------------------------

uint64_t Pool::header_pages(const Tensor& tensor) const {
  if (!tensor.has_headers) return 0;
  return (blocks_of(tensor.count) * block_header_bytes + page_bytes_ - 1) / page_bytes_;
}

uint64_t Pool::table_bytes(const Tensor& tensor) const {
  const uint64_t entries = uint64_t(tensor.bits) * tensor.runs + header_pages(tensor);
  return tensor.bits * sizeof(double) + entries * sizeof(uint32_t);
}

uint64_t Pool::present_pages(const Tensor& tensor) const {
  return uint64_t(tensor.kept - 1) * tensor.runs + tensor.full_runs + header_pages(tensor);
}

uint64_t Pool::spare_pages(const Tensor& tensor) const {
  if (tensor.kept <= tensor.minimum) return 0;
  return uint64_t(tensor.kept - 1 - tensor.minimum) * tensor.runs + tensor.full_runs;
}

// Bytes of one plane in one run.
uint64_t Pool::page_payload(const Tensor& tensor, uint64_t run) const {
  const uint64_t plane_bytes = blocks_of(tensor.count) * block_plane_bytes;
  return std::min(page_bytes_, plane_bytes - run * page_bytes_);
}

uint64_t Pool::payload_of(const Tensor& tensor) const {
  const uint64_t blocks = blocks_of(tensor.count), plane_bytes = blocks * block_plane_bytes;
  return (tensor.kept - 1) * plane_bytes + std::min(plane_bytes, tensor.full_runs * page_bytes_) +
         (tensor.has_headers ? blocks * block_header_bytes : 0);
}

// --- pins ---------------------------------------------------------------------------------------

View Pool::pin(uint64_t handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Tensor& tensor = find(handle);
  if (tensor.pins++ == 0) leave_tree(tensor);
  return {region_.base(), page_bytes_,      tensor.table, tensor.count,
          tensor.runs,    tensor.full_runs, tensor.bits,  tensor.kept};
}

void Pool::unpin(uint64_t handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Tensor& tensor = find(handle);
  if (!tensor.pins) throw MisuseError("asked to unpin a tensor that is not pinned");
  if (--tensor.pins) return;
  enter_tree(tensor);
  shrink_to_cap();
}

uint64_t Pool::live_bytes(uint64_t handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return present_pages(find(handle)) * page_bytes_;
}

// An unpinned tensor is in the tree if it has evictable planes.
void Pool::enter_tree(const Tensor& tensor) {
  const uint64_t spare = spare_pages(tensor);
  if (!spare) return;
  tree_.insert(slot_of(tensor), tensor.importance[tensor.kept - 1]);
  now_.evictable_pages += spare;
}

void Pool::leave_tree(const Tensor& tensor) {
  const uint64_t spare = spare_pages(tensor);
  if (!spare) return;
  tree_.erase(slot_of(tensor));
  now_.evictable_pages -= spare;
}

// --- eviction ------------------------------------------------------------------------------------

GivenUp Pool::set_cap(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const GivenUp before = given_up();
  now_.cap_bytes = bytes;
  shrink_to_cap();
  return since(before);
}

GivenUp Pool::evict(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const GivenUp before = given_up();
  const uint64_t pages = bytes / page_bytes_ + (bytes % page_bytes_ != 0);
  evict_pages(std::min(pages, now_.evictable_pages));
  return_surplus();
  return since(before);
}

uint64_t Pool::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return return_groups(empty_groups().count()) * group_bytes_;
}

std::vector<Lost> Pool::take_lost() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(lost_, {});
}

GivenUp Pool::given_up() const {
  return {now_.evicted_pages, now_.evicted_payload_bytes, now_.returned_bytes, 0};
}

GivenUp Pool::since(const GivenUp& before) const {
  const GivenUp now = given_up();
  const uint64_t held = held_now();
  return {now.pages - before.pages, now.payload_bytes - before.payload_bytes,
          now.returned_bytes - before.returned_bytes,
          held > now_.cap_bytes ? held - now_.cap_bytes : 0};
}

void Pool::evict_pages(uint64_t pages) {
  while (pages > 0) pages -= std::min(pages, evict_least());
}

// Evicts of the least important tensor what goes at once; returns the pages.
uint64_t Pool::evict_least() {
  const uint32_t slot = tree_.least();
  uint64_t pages = evict_plane(slot);
  while (options_.whole && spare_pages(tensors_[slot])) pages += evict_plane(slot);
  return pages;
}

// Evicts a tensor's least significant plane, or a page of it; returns the pages.
uint64_t Pool::evict_plane(uint32_t slot) {
  Tensor& tensor = tensors_[slot];
  const bool by_planes = options_.elsewhere || options_.whole;
  const uint32_t plane = tensor.kept - 1u, pages = by_planes ? tensor.full_runs : 1;
  bool was_last = false;
  for (uint32_t i = 0; i < pages; ++i) {
    const uint32_t run = tensor.full_runs - 1;
    const uint64_t payload = page_payload(tensor, run);
    free_page(tensor.table[uint64_t(plane) * tensor.runs + run]);
    now_.payload_bytes -= payload;
    now_.evicted_payload_bytes += payload;
    was_last = lose_page(tensor);
  }
  log_eviction(tensor, plane, pages);
  now_.evicted_pages += pages;
  now_.evictable_pages -= pages;
  if (!was_last) return pages;
  if (options_.elsewhere) lost_.push_back({tensor.handle, tensor.kept});
  tree_.erase(slot);
  if (tensor.kept > tensor.minimum) tree_.insert(slot, tensor.importance[tensor.kept - 1]);
  return pages;
}

// Drops one page of the least significant plane; true if it was the plane's last.
bool Pool::lose_page(Tensor& tensor) {
  if (--tensor.full_runs > 0) return false;
  --tensor.kept;
  tensor.full_runs = tensor.runs;
  return true;
}

// Evicts a page of whatever is least important, perhaps the newcomer's; false if nothing may go.
bool Pool::give_up_least(Tensor& newcomer) {
  if (!options_.whole && spare_pages(newcomer) &&
      tree_.is_least(newcomer.importance[newcomer.kept - 1])) {
    lose_page(newcomer);
    return true;
  }
  if (!now_.evictable_pages) return false;
  evict_least();
  return true;
}

// Counts what a newcomer begins without as evicted.
void Pool::note_missing(const Tensor& newcomer) {
  for (uint32_t plane = newcomer.bits; plane-- > newcomer.kept - 1u;) {
    const uint32_t from = plane < newcomer.kept ? newcomer.full_runs : 0;
    if (from == newcomer.runs) continue;
    for (uint32_t run = from; run < newcomer.runs; ++run)
      now_.evicted_payload_bytes += page_payload(newcomer, run);
    now_.evicted_pages += newcomer.runs - from;
    log_eviction(newcomer, plane, newcomer.runs - from);
  }
}

}  // namespace daf::paging
