// Jobs whose planes lie in pages: blocks are split where a run ends, and the page table gives each
// plane's start in a run. Nothing is copied, and kernels see no pages.
#pragma once

#include "arguments/job.h"
#include "pool/view.h"

namespace daf {

using Pages = paging::View;

// The address of block 0 if block `first` lies at `here`; it may lie outside any object, where
// pointer arithmetic is undefined.
template <class T> T* origin(T* here, size_t first, size_t block_bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(here) - first * block_bytes);
}

// `job` without what each run has of its own: planes, headers, mask and number of planes.
struct PagedJob {
  Job job;
  Kernel kernel = nullptr;
  Pages pages = {}, mask = {};  // without runs: as the job says
  bool has_headers = false;
  const int8_t* shorter_levels = nullptr;  // of runs with one plane less
  float shorter_level_factor = 0;
};

// Does blocks [first, last); returns as a kernel does.
bool do_blocks(const PagedJob& whole, size_t first, size_t last);

}  // namespace daf
