// Each part adds its functions to the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace daf {

void bind_allocator(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_pool(nanobind::module_& module);

}  // namespace daf
