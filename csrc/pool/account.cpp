// The pool's reports: its account, its evictions, and whether all parts agree.

#include <algorithm>
#include <bit>

#include "pool/pool.h"

namespace daf::paging {

Statistics Pool::statistics() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Statistics now = now_;
  now.wasted_bytes = now_.live_pages * page_bytes_ - now_.payload_bytes;
  now.free_bytes = free_.count() * page_bytes_;
  now.metadata_bytes = metadata_bytes(0, 0);
  return now;
}

void Pool::note_peaks() {
  now_.live_peak_bytes = std::max(now_.live_peak_bytes, now_.live_pages * page_bytes_);
  now_.held_peak_bytes = std::max(now_.held_peak_bytes, held_now());
}

uint64_t Pool::held_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_now();
}

uint64_t Pool::live_tensors() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return now_.live_tensors;
}

uint64_t Pool::page_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return page_bytes_;
}

uint64_t Pool::resident_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return region_.resident_bytes();
}

void Pool::log_eviction(const Tensor& tensor, uint32_t plane, uint64_t pages) {
  if (!evictions_.empty()) {
    Eviction& last = evictions_.back();
    if (last.handle == tensor.handle && last.plane == plane) {
      last.pages += uint32_t(pages);
      return;
    }
  }
  const Eviction found{tensor.tag, tensor.handle, uint32_t(pages), uint8_t(plane),
                       uint8_t(std::countr_zero(page_bytes_))};
  if (evictions_.size() < most_evictions_logged) {
    evictions_.push_back(found);
  } else if (last_lost_.handle != found.handle || last_lost_.plane != found.plane) {
    ++evictions_lost_;
    last_lost_ = found;
  }
}

std::vector<Eviction> Pool::take_evictions(uint64_t* lost) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<Eviction> taken(evictions_);
  evictions_.clear();  // keeps its memory
  *lost = evictions_lost_;
  evictions_lost_ = 0;
  last_lost_ = {};
  return taken;
}

bool Pool::is_sound() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<bool> owned(groups_ * pages_per_group_);
  uint64_t pages = 0, payload = 0, spare = 0, tables = 0, tensors = 0, evictable = 0;
  bool sound = true;
  const auto own = [&](uint64_t page) {
    sound = sound && page < owned.size() && !owned[page] && !free_.has(page) &&
            !unbacked_.has(page / pages_per_group_);
    if (sound) owned[page] = true;
    ++pages;
  };
  for (const Tensor& tensor : tensors_) {
    if (!tensor.handle) continue;
    ++tensors;
    evictable += !tensor.pins && spare_pages(tensor) > 0;
    payload += payload_of(tensor);
    spare += tensor.pins ? 0 : spare_pages(tensor);
    tables += table_bytes(tensor);
    each_page(tensor, own);
  }
  return sound && pages == now_.live_pages && payload == now_.payload_bytes &&
         spare == now_.evictable_pages && evictable == tree_.size() && tables == table_bytes_ &&
         tensors == now_.live_tensors &&
         free_.count() + now_.live_pages == backed_ * pages_per_group_ &&
         backed_ + unbacked_.count() == groups_;
}

}  // namespace daf::paging
