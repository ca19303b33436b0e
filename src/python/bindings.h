#pragma once

#include <nanobind/nanobind.h>

namespace ballast::python {

// Functions that each add a part of the package to the extension module.

/// Adds the states and updates of the optimizers.
void bind_optimizer(nanobind::module_& module);
/// Adds files and futures, and ends them at the interpreter's exit.
void bind_aio(nanobind::module_& module);
/// Adds `python -m ballast`, plan and train.
void bind_program(nanobind::module_& module);

}  // namespace ballast::python
