// The paged kernels' part of the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace daf {

void bind_pages(nanobind::module_& module);

}  // namespace daf
