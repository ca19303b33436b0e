#pragma once

#include <nanobind/nanobind.h>

namespace ballast::python {

/// Makes ballast::Error the exception of ballast.errors for its category. Python errors keep their
/// types.
void bind_errors(nanobind::module_& module);

}  // namespace ballast::python
