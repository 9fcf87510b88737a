// Python bindings of the pool; daf/pool/paged_pool.py is the only caller beside tests.

#include "bindings/bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "allocator/allocator.h"
#include "pool/pool.h"

namespace nb = nanobind;

namespace daf {
namespace {

using paging::Pool;
using unlocked = nb::call_guard<nb::gil_scoped_release>;

// The process's account, bounded by its limit (allocator.h).
constexpr paging::Lender process_account{allocator::charge_external, allocator::discharge_external};

// Where the limit refuses memory: the reclaim hook, the pool's own planes, then fewer new ones.
uint64_t allocate(Pool& pool, uint64_t count, int bits, int minimum_bits, bool headers,
                  const std::vector<double>& importance, uint64_t tag, uint64_t page_bytes) {
  if (importance.size() != size_t(bits))
    throw paging::MisuseError("asked for " + std::to_string(bits) + " planes with " +
                              std::to_string(importance.size()) +
                              " importances; give one for each plane");
  paging::Request request{count, bits, minimum_bits, headers, importance.data(), tag};
  request.page_bytes = page_bytes;
  for (;;) {
    try {
      return pool.allocate(request);
    } catch (const paging::RefusedError& error) {
      if (allocator::ask_for_room(error.bytes) || pool.evict(error.bytes).pages) continue;
      if (minimum_bits && bits - ++request.missing_bits >= minimum_bits) continue;
      allocator::count_refusal();
      throw;
    }
  }
}

nb::tuple view_fields(const paging::View& view) {
  return nb::make_tuple(uintptr_t(view.region), view.page_bytes, uintptr_t(view.table), view.count,
                        view.runs, view.full_runs, view.bits, view.kept);
}

nb::tuple given_fields(const paging::GivenUp& given) {
  return nb::make_tuple(given.pages, given.payload_bytes, given.returned_bytes, given.over_bytes);
}

template <class Work> auto without_lock(Work work) {
  const nb::gil_scoped_release release;
  return work();
}

nb::tuple take_evictions(Pool& pool) {
  uint64_t lost = 0;
  nb::list found;
  for (const paging::Eviction& each : pool.take_evictions(&lost))
    found.append(nb::make_tuple(each.tag, each.handle, each.plane, each.pages, each.bytes()));
  return nb::make_tuple(found, lost);
}

nb::list take_lost(Pool& pool) {
  nb::list found;
  for (const paging::Lost& each : without_lock([&] { return pool.take_lost(); }))
    found.append(nb::make_tuple(each.handle, each.kept));
  return found;
}

// The fields of daf.pool.views.PoolStatistics.
nb::tuple statistics(Pool& pool) {
  const paging::Statistics now = pool.statistics();
  return nb::make_tuple(now.payload_bytes, now.wasted_bytes, now.free_bytes, now.metadata_bytes,
                        bound_of(now.cap_bytes), now.live_peak_bytes, now.held_peak_bytes,
                        now.evictable_pages, now.live_pages, now.live_tensors, now.evicted_pages,
                        now.evicted_payload_bytes, now.grown_bytes, now.returned_bytes);
}

void bind_class(nb::module_& module) {
  nb::class_<Pool>(module, "Pool")
      .def(
          "__init__",
          [](Pool* self, uint64_t reserve_bytes, uint64_t page_bytes, Bound cap_bytes,
             uint64_t increment_bytes, bool poison, bool charged, bool elsewhere, bool whole) {
            new (self)
                Pool({reserve_bytes, page_bytes, bytes_of(cap_bytes), increment_bytes, false,
                      poison, elsewhere, whole, charged ? process_account : paging::Lender{}});
          },
          nb::arg("reserve_bytes"), nb::arg("page_bytes"), nb::arg("cap_bytes").none(),
          nb::arg("increment_bytes"), nb::arg("poison"), nb::arg("charged") = false,
          nb::arg("elsewhere") = false, nb::arg("whole") = false)
      .def("allocate", &allocate, nb::arg("count"), nb::arg("bits"), nb::arg("minimum_bits"),
           nb::arg("headers"), nb::arg("importance"), nb::arg("tag"), nb::arg("page_bytes") = 0,
           unlocked())
      .def("release", &Pool::release, nb::arg("handle"), nb::arg("even_pinned") = false, unlocked())
      .def("pin",
           [](Pool& pool, uint64_t handle) {
             return view_fields(without_lock([&] { return pool.pin(handle); }));
           })
      .def("unpin", &Pool::unpin, unlocked())
      .def("live_bytes", &Pool::live_bytes, unlocked())
      .def("set_cap",
           [](Pool& pool, Bound bytes) {
             return given_fields(without_lock([&] { return pool.set_cap(bytes_of(bytes)); }));
           })
      .def("evict",
           [](Pool& pool, uint64_t bytes) {
             return given_fields(without_lock([&] { return pool.evict(bytes); }));
           })
      .def("trim", &Pool::trim, unlocked())
      .def("statistics", &statistics)
      .def("held_bytes", &Pool::held_bytes, unlocked())
      .def("live_tensors", &Pool::live_tensors, unlocked())
      .def("page_bytes", &Pool::page_bytes, unlocked())
      .def("take_evictions", &take_evictions)
      .def("take_lost", &take_lost)
      .def("resident_bytes", &Pool::resident_bytes, unlocked())
      .def("is_sound", &Pool::is_sound, unlocked());
}

}  // namespace

void bind_pool(nb::module_& parent) {
  nb::module_ module = parent.def_submodule("pool");
  nb::exception<paging::MisuseError>(module, "MisuseError");
  nb::exception<paging::FullError>(module, "FullError");
  bind_class(module);
}

}  // namespace daf
