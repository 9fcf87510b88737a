// Passes over the blocks of a job, on threads.
#pragma once

#include "arguments/pages.h"
#include "reductions/sums.h"

namespace daf {

bool run_blocks(const PagedJob& job, Extent blocks, int threads);

// All blocks, while the kernel adds to the sums.
bool run_summing(const PagedJob& job, const Sums& sums);

// All blocks of a job whose source's affine is the rows' statistics, which are written first.
bool run_rows(const PagedJob& job, const MeasureRows& rows, const KernelTable& table, int threads);

// All blocks of a job that takes the gradient of rows.
bool run_row_gradient(const PagedJob& job, int threads);

}  // namespace daf
