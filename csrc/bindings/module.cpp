// Python's way in: raw addresses, no Python objects touched while a kernel runs.
//
// daf/kernels/cpu/flat.py is the only caller and has checked every argument; what is checked again
// here is only what would otherwise read or write outside the caller's memory.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/bindings.h"
#include "bindings/job_arguments.h"
#include "codecs/rotated_constants.h"
#include "threads/team.h"

namespace nb = nanobind;

namespace daf {
namespace {

// (sizes, strides) of as many dimensions, or an empty tuple for none.
View make_view(const nb::tuple& fields) {
  View view;
  if (fields.size() == 0) return view;
  const auto sizes = nb::cast<nb::tuple>(fields[0]), strides = nb::cast<nb::tuple>(fields[1]);
  if (sizes.size() > view_dimensions || strides.size() != sizes.size())
    throw nb::value_error("a view has at most 6 sizes and as many strides");
  view.dimensions = int(sizes.size());
  for (int d = 0; d < view.dimensions; ++d) {
    view.size[d] = nb::cast<uint64_t>(sizes[d]);
    view.stride[d] = nb::cast<int64_t>(strides[d]);
  }
  return view;
}

// What an encoder does in passing: (first block, last block, view, sums), the latter two perhaps
// empty. A source that is no view holds the elements of the blocks asked for.
template <class Job>
void encode(Job job, Kernel<Job> kernel, int threads, const nb::tuple& extras) {
  Source& source = job.source;
  const Extent blocks{nb::cast<size_t>(extras[0]), nb::cast<size_t>(extras[1])};
  const auto sums = nb::cast<nb::tuple>(extras[3]);
  source.view = make_view(nb::cast<nb::tuple>(extras[2]));
  if (source.view.dimensions == 0)
    source.data = at<const void>(
        start_of_tensor(reinterpret_cast<uintptr_t>(source.data), int(source.type), blocks.first));
  if (sums.size() == 0)
    run_part(job, kernel, blocks, threads);
  else
    run_summing(job, kernel, make_sums(sums, source.count, threads));
}

void encode_rotated(const std::string& set, uintptr_t source, int type, uint64_t count, int bits,
                    int rounds, uint64_t key, uintptr_t planes, uintptr_t headers,
                    uintptr_t thresholds, uintptr_t levels, int threads, const nb::tuple& affine,
                    const nb::tuple& extras) {
  const EncodeRotated job{make_source(source, type, count, make_affine(affine)),
                          bits,
                          rounds,
                          key,
                          at<uint32_t>(planes),
                          at<uint16_t>(headers),
                          at<const int8_t>(thresholds),
                          at<const int8_t>(levels)};
  encode(job, table_named(set).encode_rotated, threads, extras);
}

void decode_rotated(const std::string& set, uintptr_t planes, uintptr_t headers, uint64_t count,
                    int kept_bits, int rounds, uint64_t key, uintptr_t levels, float level_factor,
                    uintptr_t destination, int type, int threads, const nb::tuple& affine,
                    uintptr_t mask, bool accumulate, size_t first, size_t last) {
  const DecodeRotated job{
      make_target(destination, type, count, make_affine(affine), mask, accumulate, {first, last}),
      kept_bits,
      rounds,
      key,
      at<const uint32_t>(planes),
      at<const uint16_t>(headers),
      at<const int8_t>(levels),
      level_factor};
  run_part(job, table_named(set).decode_rotated, {first, last}, threads);
}

void encode_minmax(const std::string& set, uintptr_t source, int type, uint64_t count, int bits,
                   uint64_t key, uintptr_t planes, uintptr_t headers, int threads,
                   const nb::tuple& affine, const nb::tuple& extras) {
  const EncodeMinmax job{make_source(source, type, count, make_affine(affine)), bits, key,
                         at<uint32_t>(planes), at<uint16_t>(headers)};
  encode(job, table_named(set).encode_minmax, threads, extras);
}

void decode_minmax(const std::string& set, uintptr_t planes, uintptr_t headers, uint64_t count,
                   int bits, uintptr_t destination, int type, int threads, const nb::tuple& affine,
                   uintptr_t mask, bool accumulate, size_t first, size_t last) {
  const DecodeMinmax job{
      make_target(destination, type, count, make_affine(affine), mask, accumulate, {first, last}),
      bits, at<const uint32_t>(planes), at<const uint16_t>(headers)};
  run_part(job, table_named(set).decode_minmax, {first, last}, threads);
}

void encode_steps(const std::string& set, uintptr_t source, int type, uint64_t count, int bits,
                  uint64_t key, uintptr_t planes, int threads, const nb::tuple& affine) {
  const EncodeSteps job{make_source(source, type, count, make_affine(affine)), bits, key,
                        at<uint32_t>(planes)};
  run(job, table_named(set).encode_steps, count, threads);
}

void decode_steps(const std::string& set, uintptr_t planes, uint64_t count, int bits,
                  uintptr_t destination, int type, int threads, const nb::tuple& affine) {
  const Extent all{0, block_count(count)};
  const DecodeSteps job{make_target(destination, type, count, make_affine(affine), 0, false, all),
                        bits, at<const uint32_t>(planes)};
  run(job, table_named(set).decode_steps, count, threads);
}

void encode_mask(const std::string& set, uintptr_t source, int type, uint64_t count, int predicate,
                 float low, float high, uintptr_t words, int threads) {
  const EncodeMask job{make_source(source, type, count, {}), Predicate(predicate), low, high,
                       at<uint32_t>(words)};
  run(job, table_named(set).encode_mask, count, threads);
}

void decode_mask(const std::string& set, uintptr_t words, uint64_t count, float off_value,
                 float on_value, uintptr_t destination, int type, int threads) {
  const DecodeMask job{plain_target(destination, type, count), at<const uint32_t>(words), off_value,
                       on_value};
  run(job, table_named(set).decode_mask, count, threads);
}

bool encode_derivative(const std::string& set, uintptr_t source, int type, uint64_t count, int bits,
                       uintptr_t borders, uintptr_t planes, int threads) {
  const EncodeDerivative job{make_source(source, type, count, {}), bits, at<const float>(borders),
                             at<uint32_t>(planes)};
  return run(job, table_named(set).encode_derivative, count, threads);
}

void decode_derivative(const std::string& set, uintptr_t planes, uint64_t count, int bits,
                       uintptr_t levels, uintptr_t destination, int type, int threads) {
  const DecodeDerivative job{plain_target(destination, type, count), bits, at<const float>(levels),
                             at<const uint32_t>(planes)};
  run(job, table_named(set).decode_derivative, count, threads);
}

bool encode_integers(const std::string& set, uintptr_t source, int item_bytes, uint64_t count,
                     int bits, uint64_t base, uintptr_t planes, int threads) {
  const EncodeIntegers job{at<const void>(source), item_bytes, count, bits, base,
                           at<uint32_t>(planes)};
  return run(job, table_named(set).encode_integers, count, threads);
}

void decode_integers(const std::string& set, uintptr_t planes, uint64_t count, int bits,
                     uint64_t base, uintptr_t destination, int item_bytes, int threads) {
  const DecodeIntegers job{at<const uint32_t>(planes), count,     bits, base,
                           at<void>(destination),      item_bytes};
  run(job, table_named(set).decode_integers, count, threads);
}

// The yardstick of the benchmarks: the C library's copy, split as the kernels are.
struct CopyJob {
  const char* source;
  char* destination;
  uint64_t bytes;
};

bool copy_range(const CopyJob& job, size_t first, size_t last) {
  const uint64_t from = first * block_elements;
  const uint64_t to = last * block_elements < job.bytes ? last * block_elements : job.bytes;
  std::memcpy(job.destination + from, job.source + from, to - from);
  return true;
}

void copy(uintptr_t source, uintptr_t destination, uint64_t bytes, int threads) {
  const CopyJob job{at<const char>(source), at<char>(destination), bytes};
  run(job, copy_range, bytes, threads);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
  return names;
}

// Where the benchmarks find the kernels of one instruction set (KernelTable); 0 for no such set.
uintptr_t kernel_table(const std::string& set) {
  return reinterpret_cast<uintptr_t>(find_table(set));
}

}  // namespace
}  // namespace daf

NB_MODULE(_native, module) {
  // The traceback of an error that nobody catches keeps what it saw until the process ends; that
  // is no leak to bother a user with.
  nb::set_leak_warnings(false);
  module.attr("FORMAT_VERSION") = 3;
  module.attr("ROTATED_CONSTANTS") = nb::make_tuple(
      daf::integer_length, daf::scale_unit, daf::coefficient_multiplier, daf::between_rounds_shift);
  module.def("instruction_sets", &daf::instruction_sets);
  module.def("kernel_table", &daf::kernel_table);
  module.attr("KERNEL_TABLE_BYTES") = sizeof(daf::KernelTable);
  module.def("encode_rotated", &daf::encode_rotated);
  module.def("decode_rotated", &daf::decode_rotated);
  module.def("encode_minmax", &daf::encode_minmax);
  module.def("decode_minmax", &daf::decode_minmax);
  module.def("encode_steps", &daf::encode_steps);
  module.def("decode_steps", &daf::decode_steps);
  module.def("encode_mask", &daf::encode_mask);
  module.def("decode_mask", &daf::decode_mask);
  module.def("encode_derivative", &daf::encode_derivative);
  module.def("decode_derivative", &daf::decode_derivative);
  module.def("encode_integers", &daf::encode_integers);
  module.def("decode_integers", &daf::decode_integers);
  module.def("copy", &daf::copy);
  module.def("team_threads", &daf::team_threads);
  daf::bind_allocator(module);
  daf::bind_pool(module);
  daf::bind_measure(module);
  daf::bind_pages(module);
  daf::bind_norm(module);
  daf::bind_rows(module);
}
