#include "arguments/pages.h"

#include <algorithm>
#include <vector>

namespace daf {
namespace {

size_t first_block(const Pages& view, size_t run) { return run * view.run_blocks(); }
size_t run_of(const Pages& view, size_t block) { return block / view.run_blocks(); }

size_t end_of_run(const Pages& view, size_t block) {
  return first_block(view, run_of(view, block) + 1);
}

uint32_t* plane_origin(const Pages& view, int plane, size_t run) {
  return origin(view.plane(plane, run), first_block(view, run), paging::block_plane_bytes);
}

// A scratch plane of this thread, for planes that the tensor lacks.
uint32_t* nobodys_plane(const Pages& view, size_t run) {
  thread_local std::vector<uint32_t> words;
  words.resize(std::max(words.size(), size_t(view.page_bytes / sizeof(uint32_t))));
  return origin(words.data(), first_block(view, run), paging::block_plane_bytes);
}

// `rotated` may be written without its least significant planes, and read without the last.
void enter_run(Job& job, const PagedJob& whole, size_t run,
               uint32_t* (&planes)[paging::most_bits]) {
  const Pages& view = whole.pages;
  const int kept_bits = view.kept_bits(run);
  for (int plane = 0; plane < kept_bits; ++plane) planes[plane] = plane_origin(view, plane, run);
  job.planes = planes;
  if (whole.has_headers)
    job.headers = origin(view.headers(run), first_block(view, run), paging::block_header_bytes);
  if (job.source.data) {
    job.bits = view.bits;
    if (kept_bits < view.bits)
      std::fill(planes + kept_bits, planes + view.bits, nobodys_plane(view, run));
  } else {
    job.bits = kept_bits;
    if (kept_bits == view.kept) return;
    job.levels = whole.shorter_levels;
    job.level_factor = whole.shorter_level_factor;
  }
}

}  // namespace

bool do_blocks(const PagedJob& whole, size_t first, size_t last) {
  Job job = whole.job;
  uint32_t* planes[paging::most_bits];
  bool good = true;
  for (size_t end = last; first < last; first = end, end = last) {
    if (whole.pages.runs) {
      end = std::min(end, end_of_run(whole.pages, first));
      enter_run(job, whole, run_of(whole.pages, first), planes);
    }
    if (whole.mask.runs) {
      end = std::min(end, end_of_run(whole.mask, first));
      job.mask = plane_origin(whole.mask, 0, run_of(whole.mask, first));
    }
    good = whole.kernel(job, first, end) && good;
  }
  return good;
}

}  // namespace daf
