// Python's way to kernels over pages; daf/kernels/cpu/paged.py is the only caller and has checked
// every argument.

#include "bindings/bindings.h"

#include <nanobind/stl/string.h>

#include "arguments/pages.h"
#include "bindings/job_arguments.h"
#include "bindings/row_arguments.h"

namespace nb = nanobind;

namespace daf {
namespace {

// A mask lies in pages too, so no address of one is known here.
Target page_target(uintptr_t address, int type, uint64_t count, const nb::tuple& affine,
                   bool accumulate, Extent blocks) {
  return make_target(address, type, count, make_affine(affine), 0, accumulate, blocks);
}

template <class Job>
bool run_pages(const PagesJob<Job>& job, int threads) {
  return run<PagesJob<Job>>(job, do_pages<Job>, job.pages.count, threads);
}

template <class Job>
void run_pages_of(const PagesJob<Job>& job, Extent blocks, int threads) {
  run_part<PagesJob<Job>>(job, do_pages<Job>, blocks, threads);
}

void encode_rotated(const std::string& set, uintptr_t source, int type, const nb::tuple& fields,
                    int rounds, uint64_t key, uintptr_t thresholds, uintptr_t levels, int threads,
                    const nb::tuple& affine, const nb::tuple& passing, const nb::tuple& mask,
                    const nb::tuple& rows) {
  const Pages pages = make_pages(fields);
  const Emission emission = make_emission(passing, pages.count);
  EncodeRotated job{make_source(source, type, pages.count, make_affine(affine, rows)),
                    pages.bits,
                    rounds,
                    key,
                    nullptr,
                    nullptr,
                    at<const int8_t>(thresholds),
                    at<const int8_t>(levels)};
  if (emission.destination) job.source.emission = &emission;
  const KernelTable& table = table_named(set);
  run_source<PagesJob<EncodeRotated>>({job, table.encode_rotated, pages, make_pages(mask)},
                                      do_pages<EncodeRotated>, job.source, rows, table, threads);
}

void decode_rotated(const std::string& set, const nb::tuple& fields, int rounds, uint64_t key,
                    uintptr_t levels, float level_factor, uintptr_t shorter_levels,
                    float shorter_level_factor, uintptr_t destination, int type, int threads,
                    const nb::tuple& affine, const nb::tuple& mask, bool accumulate, size_t first,
                    size_t last) {
  const Pages pages = make_pages(fields);
  const DecodeRotated job{
      page_target(destination, type, pages.count, affine, accumulate, {first, last}),
      pages.kept,
      rounds,
      key,
      nullptr,
      nullptr,
      at<const int8_t>(levels),
      level_factor};
  run_pages_of<DecodeRotated>({job, table_named(set).decode_rotated, pages, make_pages(mask),
                               at<const int8_t>(shorter_levels), shorter_level_factor},
                              {first, last}, threads);
}

void encode_minmax(const std::string& set, uintptr_t source, int type, const nb::tuple& fields,
                   uint64_t key, int threads, const nb::tuple& affine, const nb::tuple& passing,
                   const nb::tuple& mask, const nb::tuple& rows) {
  const Pages pages = make_pages(fields);
  const Emission emission = make_emission(passing, pages.count);
  EncodeMinmax job{make_source(source, type, pages.count, make_affine(affine, rows)), pages.bits,
                   key, nullptr, nullptr};
  if (emission.destination) job.source.emission = &emission;
  const KernelTable& table = table_named(set);
  run_source<PagesJob<EncodeMinmax>>({job, table.encode_minmax, pages, make_pages(mask)},
                                     do_pages<EncodeMinmax>, job.source, rows, table, threads);
}

void decode_minmax(const std::string& set, const nb::tuple& fields, uintptr_t destination, int type,
                   int threads, const nb::tuple& affine, const nb::tuple& mask, bool accumulate,
                   size_t first, size_t last) {
  const Pages pages = make_pages(fields);
  const DecodeMinmax job{
      page_target(destination, type, pages.count, affine, accumulate, {first, last}), pages.bits,
      nullptr, nullptr};
  run_pages_of<DecodeMinmax>({job, table_named(set).decode_minmax, pages, make_pages(mask)},
                             {first, last}, threads);
}

void encode_steps(const std::string& set, uintptr_t source, int type, const nb::tuple& fields,
                  uint64_t key, int threads, const nb::tuple& affine) {
  const Pages pages = make_pages(fields);
  const EncodeSteps job{make_source(source, type, pages.count, make_affine(affine)), pages.bits,
                        key, nullptr};
  run_pages<EncodeSteps>({job, table_named(set).encode_steps, pages}, threads);
}

void decode_steps(const std::string& set, const nb::tuple& fields, uintptr_t destination, int type,
                  int threads, const nb::tuple& affine) {
  const Pages pages = make_pages(fields);
  const Extent all{0, block_count(pages.count)};
  const DecodeSteps job{page_target(destination, type, pages.count, affine, false, all), pages.bits,
                        nullptr};
  run_pages<DecodeSteps>({job, table_named(set).decode_steps, pages}, threads);
}

void encode_mask(const std::string& set, uintptr_t source, int type, const nb::tuple& fields,
                 int predicate, float low, float high, int threads) {
  const Pages pages = make_pages(fields);
  const EncodeMask job{make_source(source, type, pages.count, {}), Predicate(predicate), low, high,
                       nullptr};
  run_pages<EncodeMask>({job, table_named(set).encode_mask, pages}, threads);
}

void decode_mask(const std::string& set, const nb::tuple& fields, float off_value, float on_value,
                 uintptr_t destination, int type, int threads) {
  const Pages pages = make_pages(fields);
  const DecodeMask job{plain_target(destination, type, pages.count), nullptr, off_value, on_value};
  run_pages<DecodeMask>({job, table_named(set).decode_mask, pages}, threads);
}

bool encode_derivative(const std::string& set, uintptr_t source, int type, const nb::tuple& fields,
                       uintptr_t borders, int threads) {
  const Pages pages = make_pages(fields);
  const EncodeDerivative job{make_source(source, type, pages.count, {}), pages.bits,
                             at<const float>(borders), nullptr};
  return run_pages<EncodeDerivative>({job, table_named(set).encode_derivative, pages}, threads);
}

void decode_derivative(const std::string& set, const nb::tuple& fields, uintptr_t levels,
                       uintptr_t destination, int type, int threads) {
  const Pages pages = make_pages(fields);
  const DecodeDerivative job{plain_target(destination, type, pages.count), pages.bits,
                             at<const float>(levels), nullptr};
  run_pages<DecodeDerivative>({job, table_named(set).decode_derivative, pages}, threads);
}

bool encode_integers(const std::string& set, uintptr_t source, int item_bytes,
                     const nb::tuple& fields, uint64_t base, int threads) {
  const Pages pages = make_pages(fields);
  const EncodeIntegers job{
      at<const void>(source), item_bytes, pages.count, pages.bits, base, nullptr};
  return run_pages<EncodeIntegers>({job, table_named(set).encode_integers, pages}, threads);
}

void decode_integers(const std::string& set, const nb::tuple& fields, uint64_t base,
                     uintptr_t destination, int item_bytes, int threads) {
  const Pages pages = make_pages(fields);
  const DecodeIntegers job{nullptr, pages.count,           pages.bits,
                           base,    at<void>(destination), item_bytes};
  run_pages<DecodeIntegers>({job, table_named(set).decode_integers, pages}, threads);
}

}  // namespace

void bind_pages(nb::module_& parent) {
  nb::module_ module = parent.def_submodule("pages");
  module.def("encode_rotated", &encode_rotated);
  module.def("decode_rotated", &decode_rotated);
  module.def("encode_minmax", &encode_minmax);
  module.def("decode_minmax", &decode_minmax);
  module.def("encode_steps", &encode_steps);
  module.def("decode_steps", &decode_steps);
  module.def("encode_mask", &encode_mask);
  module.def("decode_mask", &decode_mask);
  module.def("encode_derivative", &encode_derivative);
  module.def("decode_derivative", &decode_derivative);
  module.def("encode_integers", &encode_integers);
  module.def("decode_integers", &decode_integers);
}

}  // namespace daf
