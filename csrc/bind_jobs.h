// From what Python passes to what kernels take: addresses, options, and the call itself.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "dispatch.h"
#include "threads.h"

namespace daf {

namespace nb = nanobind;

// Larger results than this leave the caches before anybody reads them.
inline constexpr uint64_t stream_from_bytes = 8 << 20;

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (channels, inner, scale, shift), or an empty tuple for none.
inline Affine make_affine(const nb::tuple& fields) {
  if (fields.size() == 0) return {};
  return {nb::cast<uint64_t>(fields[0]), nb::cast<uint64_t>(fields[1]),
          at<const float>(nb::cast<uintptr_t>(fields[2])),
          at<const float>(nb::cast<uintptr_t>(fields[3]))};
}

inline Source make_source(uintptr_t address, int type, uint64_t count, const Affine& affine) {
  return {at<const void>(address), ElementType(type), count, affine};
}

inline Target make_target(uintptr_t address, int type, uint64_t count, const Affine& affine,
                          uintptr_t mask, bool accumulate) {
  const bool stream = !accumulate && count * 4 >= stream_from_bytes;
  return {at<void>(address),        ElementType(type), count, affine,
          at<const uint32_t>(mask), accumulate,        stream};
}

inline Target plain_target(uintptr_t address, int type, uint64_t count) {
  return make_target(address, type, count, {}, 0, false);
}

inline const KernelTable& table_named(const std::string& name) {
  const KernelTable* table = name.empty() ? available_tables().front() : find_table(name);
  if (!table) throw nb::value_error("no such instruction set on this processor");
  return *table;
}

template <class Job>
struct Call {
  const Job& job;
  Kernel<Job> kernel;
};

template <class Job>
bool run(const Job& job, Kernel<Job> kernel, uint64_t count, int threads) {
  const Call<Job> call{job, kernel};
  const nb::gil_scoped_release release;
  return run_ranges(
      [](const void* opaque, size_t first, size_t last) {
        const auto& here = *static_cast<const Call<Job>*>(opaque);
        return here.kernel(here.job, first, last);
      },
      &call, block_count(count), threads);
}

}  // namespace daf
