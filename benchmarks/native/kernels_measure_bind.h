// The measuring part of the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace daf {

void bind_kernels_measure(nanobind::module_& module);

}  // namespace daf
