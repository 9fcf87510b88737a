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
  template <class... Items> void read(Items&... items) { (read_one(items), ...); }

  void skip() { ++place_; }

  uint64_t elements_of(size_t tensor) const {
    return nanobind::cast<uint64_t>(record_[tensor].attr("numel")());
  }

 private:
  template <class Item> void read_one(Item& item) {
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

// daf.kernels.normalisation.Sums.
struct SumsPlaces {
  double *sums = nullptr, *squares = nullptr;  // none: nothing is summed
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
  Channels channels;  // of the sums
  char* workspace = nullptr;
};

inline Channels columns(uint64_t count, uint64_t inner) { return {count, count == 1 ? 1 : inner}; }

// A record whose fields are those of `it`, in this order.
#define DAF_RECORD(Type, ...) \
  inline void read_record(Fields& from, Type& it) { from.read(__VA_ARGS__); }

DAF_RECORD(Pages, it.region, it.page_bytes, it.table, it.count, it.runs, it.full_runs, it.bits,
           it.kept)
DAF_RECORD(Extent, it.first, it.last)
DAF_RECORD(Moments, it.epsilon, it.centred)
DAF_RECORD(SumsPlaces, it.sums, it.squares)
DAF_RECORD(RowGradient, it.length, it.centred, it.gradient, it.destination, it.gamma, it.scale)

#undef DAF_RECORD

inline void read_record(Fields& from, Affine& affine) {
  from.read(affine.scale, affine.shift, affine.inner);
  affine.channels = from.elements_of(0);
}

inline void read_record(Fields& from, Channels& channels) {
  uint64_t count = 1, inner = 1;
  from.read(count, inner);
  channels = columns(count, inner);
}

// A mask is the job's.
inline void read_record(Fields& from, NormGradient& it) {
  from.read(it.gradient);
  from.skip();
  from.read(it.destination);
}

// To the kernel NaN is no bound: no number is as great.
inline void read_record(Fields& from, Emission& emission) {
  from.read(emission.destination, emission.affine, emission.addend);
  from.skip();
  from.read(emission.most);
  if (std::isinf(emission.most)) emission.most = std::nanf("");
}

inline void read_record(Fields& from, Call& call) {
  Job& job = call.paged.job;
  from.read(call.threads, job.count, job.source.type, job.source.data, job.source.affine);
  from.read(job.target.data, job.target.affine, job.target.accumulate, call.blocks);
  from.read(call.paged.pages, call.paged.mask, job.key, job.thresholds, job.levels,
            job.level_factor, call.paged.shorter_levels, call.paged.shorter_level_factor);
  from.read(job.predicate, job.low, job.high, job.table, job.item_bytes, job.base);
  from.read(job.emission, call.moments, job.gradient, job.gradient.of_value,
            job.gradient.of_gradient, job.row_gradient, call.sums, call.channels, call.workspace);
  job.row_gradient.beta = call.sums.sums;
  job.row_gradient.of_gamma = call.sums.squares;
  job.row_gradient.workspace = call.workspace;
}

}  // namespace daf
