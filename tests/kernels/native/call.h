// What every runner of a case reads.
#pragma once

#include "runner.h"
#include "threads/passes.h"

namespace daf::vectors {

// One call: everything that a job is filled from.
struct Call {
  const Parameters& given;
  const Buffers& buffers;
  const KernelTable& kernels;
  int threads;

  template <class T> T* at(Slot slot) const { return reinterpret_cast<T*>(buffers.at[slot]); }
  Affine affine() const {
    return {given.channels, given.inner, at<const float>(scale), at<const float>(shift)};
  }
};

// A job and where its planes begin, one after the other.
class PlacedJob {
 public:
  // What the case says of a code, and of what is read or written.
  PlacedJob(const Call& call, Slot planes, Slot headers);
  PlacedJob(const PlacedJob&) = delete;
  PlacedJob& operator=(const PlacedJob&) = delete;

  bool run(Kernel kernel);

  Job job;
  PagedJob paged(Kernel kernel) const { return {job, kernel}; }

 private:
  const Call& call_;
  uint32_t* starts_[paging::most_bits] = {};
};

// norms.cpp
bool emit(const Call& call);
bool sum_gradient(const Call& call);
bool write_gradient(const Call& call);
bool emit_rows(const Call& call);
bool row_gradient(const Call& call);

}  // namespace daf::vectors
