#include <nanobind/nanobind.h>

NB_MODULE(_native, module) { module.attr("FORMAT_VERSION") = 1; }
