// The extension of the benchmarks: measurements without Python between two calls. It has no kernels
// of its own; `daf._native.kernel_table` gives it those of the library.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels_measure.h"
#include "pool/pool.h"
#include "pool_measure.h"

namespace nb = nanobind;

namespace daf {
namespace {

// (table, codec, encode, bits, count, threads, thresholds, levels, lines); table is an address,
// and so are the last three, which may be 0.
KernelCase make_case(const nb::tuple& fields) {
  const auto at = [&](int i) { return nb::cast<uintptr_t>(fields[i]); };
  return {reinterpret_cast<const KernelTable*>(at(0)),
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

nb::tuple operation_ns(uint64_t pages, uint64_t runs, int rounds, uint64_t seed) {
  const paging::Costs costs = paging::measure_operations(pages, runs, rounds, seed);
  return nb::make_tuple(costs.insert_ns, costs.evict_ns, costs.free_ns);
}

nb::tuple tree_ns(uint64_t nodes, int rounds, uint64_t seed) {
  const paging::Costs costs = paging::measure_tree(nodes, rounds, seed);
  return nb::make_tuple(costs.insert_ns, costs.evict_ns, costs.free_ns);
}

void replay(const std::string& contestant, uint64_t page_bytes, nb::object cap_bytes,
            uintptr_t operations, uint64_t count, uintptr_t samples) {
  const uint64_t cap = cap_bytes.is_none() ? paging::no_cap : nb::cast<uint64_t>(cap_bytes);
  const nb::gil_scoped_release release;
  paging::replay(contestant, page_bytes, cap,
                 reinterpret_cast<const paging::Operation*>(operations), count,
                 reinterpret_cast<paging::Sample*>(samples));
}

}  // namespace
}  // namespace daf

NB_MODULE(_native, module) {
  module.attr("KERNEL_TABLE_BYTES") = sizeof(daf::KernelTable);
  module.def("measure_kernel", &daf::measure);
  module.def("measure_read_ns", &daf::measure_read_ns);
  module.def("count_kernel_instructions", &daf::count);
  nb::exception<daf::paging::MisuseError>(module, "MisuseError");
  module.def("operation_ns", &daf::operation_ns);
  module.def("tree_ns", &daf::tree_ns);
  module.def("replay", &daf::replay, nb::arg("contestant"), nb::arg("page_bytes"),
             nb::arg("cap_bytes").none(), nb::arg("operations"), nb::arg("count"),
             nb::arg("samples"));
}
