// The pool's part of the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace daf {

void bind_pool(nanobind::module_& module);

}  // namespace daf
