// What the bindings of the kernels share: Python's numbers to jobs, jobs to threads.
// Only for files compiled for every processor.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "arguments/pages.h"
#include "instruction_sets/dispatch.h"
#include "reductions/sums.h"
#include "threads/threads.h"

namespace daf {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline const KernelTable& table_named(const std::string& name) {
  const KernelTable* table = name.empty() ? available_tables().front() : find_table(name);
  if (!table) throw nanobind::value_error("no such instruction set on this processor");
  return *table;
}

inline Source make_source(uintptr_t address, int type, uint64_t count, const Affine& affine) {
  return {at<const void>(address), ElementType(type), count, affine, {}, nullptr};
}

// Larger results than this leave the caches before anybody reads them.
inline constexpr uint64_t stream_from_bytes = 8 << 20;

// (channels, inner, scale, shift), or an empty tuple for none; `rows` measure it, if they are any.
inline Affine make_affine(const nanobind::tuple& fields, const nanobind::tuple& rows = {}) {
  if (fields.size() == 0) return {};
  return {nanobind::cast<uint64_t>(fields[0]), nanobind::cast<uint64_t>(fields[1]),
          at<const float>(nanobind::cast<uintptr_t>(fields[2])),
          at<const float>(nanobind::cast<uintptr_t>(fields[3])), rows.size() != 0};
}

// Where element 0 of a tensor would lie whose blocks from `first` on lie at `address`.
inline uintptr_t start_of_tensor(uintptr_t address, int type, size_t first) {
  return address - first * block_elements * element_bytes(ElementType(type));
}

inline Target make_target(uintptr_t address, int type, uint64_t count, const Affine& affine,
                          uintptr_t mask, bool accumulate, Extent blocks) {
  const uint64_t written_bytes = (blocks.last - blocks.first) * block_elements * 4;
  const bool stream = !accumulate && written_bytes >= stream_from_bytes;
  return {at<void>(start_of_tensor(address, type, blocks.first)),
          ElementType(type),
          count,
          affine,
          at<const uint32_t>(mask),
          accumulate,
          stream};
}

inline Target plain_target(uintptr_t address, int type, uint64_t count) {
  return make_target(address, type, count, {}, 0, false, {0, block_count(count)});
}

inline Channels make_channels(uint64_t count, uint64_t inner) {
  return {count, count == 1 ? 1 : inner};
}

// (channels, inner, sums, squares, workspace).
inline Sums make_sums(const nanobind::tuple& fields, uint64_t count, int threads) {
  const auto number = [&](int i) { return nanobind::cast<uint64_t>(fields[i]); };
  const SumsPlan plan = plan_sums(count, make_channels(number(0), number(1)), threads);
  return lay_out(plan, number(4), at<double>(number(2)), at<double>(number(3)));
}

// (destination, addend, affine, most), or an empty tuple for none.
inline Emission make_emission(const nanobind::tuple& fields, uint64_t count) {
  if (fields.size() == 0) return {nullptr, {}, nullptr, nullptr, false};
  return {at<float>(nanobind::cast<uintptr_t>(fields[0])),
          make_affine(nanobind::cast<nanobind::tuple>(fields[2])),
          at<const float>(nanobind::cast<uintptr_t>(fields[1])),
          nullptr,
          count * sizeof(float) >= stream_from_bytes,
          nanobind::cast<float>(fields[3])};
}

// daf.kernels.PageFields, in its order; an empty tuple for none.
inline Pages make_pages(const nanobind::tuple& fields) {
  if (fields.size() == 0) return {};
  return {at<uint8_t>(nanobind::cast<uintptr_t>(fields[0])),
          nanobind::cast<uint64_t>(fields[1]),
          at<const uint32_t>(nanobind::cast<uintptr_t>(fields[2])),
          nanobind::cast<uint64_t>(fields[3]),
          nanobind::cast<uint64_t>(fields[4]),
          nanobind::cast<uint64_t>(fields[5]),
          nanobind::cast<int>(fields[6]),
          nanobind::cast<int>(fields[7])};
}

template <class Job>
struct Call {
  const Job& job;
  Kernel<Job> kernel;
  size_t offset;
};

// The blocks of a part of a tensor.
template <class Job>
bool run_part(const Job& job, Kernel<Job> kernel, Extent blocks, int threads) {
  const Call<Job> call{job, kernel, blocks.first};
  const nanobind::gil_scoped_release release;
  return run_ranges(
      [](const void* opaque, size_t first, size_t last) {
        const auto& here = *static_cast<const Call<Job>*>(opaque);
        return here.kernel(here.job, here.offset + first, here.offset + last);
      },
      &call, blocks.last - blocks.first, threads);
}

template <class Job>
bool run(const Job& job, Kernel<Job> kernel, uint64_t count, int threads) {
  return run_part(job, kernel, {0, block_count(count)}, threads);
}

template <class Job>
struct SummingCall {
  const Job& job;
  Kernel<Job> kernel;
  const Sums& sums;
};

template <class Job>
bool run_summing_share(const SummingCall<Job>& call, size_t share) {
  const Extent blocks = share_blocks(call.sums.plan, share);
  if (blocks.first >= blocks.last) return true;
  RunningSums running = begin_share(call.sums, share);
  Job job = call.job;
  job.source.sums = &running;
  const bool good = call.kernel(job, blocks.first, blocks.last);
  finish_share(running);
  return good;
}

// All blocks, while their sums are taken. The last stage is a share too: it needs the same
// floating-point mode.
template <class Job>
bool run_summing(const Job& job, Kernel<Job> kernel, const Sums& sums) {
  const SummingCall<Job> call{job, kernel, sums};
  const nanobind::gil_scoped_release release;
  const bool good = run_shares(
      [](const void* opaque, size_t share, size_t) {
        return run_summing_share(*static_cast<const SummingCall<Job>*>(opaque), share);
      },
      &call, sums.plan.shares);
  run_shares(
      [](const void* opaque, size_t, size_t) {
        finish_sums(static_cast<const SummingCall<Job>*>(opaque)->sums);
        return true;
      },
      &call, 1);
  return good;
}

}  // namespace daf
