// A kernel's view of a tensor whose planes lie in pages: looked up, never copied.
#pragma once

#include <cstdint>

namespace daf::paging {

constexpr uint64_t block_plane_bytes = 32, block_header_bytes = 4;
constexpr int most_bits = 64;

struct View {
  uint8_t* region;
  uint64_t page_bytes;
  const uint32_t* table;  // [plane][run], then the pages of the headers
  uint64_t count, runs, full_runs;
  int bits, kept;

  uint64_t run_blocks() const { return page_bytes / block_plane_bytes; }
  // Runs from full_runs on have lost one plane more than those before.
  int kept_bits(uint64_t run) const { return run < full_runs ? kept : kept - 1; }
  uint32_t* plane(int plane, uint64_t run) const {
    return reinterpret_cast<uint32_t*>(page(table[plane * runs + run]));
  }
  // The headers of eight runs share a page.
  uint16_t* headers(uint64_t run) const {
    const uint64_t offset = run * run_blocks() * block_header_bytes;
    uint8_t* start = page(table[bits * runs + offset / page_bytes]);
    return reinterpret_cast<uint16_t*>(start + offset % page_bytes);
  }

 private:
  uint8_t* page(uint32_t index) const { return region + index * page_bytes; }
};

}  // namespace daf::paging
