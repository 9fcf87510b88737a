// The pool's pages, the groups in which their memory comes, and how room is made.

#include <cstring>
#include <string>

#include "pool/pool.h"

namespace daf::paging {

constexpr int poison_byte = 0xDB;

// Takes the lowest free page with memory; there must be one.
uint32_t Pool::take_page() {
  const uint64_t page = free_.first();
  if (pages_per_group_ > 1 && group_is_empty(page / pages_per_group_))
    empty_.erase(page / pages_per_group_);
  free_.erase(page);
  ++now_.live_pages;
  return uint32_t(page);
}

void Pool::free_page(uint64_t page) {
  if (options_.poison) std::memset(region_.base() + page * page_bytes_, poison_byte, page_bytes_);
  free_.insert(page);
  --now_.live_pages;
  if (pages_per_group_ > 1 && group_is_empty(page / pages_per_group_))
    empty_.insert(page / pages_per_group_);
}

void Pool::free_pages_of(const Tensor& tensor) {
  now_.payload_bytes -= payload_of(tensor);
  each_page(tensor, [&](uint32_t page) { free_page(page); });
}

bool Pool::group_is_empty(uint64_t group) const {
  return free_.has_all(group * pages_per_group_, pages_per_group_);
}

void Pool::extend_groups(uint64_t groups) {
  region_.extend(groups * group_bytes_);
  const uint64_t pages = groups * pages_per_group_;
  free_.resize(pages);
  unbacked_.resize(groups);
  if (pages_per_group_ > 1) empty_.resize(groups);
  for (; groups_ < groups; ++groups_) unbacked_.insert(groups_);
}

// The bitmaps shrink to the highest group with memory once they could be half as long: else a small
// step would pay for the largest ever. Amortised O(1) a group.
void Pool::forget_groups() {
  while (top_ && unbacked_.has(top_ - 1)) --top_;
  if (2 * top_ > groups_) return;
  while (groups_ > top_) unbacked_.erase(--groups_);
  const uint64_t pages = groups_ * pages_per_group_;
  free_.shrink(pages);
  unbacked_.shrink(groups_);
  if (pages_per_group_ > 1) empty_.shrink(groups_);
}

void Pool::back_group(uint64_t group) {
  top_ = std::max(top_, group + 1);
  region_.take_back(group * group_bytes_, group_bytes_);
  unbacked_.erase(group);
  ++backed_;
  now_.grown_bytes += group_bytes_;
  const uint64_t first = group * pages_per_group_;
  for (uint64_t page = first; page < first + pages_per_group_; ++page) free_.insert(page);
  if (pages_per_group_ > 1) empty_.insert(group);
}

// Gives memory to at least `pages` more pages, in the lowest groups without any.
void Pool::grow(uint64_t pages, uint64_t most) {
  const uint64_t missing = (pages + pages_per_group_ - 1) / pages_per_group_;
  const Supply supply{now_.live_pages / pages_per_group_, empty_groups().count(), most - backed_};
  uint64_t step = growth_.step(missing, supply);
  if (step > unbacked_.count()) extend_groups(groups_ + step - unbacked_.count());
  if (!options_.lender.take(step * group_bytes_)) {
    step = missing;
    const uint64_t bytes = step * group_bytes_;
    if (!options_.lender.take(bytes))
      throw RefusedError("asked for " + std::to_string(bytes) +
                             " bytes of memory for pages, and the process's limit leaves no room",
                         bytes);
  }
  for (uint64_t i = 0; i < step; ++i) back_group(unbacked_.first());
}

// Returns up to `count` empty groups to the system, highest first; returns how many.
uint64_t Pool::return_groups(uint64_t count) {
  uint64_t done = 0;
  while (done < count && empty_groups().count()) {
    const uint64_t end = empty_groups().last() + 1;
    uint64_t first = end;
    while (done < count && empty_groups().count() && empty_groups().last() == first - 1) {
      --first;
      ++done;
      for (uint64_t i = 0; i < pages_per_group_; ++i) free_.erase(first * pages_per_group_ + i);
      if (pages_per_group_ > 1) empty_.erase(first);
      unbacked_.insert(first);
    }
    region_.give_back(first * group_bytes_, (end - first) * group_bytes_);
  }
  backed_ -= done;
  now_.returned_bytes += done * group_bytes_;
  options_.lender.give(done * group_bytes_);
  if (groups_) forget_groups();
  return done;
}

void Pool::return_surplus() {
  const uint64_t surplus =
      growth_.surplus({now_.live_pages / pages_per_group_, empty_groups().count(), 0});
  if (surplus) return_groups(surplus);
}

uint64_t Pool::bitmap_bytes(uint64_t groups) const {
  const uint64_t pages = groups * pages_per_group_;
  return Bitmap::bytes_for(pages) + Bitmap::bytes_for(groups) * (pages_per_group_ > 1 ? 2 : 1);
}

// Bytes of the account's records with so many more slots and bytes of page tables.
uint64_t Pool::metadata_bytes(uint64_t new_slots, uint64_t new_table_bytes) const {
  const uint64_t slots = tensors_.size() + new_slots;
  const uint64_t tensor_bytes = round_up(slots * sizeof(Tensor), Region::system_page_bytes());
  return tensor_bytes + ImportanceTree::bytes_for(slots) + table_bytes_ + new_table_bytes +
         bitmap_bytes(groups_) + evictions_.capacity() * sizeof(Eviction);
}

uint64_t Pool::held_now() const { return backed_ * group_bytes_ + metadata_bytes(0, 0); }

// The most groups that the cap allows beside `metadata`; their bitmaps grow with them.
uint64_t Pool::most_groups(uint64_t metadata) const {
  uint64_t most = region_.bytes() / group_bytes_;
  if (now_.cap_bytes == no_cap) return growth_.most(most);
  if (now_.cap_bytes <= metadata) return 0;
  const uint64_t others = metadata - bitmap_bytes(groups_);
  most = std::min(most, (now_.cap_bytes - metadata) / group_bytes_);
  for (;;) {
    const uint64_t held = most * group_bytes_ + others + bitmap_bytes(std::max(groups_, most));
    if (held <= now_.cap_bytes || most == 0) return growth_.most(most);
    most -= std::min(most, (held - now_.cap_bytes + group_bytes_ - 1) / group_bytes_);
  }
}

void Pool::throw_full(uint64_t pages, uint64_t most) const {
  const std::string cap = now_.cap_bytes == no_cap ? "none" : std::to_string(now_.cap_bytes);
  const uint64_t live = now_.live_pages * page_bytes_, room = most * group_bytes_;
  throw FullError("asked for " + std::to_string(pages * page_bytes_) + " bytes of pages; of " +
                  std::to_string(room) + " bytes that may be held as pages, " +
                  std::to_string(live) + " are in use and " +
                  std::to_string(now_.evictable_pages * page_bytes_) +
                  " of these may be given up (held " + std::to_string(held_now()) + ", cap " + cap +
                  ", reserved addresses " + std::to_string(region_.bytes()) + ")");
}

// Makes free pages for the newcomer's, evicting as needed, `metadata` included. Throws FullError.
void Pool::make_room(Tensor& newcomer, uint64_t metadata) {
  const uint64_t most = most_groups(metadata), most_pages = most * pages_per_group_;
  const uint64_t least = present_pages(newcomer) - spare_pages(newcomer);
  if (now_.live_pages + least > most_pages + now_.evictable_pages) throw_full(least, most);
  // Repeats only if groups have several pages: the used ones may be scattered.
  while (now_.live_pages + present_pages(newcomer) > most_pages ||
         (backed_ > most && return_groups(backed_ - most) == 0)) {
    if (!give_up_least(newcomer)) throw_full(present_pages(newcomer), most);
  }
  const uint64_t pages = present_pages(newcomer);
  if (pages > free_.count()) grow(pages - free_.count(), most);
}

// Evicts and returns memory until the cap holds, or nothing more may go.
void Pool::shrink_to_cap() {
  if (now_.cap_bytes == no_cap) return;
  for (;;) {
    const uint64_t most = most_groups(metadata_bytes(0, 0)), most_pages = most * pages_per_group_;
    if (backed_ <= most) return;
    return_groups(backed_ - most);
    if (backed_ <= most || !now_.evictable_pages) return;
    const uint64_t over = now_.live_pages > most_pages ? now_.live_pages - most_pages : 1;
    evict_pages(std::min(over, now_.evictable_pages));
  }
}

}  // namespace daf::paging
