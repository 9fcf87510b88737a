#include <nanobind/nanobind.h>

#include "bindings/bindings.h"
#include "codecs/rotated_constants.h"
#include "threads/threads.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  // The traceback of an uncaught error keeps its objects until the process ends: no leak.
  nb::set_leak_warnings(false);
  module.attr("FORMAT_VERSION") = 4;
  module.attr("ROTATED_CONSTANTS") =
      nb::make_tuple(daf::integer_length, daf::scale_unit, daf::coefficient_multiplier,
                     daf::between_rounds_shift, daf::peaked_factor);
  module.def("team_threads", &daf::team_threads);
  daf::bind_kernels(module);
  daf::bind_allocator(module);
  daf::bind_pool(module);
}
