// Jobs whose planes lie in pages: a tensor's blocks are cut where a run ends, and inside a run
// every plane begins where the page table says. Nothing is copied, and no kernel knows of pages.
#pragma once

#include "arguments/job.h"
#include "pool/pool_view.h"

namespace daf {

using Pages = paging::View;

// Where block 0 would lie if the stretch in which block `first` lies at `here` reached back to it.
// (Not pointer arithmetic: that place is most often nobody's.)
template <class T>
T* origin(T* here, size_t first, size_t block_bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(here) - first * block_bytes);
}

// `job` lacks only what a run says: where planes, headers and mask lie, and how many planes.
struct PagedJob {
  Job job;
  Kernel kernel = nullptr;
  Pages pages = {}, mask = {};  // of no runs: what the job itself has
  bool has_headers = false;
  const int8_t* shorter_levels = nullptr;  // of runs that have one plane less
  float shorter_level_factor = 0;
};

// Blocks [first, last); as a kernel, says whether they could be done.
bool do_blocks(const PagedJob& whole, size_t first, size_t last);

}  // namespace daf
