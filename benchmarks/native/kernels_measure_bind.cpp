#include "kernels_measure_bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels_measure.h"

namespace nb = nanobind;

namespace daf {
namespace {

// (set, codec, encode, bits, count, threads, thresholds, levels, borders); addresses may be 0.
KernelCase make_case(const nb::tuple& fields) {
  const auto at = [&](int i) { return nb::cast<uintptr_t>(fields[i]); };
  return {nb::cast<std::string>(fields[0]),
          nb::cast<std::string>(fields[1]),
          nb::cast<bool>(fields[2]),
          nb::cast<int>(fields[3]),
          nb::cast<uint64_t>(fields[4]),
          nb::cast<int>(fields[5]),
          reinterpret_cast<const int8_t*>(at(6)),
          reinterpret_cast<const int8_t*>(at(7)),
          reinterpret_cast<const float*>(at(8))};
}

std::vector<std::pair<double, double>> measure(const nb::tuple& fields, int rounds) {
  const KernelCase kernel = make_case(fields);
  const nb::gil_scoped_release release;
  std::vector<std::pair<double, double>> pairs;
  for (const TimedPair& pair : measure_kernel(kernel, rounds))
    pairs.emplace_back(pair.kernel_ns, pair.copy_ns);
  return pairs;
}

uint64_t count(const nb::tuple& fields) { return count_instructions(make_case(fields)); }

}  // namespace

void bind_kernels_measure(nb::module_& module) {
  module.def("measure_kernel", &measure);
  module.def("measure_read_ns", &measure_read_ns);
  module.def("count_kernel_instructions", &count);
}

}  // namespace daf
