// Python's way to the fused normalisation's kernels (norm_bind.cpp).
#pragma once

#include <nanobind/nanobind.h>

namespace daf {

void bind_norm(nanobind::module_& module);

}  // namespace daf
