#include "bindings/bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "allocator/allocator.h"

namespace nb = nanobind;

namespace daf {
namespace {

// Python's reclaim hook; read and written only under Python's lock.
PyObject* python_hook = nullptr;

// An error in the hook is reported and frees nothing: the allocation fails with PyTorch's error.
uint64_t call_python_hook(uint64_t needed_bytes) {
  const nb::gil_scoped_acquire acquired;
  if (!python_hook) return 0;
  const nb::object hook = nb::borrow(python_hook);
  try {
    return nb::cast<uint64_t>(hook(needed_bytes));
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_KeyboardInterrupt))
      PyErr_SetInterrupt();  // Ctrl-C comes again where Python goes on, above PyTorch
    else
      error.discard_as_unraisable("daf reclaim hook");
  } catch (const nb::cast_error&) {
    PyErr_SetString(PyExc_TypeError, "a reclaim hook returns the number of bytes it freed");
    PyErr_WriteUnraisable(hook.ptr());
  }
  return 0;
}

// Returns the previous hook.
nb::object set_reclaim(nb::object hook) {
  PyObject* const before = python_hook;
  python_hook = hook.is_none() ? nullptr : hook.release().ptr();
  allocator::set_reclaim(python_hook ? call_python_hook : nullptr);
  return before ? nb::steal(before) : nb::none();
}

nb::tuple settings() {
  const allocator::Settings now = allocator::settings();
  return nb::make_tuple(bound_of(now.cap_bytes), bound_of(now.limit_bytes));
}

void put(nb::dict& into, const char* name, const Gauge& gauge) {
  const std::string prefix = name;
  into[nb::str((prefix + ".current").c_str())] = gauge.current();
  into[nb::str((prefix + ".peak").c_str())] = gauge.peak();
}

nb::dict statistics() {
  const Account& account = allocator::account();
  nb::dict found;
  put(found, "live_bytes", account.live);
  put(found, "held_bytes", account.held);
  put(found, "recycled_bytes", account.recycled);
  put(found, "small_bytes", account.small);
  put(found, "external_bytes", account.external);
  found["allocations"] = account.allocations.value();
  found["small_allocations"] = account.small_allocations.value();
  found["frees"] = account.frees.value();
  found["hits"] = account.hits.value();
  found["assembled"] = account.assembled.value();
  found["resized"] = account.resized.value();
  found["moved_bytes"] = account.moved_bytes.value();
  found["fresh_bytes"] = account.fresh_bytes.value();
  found["returned_bytes"] = account.returned_bytes.value();
  found["returned_blocks"] = account.returned_blocks.value();
  found["emptied_for_limit"] = account.emptied.value();
  found["reclaims"] = account.reclaims.value();
  found["refusals"] = account.refusals.value();
  found["overdrafts"] = account.overdrafts.value();
  found["overdraft_bytes"] = account.overdraft_bytes.value();
  found["live_blocks.large"] = allocator::surviving_blocks();
  found["live_blocks.small"] = allocator::small_blocks();
  return found;
}

nb::list live_blocks() {
  nb::list found;
  for (const LiveBlock& block : allocator::live_blocks()) {
    found.append(nb::make_tuple(uint64_t(block.address), block.bytes, block.held_bytes, block.order,
                                block.label));
  }
  return found;
}

nb::tuple recorded_events() {
  uint64_t dropped = 0;
  nb::list found;
  for (const Event& event : allocator::recorded_events(&dropped)) {
    found.append(nb::make_tuple(event.time_ns, event.address, event.bytes, event.label));
  }
  return nb::make_tuple(found, dropped);
}

// Nanoseconds of one allocate and release of `bytes`, without Python.
double pair_ns(uint64_t bytes, int repeats) {
  const auto start = std::chrono::steady_clock::now();
  for (int index = 0; index < repeats; ++index) {
    void* pointer = nullptr;
    if (allocator::allocate(&pointer, 64, bytes, false) != 0) return -1;
    allocator::release(pointer);
  }
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / repeats;
}

}  // namespace

void bind_allocator(nb::module_& parent) {
  nb::module_ module = parent.def_submodule("allocator");
  module.def("unsupported_reason", &allocator::unsupported_reason);
  module.def("install", &allocator::install, nb::call_guard<nb::gil_scoped_release>());
  module.def("remove", &allocator::remove, nb::call_guard<nb::gil_scoped_release>());
  module.def("refresh", &allocator::refresh);
  module.def("is_installed", &allocator::is_installed);
  module.def("set_cap", [](Bound bytes) { allocator::set_cap(bytes_of(bytes)); });
  module.def("set_limit", [](Bound bytes) { allocator::set_limit(bytes_of(bytes)); });
  module.def("settings", &settings);
  module.def("set_reclaim", &set_reclaim, nb::arg("hook").none());
  module.def("count_refusal", &allocator::count_refusal);
  module.def("refuse_after", &allocator::refuse_after, nb::arg("requests"));
  module.def("charge_external", &allocator::charge_external);
  module.def("discharge_external", &allocator::discharge_external);
  module.def("trim", [](Bound bytes) { return allocator::trim(bytes_of(bytes)); });
  module.def("drop_unwinding_tables", &allocator::drop_unwinding_tables);
  module.def("drop_library_pages", &allocator::drop_library_pages);
  module.def("statistics", &statistics);
  module.def("refusals", [] { return allocator::account().refusals.value(); });
  module.def("overdraft_bytes", [] { return allocator::account().overdraft_bytes.value(); });
  // The most bytes in use since the last call, and those in use now.
  module.def("take_watermark", [] {
    Account& account = allocator::account();
    const uint64_t now = account.in_use();
    return nb::make_tuple(account.watermark.exchange(now), now);
  });
  module.def("reset_peaks", [] { allocator::account().reset_peaks(); });
  module.def("intern_label", &allocator::intern_label);
  module.def("label_text", &allocator::label_text);
  module.def("set_label", &allocator::set_label);
  module.def("live_blocks", &live_blocks);
  module.def("record_events", &allocator::record_events);
  module.def("recorded_events", &recorded_events);
  module.def("address_range", &allocator::address_range);
  module.def("pair_ns", &pair_ns);
}

}  // namespace daf
