// The part of the extension module that measures: ranges and sums.
#pragma once

#include <nanobind/nanobind.h>

namespace daf {

void bind_measure(nanobind::module_& module);

}  // namespace daf
