// Each part adds its functions to the extension module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

namespace daf {

// A bound in bytes, to C++ the largest number where there is none: None.
using Bound = std::optional<uint64_t>;

inline Bound bound_of(uint64_t bytes) { return bytes == ~uint64_t(0) ? Bound() : bytes; }
inline uint64_t bytes_of(Bound bound) { return bound.value_or(~uint64_t(0)); }

void bind_allocator(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_pool(nanobind::module_& module);

}  // namespace daf
