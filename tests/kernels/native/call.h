// What every runner of a case reads.
#pragma once

#include "runner.h"
#include "threads/threads.h"

namespace daf::vectors {

// One call: everything that the jobs are filled from.
struct Call {
  const Parameters& given;
  const Buffers& buffers;
  const KernelTable& kernels;
  int threads;

  template <class T>
  T* at(Slot slot) const {
    return reinterpret_cast<T*>(buffers.at[slot]);
  }
  Affine affine() const {
    return {given.channels, given.inner, at<const float>(scale), at<const float>(shift)};
  }
  Source source() const {
    return {at<void>(input), ElementType(given.type), given.count, affine(), {}, nullptr, nullptr};
  }
  Target target() const {
    Target result;
    result.data = at<void>(output);
    result.type = ElementType(given.type);
    result.count = given.count;
    result.affine = affine();
    result.mask = at<uint32_t>(mask);
    result.accumulate = given.accumulate != 0;
    result.stream = buffers.stream;
    return result;
  }
  template <class Job>
  bool run(const Job& job, Kernel<Job> kernel) const {
    return run_kernel(job, kernel, block_count(given.count), threads);
  }
};

// norms.cpp
bool emit(const Call& call);
bool sum_gradient(const Call& call);
bool write_gradient(const Call& call);
bool emit_rows(const Call& call);
bool row_gradient(const Call& call);

}  // namespace daf::vectors
