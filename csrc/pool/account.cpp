// The pool's reports: its account, its evictions, and whether all parts agree.

#include <algorithm>

#include "pool/pool.h"

namespace daf::paging {

Statistics Pool::statistics() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Statistics now{};
  now.payload_bytes = payload_bytes_;
  now.wasted_bytes = live_pages_ * page_bytes_ - payload_bytes_;
  now.free_bytes = free_.count() * page_bytes_;
  now.metadata_bytes = metadata_bytes(0, 0);
  now.cap_bytes = cap_bytes_;
  now.live_peak_bytes = live_peak_;
  now.held_peak_bytes = held_peak_;
  now.evictable_pages = evictable_pages_;
  now.live_pages = live_pages_;
  now.live_tensors = live_tensors_;
  now.evicted_pages = evicted_pages_;
  now.evicted_payload_bytes = evicted_payload_;
  now.grown_bytes = grown_ * group_bytes_;
  now.growths = growths_;
  now.returned_bytes = returned_ * group_bytes_;
  return now;
}

void Pool::note_peaks() {
  live_peak_ = std::max(live_peak_, live_pages_ * page_bytes_);
  held_peak_ = std::max(held_peak_, held_now());
}

uint64_t Pool::held_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_now();
}

uint64_t Pool::live_tensors() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return live_tensors_;
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
                       uint8_t(lowest_bit(page_bytes_))};
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
  uint64_t pages = 0, payload = 0, spare = 0, tables = 0, tensors = 0;
  bool sound = tree_.is_sound();
  const auto own = [&](uint64_t page) {
    sound = sound && page < owned.size() && !owned[page] && !free_.has(page) &&
            (used_[page / 64] >> (page % 64) & 1) && !unbacked_.has(page / pages_per_group_);
    if (sound) owned[page] = true;
    ++pages;
  };
  for (uint64_t slot = 0; slot < tensors_.size(); ++slot) {
    const Tensor& tensor = tensors_[slot];
    if (!tensor.handle) continue;
    ++tensors;
    payload += payload_of(tensor);
    spare += tensor.pins ? 0 : spare_pages(tensor);
    tables += table_bytes(tensor);
    const uint64_t planes = present_pages(tensor) - header_pages(tensor);
    for (uint64_t i = 0; i < planes; ++i) own(tensor.table[i]);
    for (uint64_t i = 0; i < header_pages(tensor); ++i)
      own(tensor.table[uint64_t(tensor.bits) * tensor.runs + i]);
  }
  return sound && pages == live_pages_ && payload == payload_bytes_ && spare == evictable_pages_ &&
         tables == table_bytes_ && tensors == live_tensors_ &&
         free_.count() + live_pages_ == backed_ * pages_per_group_ &&
         backed_ + unbacked_.count() == groups_;
}

}  // namespace daf::paging
