// Kernels over pages: blocks are cut where a run ends, and inside a run every plane begins where
// the page table says. Nothing is copied, and no kernel knows of pages.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "arguments/kernel_arguments.h"
#include "pool/pool_view.h"

namespace daf {

using Pages = paging::View;

// A whole tensor's work; `job` lacks only where planes, headers and mask lie, and how wide a run
// is.
template <class Job>
struct PagesJob {
  Job job;
  Kernel<Job> kernel;
  Pages pages;
  Pages mask = {};                         // of equal count; of no runs: none
  const int8_t* shorter_levels = nullptr;  // of runs that have one plane less
  float shorter_level_factor = 0;
};

// Where block 0 would lie if the stretch in which block `first` lies at `here` reached back to it.
// (Not pointer arithmetic: that place is most often nobody's.)
template <class T>
T* origin(T* here, size_t first, size_t block_bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(here) - first * block_bytes);
}

inline size_t first_block(const Pages& view, size_t run) { return run * view.run_blocks(); }
inline size_t run_of(const Pages& view, size_t block) { return block / view.run_blocks(); }

inline uint32_t* plane_origin(const Pages& view, int plane, size_t run) {
  return origin(view.plane(plane, run), first_block(view, run), paging::block_plane_bytes);
}

inline uint16_t* header_origin(const Pages& view, size_t run) {
  return origin(view.headers(run), first_block(view, run), paging::block_header_bytes);
}

// --- what a job takes of one run ----------------------------------------------------------------

template <class Job, class = void>
struct HasPlanes : std::false_type {};
template <class Job>
struct HasPlanes<Job, std::void_t<decltype(Job::planes)>> : std::true_type {};

// Blocks that are only read and written in passing have none; a mask of theirs may.
template <class Job>
void set_planes(Job& job, uint32_t* const* starts) {
  if constexpr (HasPlanes<Job>::value) job.planes.starts = starts;
}
inline void set_planes(EncodeMask& job, uint32_t* const* starts) { job.words.starts = starts; }
inline void set_planes(DecodeMask& job, uint32_t* const* starts) { job.words.starts = starts; }

template <class Job, class = void>
struct HasHeaders : std::false_type {};
template <class Job>
struct HasHeaders<Job, std::void_t<decltype(Job::headers)>> : std::true_type {};

template <class Job, class = void>
struct HasTarget : std::false_type {};
template <class Job>
struct HasTarget<Job, std::void_t<decltype(Job::target)>> : std::true_type {};

template <class Job, class = void>
struct HasSource : std::false_type {};
template <class Job>
struct HasSource<Job, std::void_t<decltype(Job::source.emission)>> : std::true_type {};

// How many planes a kernel writes: `rotated` tensors may begin without the least significant ones.
template <class Job>
int planes_written(const Job&) {
  return 0;
}
inline int planes_written(const EncodeRotated& job) { return job.bits; }

// Where this thread writes what a tensor has no plane for.
inline uint32_t* nobodys_plane(const Pages& view, size_t run) {
  thread_local std::vector<uint32_t> words;
  words.resize(std::max(words.size(), size_t(view.page_bytes / sizeof(uint32_t))));
  return origin(words.data(), first_block(view, run), paging::block_plane_bytes);
}

template <class Job>
void set_width(Job&, const PagesJob<Job>&, int) {}
inline void set_width(DecodeRotated& job, const PagesJob<DecodeRotated>& whole, int kept_bits) {
  job.kept_bits = kept_bits;
  if (kept_bits == whole.pages.kept) return;
  job.levels = whole.shorter_levels;
  job.level_factor = whole.shorter_level_factor;
}

// Blocks [first, last) of one run.
template <class Job>
bool do_run(const PagesJob<Job>& whole, size_t first, size_t last) {
  const size_t run = run_of(whole.pages, first);
  const int kept_bits = whole.pages.kept_bits(run);
  uint32_t* starts[paging::most_bits];
  for (int plane = 0; plane < kept_bits; ++plane)
    starts[plane] = plane_origin(whole.pages, plane, run);
  if (kept_bits < planes_written(whole.job)) {
    uint32_t* nowhere = nobodys_plane(whole.pages, run);
    std::fill(starts + kept_bits, starts + planes_written(whole.job), nowhere);
  }
  Job job = whole.job;
  set_planes(job, starts);
  set_width(job, whole, kept_bits);
  if constexpr (HasHeaders<Job>::value) job.headers = header_origin(whole.pages, run);
  if constexpr (HasTarget<Job>::value)
    if (whole.mask.runs) job.target.mask = plane_origin(whole.mask, 0, run_of(whole.mask, first));
  Emission emission;
  if constexpr (HasSource<Job>::value) {
    if (job.source.emission && whole.mask.runs) {
      emission = *job.source.emission;
      emission.mask = plane_origin(whole.mask, 0, run_of(whole.mask, first));
      job.source.emission = &emission;
    }
  }
  return whole.kernel(job, first, last);
}

inline size_t end_of_run(const Pages& view, size_t block) {
  return first_block(view, run_of(view, block) + 1);
}

// The kernel of a PagesJob, in the manner of every other one.
template <class Job>
bool do_pages(const PagesJob<Job>& whole, size_t first, size_t last) {
  bool good = true;
  while (first < last) {
    size_t end = std::min(last, end_of_run(whole.pages, first));
    if (whole.mask.runs) end = std::min(end, end_of_run(whole.mask, first));
    good = do_run(whole, first, end) && good;
    first = end;
  }
  return good;
}

}  // namespace daf
