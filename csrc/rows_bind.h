// Python's way to the backward of a normalisation of rows (rows_bind.cpp).
#pragma once

#include <nanobind/nanobind.h>

namespace daf {

void bind_rows(nanobind::module_& module);

}  // namespace daf
