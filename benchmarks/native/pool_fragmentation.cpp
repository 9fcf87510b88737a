// The contestants of the fragmentation stress, and the player that drives them.

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "pool/pool.h"
#include "pool_measure.h"

#if defined(__GLIBC__)
#include <malloc.h>
#if __GLIBC_PREREQ(2, 33)
#define DAF_HAS_MALLINFO2
#endif
#endif

namespace daf::paging {
namespace {

constexpr uint64_t paper_increment_bytes = 100'000'000;
constexpr uint64_t reserve_bytes = uint64_t(1) << 36;

constexpr uint32_t most_bits = 64;

bool has_headers(const Operation& operation) { return operation.action == Action::allocate; }

uint64_t code_bytes(const Operation& operation) {
  const uint64_t blocks = (operation.count + elements_per_block - 1) / elements_per_block;
  const uint64_t header_bytes = has_headers(operation) ? block_header_bytes : 0;
  return blocks * (operation.bits * block_plane_bytes + header_bytes);
}

void touch(uint8_t* memory, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += Region::system_page_bytes()) memory[i] = 1;
}

class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual void allocate(const Operation& operation) = 0;
  virtual void release(uint32_t id) = 0;
  virtual Sample sample() = 0;
  virtual uint64_t resident_bytes() = 0;
};

class PoolContestant : public Contestant {
 public:
  PoolContestant(uint64_t page_bytes, uint64_t cap_bytes, uint64_t increment_bytes, bool may_cut)
      : pool_({reserve_bytes, page_bytes, cap_bytes, increment_bytes, may_cut, false}) {}

  void allocate(const Operation& operation) override {
    double importance[most_bits];
    for (uint32_t plane = 0; plane < operation.bits; ++plane)
      importance[plane] = plane ? importance[plane - 1] / 4 : operation.importance;
    const uint64_t handle =
        pool_.allocate({operation.count, int(operation.bits), int(operation.minimum_bits),
                        has_headers(operation), importance, 0});
    handles_[operation.id] = handle;
    touch_all(pool_.pin(handle), has_headers(operation));
    pool_.unpin(handle);
    pool_.unpin(handle);
  }

  void release(uint32_t id) override {
    pool_.release(handles_[id]);
    handles_.erase(id);
  }

  Sample sample() override {
    const Statistics now = pool_.statistics();
    return {now.payload_bytes, pool_.held_bytes(), now.evicted_pages, 0};
  }

  uint64_t resident_bytes() override {
    return pool_.resident_bytes() + pool_.statistics().metadata_bytes;
  }

 private:
  static void touch_all(const View& view, bool has_headers) {
    for (uint64_t run = 0; run < view.runs; ++run) {
      for (int plane = 0; plane < view.kept_bits(run); ++plane)
        touch(reinterpret_cast<uint8_t*>(view.plane(plane, run)), view.page_bytes);
      if (has_headers) *view.headers(run) = 1;
    }
  }

  Pool pool_;
  std::map<uint32_t, uint64_t> handles_;
};

// Best fit with neighbours joined; what lies free at the end goes back to the system at once.
class BestFitContestant : public Contestant {
 public:
  BestFitContestant() : region_(reserve_bytes, reserve_bytes >> 6) {}

  void allocate(const Operation& operation) override {
    const uint64_t bytes = round_up(code_bytes(operation), 64);
    const auto found = by_size_.lower_bound(bytes);
    uint64_t offset = top_;
    if (found != by_size_.end()) {
      offset = found->second;
      const uint64_t rest = found->first - bytes;
      forget(offset, found->first);
      if (rest) remember(offset + bytes, rest);
    } else {
      top_ += bytes;
      region_.extend(top_);
    }
    blocks_[operation.id] = {offset, bytes};
    payload_ += code_bytes(operation);
    payloads_[operation.id] = code_bytes(operation);
    touch(region_.base() + offset, bytes);
  }

  void release(uint32_t id) override {
    auto [offset, bytes] = blocks_[id];
    payload_ -= payloads_[id];
    blocks_.erase(id);
    const auto next = by_place_.find(offset + bytes);
    if (next != by_place_.end()) {
      bytes += next->second;
      forget(next->first, next->second);
    }
    auto before = by_place_.lower_bound(offset);
    if (before != by_place_.begin() && (--before)->first + before->second == offset) {
      const auto [place, size] = *before;
      offset = place;
      bytes += size;
      forget(place, size);
    }
    if (offset + bytes == top_) {
      top_ = offset;
      const uint64_t first = round_up(offset, Region::system_page_bytes());
      const uint64_t end = round_up(offset + bytes, Region::system_page_bytes());
      if (end > first) region_.give_back(first, end - first);
    } else {
      remember(offset, bytes);
    }
  }

  Sample sample() override { return {payload_, round_up(top_, Region::system_page_bytes()), 0, 0}; }
  uint64_t resident_bytes() override { return region_.resident_bytes(); }

 private:
  void remember(uint64_t offset, uint64_t bytes) {
    by_place_[offset] = bytes;
    by_size_.emplace(bytes, offset);
  }

  void forget(uint64_t offset, uint64_t bytes) {
    by_place_.erase(offset);
    auto [first, last] = by_size_.equal_range(bytes);
    while (first != last && first->second != offset) ++first;
    by_size_.erase(first);
  }

  Region region_;
  uint64_t top_ = 0, payload_ = 0;
  std::map<uint64_t, uint64_t> by_place_;
  std::multimap<uint64_t, uint64_t> by_size_;
  std::map<uint32_t, std::pair<uint64_t, uint64_t>> blocks_;
  std::map<uint32_t, uint64_t> payloads_;
};

#if defined(DAF_HAS_MALLINFO2)

// What the C library holds more than when this began: run it in a process of its own.
class MallocContestant : public Contestant {
 public:
  explicit MallocContestant(bool return_large_blocks) {
    if (return_large_blocks) {
      mallopt(M_MMAP_THRESHOLD, 128 << 10);
      mallopt(M_TRIM_THRESHOLD, 128 << 10);
    }
    use_up_what_is_free();
    const struct mallinfo2 now = mallinfo2();
    before_ = now.arena + now.hblkhd - now.keepcost;
  }

  void allocate(const Operation& operation) override {
    const uint64_t bytes = code_bytes(operation);
    void* memory = std::malloc(bytes);
    if (!memory) throw std::bad_alloc();
    touch(static_cast<uint8_t*>(memory), bytes);
    if (operation.id >= blocks_.size()) blocks_.resize(operation.id + 1);
    blocks_[operation.id] = {memory, bytes};
    payload_ += bytes;
  }

  void release(uint32_t id) override {
    std::free(blocks_[id].first);
    payload_ -= blocks_[id].second;
  }

  Sample sample() override { return {payload_, total() - before_, 0, 0}; }
  uint64_t resident_bytes() override { return total() - before_; }

 private:
  // What others freed before must not look like a gift: blocks that are never freed fill it.
  static void use_up_what_is_free() {
    for (size_t bytes = 1 << 18; bytes >= 32; bytes /= 2) {
      const uint64_t before = total();
      void* filler = std::malloc(bytes);
      while (filler && total() == before) filler = std::malloc(bytes);
      std::free(filler);
    }
  }

  static uint64_t total() {
    const struct mallinfo2 now = mallinfo2();
    return now.arena + now.hblkhd;
  }

  uint64_t before_ = 0, payload_ = 0;
  std::vector<std::pair<void*, uint64_t>> blocks_;  // no small blocks of our own in between
};

#endif

std::unique_ptr<Contestant> make_contestant(const std::string& name, uint64_t page_bytes,
                                            uint64_t cap_bytes) {
  if (name == "adaptive") return std::make_unique<PoolContestant>(page_bytes, cap_bytes, 0, false);
  if (name == "fixed" || name == "fixed-cut")
    return std::make_unique<PoolContestant>(page_bytes, cap_bytes, paper_increment_bytes,
                                            name == "fixed-cut");
  if (name == "best-fit") return std::make_unique<BestFitContestant>();
#if defined(DAF_HAS_MALLINFO2)
  if (name == "malloc" || name == "malloc-return")
    return std::make_unique<MallocContestant>(name == "malloc-return");
#endif
  throw MisuseError("asked to replay on " + name +
                    ", which does not exist here; there are adaptive, fixed, fixed-cut, best-fit, "
                    "and with glibc from 2.33 malloc and malloc-return");
}

}  // namespace

void replay(const std::string& name, uint64_t page_bytes, uint64_t cap_bytes,
            const Operation* operations, uint64_t count, Sample* samples) {
  const std::unique_ptr<Contestant> contestant = make_contestant(name, page_bytes, cap_bytes);
  for (uint64_t i = 0; i < count; ++i) {
    const Operation& operation = operations[i];
    const bool allocates =
        operation.action == Action::allocate || operation.action == Action::allocate_bare;
    if (allocates) contestant->allocate(operation);
    if (operation.action == Action::release) contestant->release(operation.id);
    samples[i] = contestant->sample();
    if (operation.action == Action::mark) samples[i].resident_bytes = contestant->resident_bytes();
  }
}

}  // namespace daf::paging
