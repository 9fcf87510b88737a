// Python records as C++ structs: fields in order, addresses as ints or tensors, None where there is
// nothing.
#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <type_traits>
#include <utility>

#include "arguments/pages.h"

namespace daf {

class Fields {
 public:
  explicit Fields(nanobind::tuple record) : record_(std::move(record)) {}

  // Reads the next fields; a None leaves the item as it is.
  template <class... Items>
  void read(Items&... items) {
    (read_one(items), ...);
  }

 private:
  template <class Item>
  void read_one(Item& item) {
    const nanobind::handle field = record_[place_++];
    if (field.is_none()) return;
    if constexpr (std::is_pointer_v<Item>) {
      const bool is_number = nanobind::isinstance<nanobind::int_>(field);
      const nanobind::object place = is_number ? nanobind::borrow(field) : field.attr("data_ptr")();
      item = reinterpret_cast<Item>(nanobind::cast<uintptr_t>(place));
    } else if constexpr (std::is_enum_v<Item>) {
      item = Item(nanobind::cast<int>(field));
    } else if constexpr (std::is_arithmetic_v<Item>) {
      item = nanobind::cast<Item>(field);
    } else {
      Fields inner(nanobind::borrow<nanobind::tuple>(field));
      read_record(inner, item);
    }
  }

  nanobind::tuple record_;
  size_t place_ = 0;
};

// daf.kernels.ChannelSums.
struct SumsPlaces {
  Channels channels;
  double *sums = nullptr, *squares = nullptr;  // none: nothing is summed
  uintptr_t workspace = 0;
};

// daf.kernels.RowMoments.
struct Moments {
  double epsilon = -1;  // negative: rows are not measured
  bool centred = true;
};

// daf.kernels.cpu.job.Job.
struct Call {
  int threads = 1;
  Extent blocks{};
  PagedJob paged;
  Moments moments;
  SumsPlaces sums;
};

inline Channels columns(uint64_t count, uint64_t inner) { return {count, count == 1 ? 1 : inner}; }

// A record whose fields are those of `it`, in this order.
#define DAF_RECORD(Type, ...) \
  inline void read_record(Fields& from, Type& it) { from.read(__VA_ARGS__); }

DAF_RECORD(Affine, it.channels, it.inner, it.scale, it.shift)
DAF_RECORD(Pages, it.region, it.page_bytes, it.table, it.count, it.runs, it.full_runs, it.bits,
           it.kept)
DAF_RECORD(Extent, it.first, it.last)
DAF_RECORD(Moments, it.epsilon, it.centred)
DAF_RECORD(NormGradient, it.gradient, it.destination, it.of_value, it.of_gradient)
DAF_RECORD(RowGradient, it.length, it.centred, it.gradient, it.destination, it.gamma, it.scale,
           it.beta, it.of_gamma, it.workspace)

#undef DAF_RECORD

inline void read_record(Fields& from, SumsPlaces& sums) {
  uint64_t count = 1, inner = 1;
  from.read(count, inner, sums.sums, sums.squares, sums.workspace);
  sums.channels = columns(count, inner);
}

// To the kernel NaN is no bound: no number is as great.
inline void read_record(Fields& from, Emission& emission) {
  from.read(emission.destination, emission.addend, emission.affine, emission.most);
  if (std::isinf(emission.most)) emission.most = std::nanf("");
}

inline void read_record(Fields& from, Call& call) {
  Job& job = call.paged.job;
  from.read(call.threads, job.count, job.source.type, job.source.data, job.source.affine);
  from.read(job.target.data, job.target.affine, job.target.accumulate, call.blocks);
  from.read(call.paged.pages, call.paged.mask, job.key, job.thresholds, job.levels,
            job.level_factor, call.paged.shorter_levels, call.paged.shorter_level_factor);
  from.read(job.predicate, job.low, job.high, job.table, job.item_bytes, job.base);
  from.read(job.emission, call.moments, job.gradient, call.sums, job.row_gradient);
}

}  // namespace daf
