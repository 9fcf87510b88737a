// The allocator's part of the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace daf {

void bind_allocator(nanobind::module_& module);

}  // namespace daf
