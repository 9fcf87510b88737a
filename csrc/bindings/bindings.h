// Each part adds its functions to the extension module.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace daf {

// Bytes of which the largest number stands for no bound: None.
inline nanobind::object bytes_or_none(uint64_t bytes) {
  return bytes == ~uint64_t(0) ? nanobind::none() : nanobind::object(nanobind::int_(bytes));
}

inline uint64_t bytes_or_no_limit(nanobind::handle bytes) {
  return bytes.is_none() ? ~uint64_t(0) : nanobind::cast<uint64_t>(bytes);
}

void bind_allocator(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_pool(nanobind::module_& module);

}  // namespace daf
